"""Sampling from the resident state: G rows decode behind one prefix, which is neither repeated nor recomputed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .adapter import StateView
from .bound import BoundModel
from .errors import ConfigurationError
from .state import ContextGroup, ResidentState

if TYPE_CHECKING:
    from transformers import GenerationConfig

_ALLOWED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "return_dict_in_generate": False,
}
"""The one value, beside None, of options that would replace the cache, the rows or the type of the result."""


def check_generation(config: GenerationConfig) -> None:
    """Raise `ConfigurationError` for options that cannot work on a resident cache."""
    found = [
        f"{name}={getattr(config, name)!r}"
        for name, allowed in _ALLOWED.items()
        if getattr(config, name, None) not in (None, allowed)
    ]
    if found:
        raise ConfigurationError(
            f"{', '.join(found)} cannot be used here: `n_rows` rows decode independently on the resident cache and "
            "come back as tensors; leave it unset"
        )


@torch.no_grad()
def generate_rows(
    bound: BoundModel, state: ResidentState, prompt_ids: torch.Tensor, n_rows: int, config: GenerationConfig
) -> list[torch.Tensor]:
    """`n_rows` responses, LongTensors [R_i], each ending with its first end-of-sequence token if it drew one.

    Everything that `model.generate` can do to logits (top-k, top-p, penalties, ...) works as there, since it is what
    runs; the draws come from the global random state, in the order in which it would draw for a batch of the prompt.
    """
    config = copy.deepcopy(config)
    config.use_cache = True  # unset would mean the model's own default, which trainers switch off
    cache = bound.adapter.generation_cache(bound.base, StateView(state, state.last_boundary, n_rows=n_rows))
    from .hf.attention import resident_forward
    from .hf.decode import recorded_steps

    with resident_forward(), recorded_steps(bound.base, cache, config.max_new_tokens):
        out = bound.base.generate(
            input_ids=prompt_ids.expand(n_rows, -1),
            attention_mask=torch.ones(n_rows, len(prompt_ids), dtype=torch.long, device=prompt_ids.device),
            cache=cache,
            generation_config=config,
        )
    eos = config.eos_token_id
    eos_ids = torch.tensor([] if eos is None else eos, dtype=torch.long, device=out.device).reshape(-1)
    return [_cut(row, eos_ids) for row in out[:, len(prompt_ids) :]]


def _cut(row: torch.Tensor, eos_ids: torch.Tensor) -> torch.Tensor:
    ends = torch.isin(row, eos_ids).nonzero()
    return row[: int(ends[0]) + 1] if len(ends) else row


def agree_on_random_state(context: ContextGroup, device: torch.device) -> None:
    """Continue every rank's draws from the first one's random state: all of them decode the same rows."""
    torch.set_rng_state(context.broadcast(torch.get_rng_state()))
    if device.type == "cuda":
        torch.cuda.set_rng_state(context.broadcast(torch.cuda.get_rng_state(device)), device)


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from `seed` within the block and leave the global random state as it was; None draws from the global one."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
