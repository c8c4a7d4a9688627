"""Out of memory: what may be tried again in smaller pieces, and what the planner advises where nothing may."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, TypeVar

import torch

from .errors import LongStrawError

if TYPE_CHECKING:
    from .session_core import SessionCore

logger = logging.getLogger(__name__)

T = TypeVar("T")
GIB = 2**30

_SIGNS = (
    "CUDA error: out of memory",  # also of pinned host memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device or the host had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def in_smaller_packs(
    packs: Sequence[Sequence[int]], run: Callable[[Sequence[int]], T], core: SessionCore
) -> Iterator[tuple[Sequence[int], T]]:
    """Each pack with its `run(pack)`; a pack that memory does not hold is halved, down to one row.

    Only for a `run` that leaves nothing behind when it fails, as a forward does. Ranks that share a prompt or experts
    would no longer run the same passes, so there the error goes to the caller.
    """
    waiting = list(packs)
    while waiting:
        pack = waiting.pop(0)
        try:
            result = run(pack)
        except RuntimeError as error:
            if not (is_out_of_memory(error) and core.is_alone and len(pack) > 1):
                raise
        else:
            yield pack, result
            del result
            continue
        # Outside of the handler, whose traceback holds what the pass had computed.
        half = len(pack) // 2
        waiting[:0] = [pack[:half], pack[half:]]
        give_back(core)
        logger.warning(
            "out of memory in a pack of %d responses: they run as %d and %d", len(pack), half, len(pack) - half
        )


def give_back(core: SessionCore) -> None:
    """Return what no tensor uses to the device, which another size of block could not take."""
    core.pool.trim()
    if core.bound.device.type == "cuda":
        torch.cuda.empty_cache()


def advise(
    error: BaseException, core: SessionCore, phase: str, *, prompt_tokens: int, response_tokens: int, group: int
) -> None:
    """Add to an error of this kind what was held and what the planner advises. Does nothing to other errors."""
    if not is_out_of_memory(error):
        return
    error.add_note(
        f"LongStraw: out of memory in {phase} behind a prompt of {prompt_tokens:,} tokens (gradient_scope="
        f"{core.gradient_scope!r}, chunk_tokens={core.chunk_tokens}, replay_tokens={core.replay_tokens}; pages hold "
        f"{core.pool.live_bytes / GIB:.2f} GiB). {_planned(core, prompt_tokens, response_tokens, group)}"
    )


def _planned(core: SessionCore, prompt_tokens: int, response_tokens: int, group: int) -> str:
    from .planner import PlanRequest, plan
    from .planner.devices import memory_of
    from .planner.model_facts import facts_of

    n_ranks = 1 if core.context is None else core.context.size
    base = core.bound.base
    request = PlanRequest(
        model=base.config.model_type,
        gpus=n_ranks,
        gpu_bytes=memory_of(core.bound.device),
        prompt_tokens=max(2, prompt_tokens),
        response_tokens=response_tokens,
        group=group,
        scope=core.gradient_scope,
        prefix_adapter=core.prefix_adapter,
        context_parallel_size=n_ranks,
    )
    try:
        # A copy: a model that is made of a config writes to it.
        found = plan(request, facts=facts_of(request.model, deepcopy(base.config), base.dtype, request.lora_rank))
    except (LongStrawError, ValueError, KeyError, OSError) as error:
        return f"The planner cannot say what would fit ({error}); see `longstraw plan`."
    options = found.options
    peak = f"{found.peak_bytes / GIB:.1f} GiB with chunk_tokens={options.chunk_tokens}, replay_tokens="
    peak += f"{options.replay_tokens}, state_device={found.config_arguments['state_device']!r}"
    if found.fits:
        return f"By the planner it needs {peak}: set these, and see that nothing else holds memory of the device."
    return f"By the planner it does not fit: {peak}. " + " ".join(found.advice)
