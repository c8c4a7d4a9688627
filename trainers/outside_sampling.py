"""Generation batches drawn by a `Sampler`: the policy goes out, responses come in, and who holds the devices when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from longstraw_sdk.errors import ConfigurationError, LongStrawError, SamplerError
from longstraw_sdk.rollout import Completion, RolloutRequest, Sampler

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNSUPPORTED = {"min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
"""Options of TRL that a request does not carry, with the values that leave a draw alone."""


def check_options(sampler: Sampler, args: Any, rollout_func: object) -> None:
    """Raise `ConfigurationError` for options that a sampler outside would not see."""
    set_away = [
        f"{name}={getattr(args, name)!r}" for name, stock in UNSUPPORTED.items() if getattr(args, name) != stock
    ]
    if set_away:
        raise ConfigurationError(f"{', '.join(set_away)}: {sampler.name} is not asked for it; leave it unset")
    if args.prefix_adapter == "frozen":
        raise ConfigurationError(
            f"prefix_adapter='frozen': {sampler.name} lets LoRA act on the prompt too, so it would draw from another "
            "policy than the one that is trained; use prefix_adapter='live', or sample from the resident state"
        )
    if rollout_func is not None:
        raise ConfigurationError("rollout_func and sampler both draw responses; give one of them")
    if not args.vllm_importance_sampling_correction:
        raise ConfigurationError(
            "vllm_importance_sampling_correction=False: without the trainer's log-probs of what a sampler drew nobody "
            "would notice that it serves another policy; leave it on"
        )


def check_contexts(sampler: Sampler, n_contexts: int, *, spread: bool) -> None:
    """Raise `ConfigurationError` where contexts, which draw at their own times, would be in each other's way."""
    if n_contexts > 1 and (sampler.exclusive or spread):
        what = "experts spread over ranks" if spread else "a sampler that gives its devices up between drawings"
        raise ConfigurationError(
            f"{n_contexts} contexts (ranks with prompts of their own) and {what}: contexts draw at their own times; "
            "use one context"
        )


def once_each(prompt_ids: Sequence[Sequence[int]], n: int) -> tuple[list[tuple[int, ...]], int]:
    """The prompts of a batch that has each `n` times in a row, and `n`; all of them and 1 if it has not."""
    rows = [tuple(ids) for ids in prompt_ids]
    groups = [rows[i : i + n] for i in range(0, len(rows), n)]
    if all(len(group) == n and len(set(group)) == 1 for group in groups):
        return [group[0] for group in groups], n
    return rows, 1


def drawn(sampler: Sampler, request: RolloutRequest) -> list[Completion]:
    """The responses of all prompts, one after the other."""
    logger.info("%s: sampler takes its devices", request.request_id)
    sampler.acquire()
    try:
        return [completion for row in sampler.sample(request) for completion in row]
    finally:
        sampler.release()
        logger.info("%s: sampler gave its devices back", request.request_id)


@contextmanager
def parked(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[None]:
    """Within the block weights and optimizer state are in host memory and the device is free but for its context."""
    logger.info("trainer leaves %s", device)
    model.to("cpu")
    _move_state(optimizer, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)
        _move_state(optimizer, device)
        logger.info("trainer is back on %s", device)


def _move_state(optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    for state in {} if optimizer is None else optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:  # step counts stay on the CPU
                state[name] = value.to(device)


def from_first(group: Any, run: Callable[[], T]) -> T:
    """What `run` returns on the first rank of `group`, on all of them; its error is raised on all of them, too.

    `group` is a process group, or None for one process.
    """
    if group is None:
        return run()
    box: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            box = [run(), None]
        except Exception as error:  # whatever it is, the others wait for an answer
            told = isinstance(error, LongStrawError)
            box = [None, error if told else SamplerError(f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result


def check_difference(sampler: Sampler, output: dict[str, Any], gather: Callable[..., Any]) -> float:
    """Mean absolute difference, in nats, of the sampler's log-probs from the trainer's; raises where it is too large.

    Args:
        output: TRL's generation batch.
        gather: puts the tensors of all processes together.
    """
    mask = output["completion_mask"].bool()
    if "tool_mask" in output:
        mask &= output["tool_mask"].bool()
    apart = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()[mask]
    total, n = gather(torch.stack([apart.double().sum(), mask.sum().double()])).view(-1, 2).sum(0).tolist()
    found = total / max(n, 1)
    if not found <= sampler.max_logprob_difference:
        raise SamplerError(
            f"log-probs of {sampler.name} differ from the trainer's by {found:.3g} nats a token on average (allowed: "
            f"{sampler.max_logprob_difference:g}): it does not serve the policy that was exported, or draws at another "
            "temperature, precision or positions. Nothing was trained on these responses"
        )
    return found
