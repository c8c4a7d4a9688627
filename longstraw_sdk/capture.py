"""Capture: one chunked forward of the prefix without autograd, which fills the resident state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from .adapter import StateView
from .bound import BoundModel, progress
from .errors import NumericsError
from .state import PagePool, Placement, RecurrentSpec, ResidentState, StateSpec


def min_chunk_tokens(specs: Iterable[StateSpec]) -> int:
    """2 where a layer is recurrent, otherwise 1.

    One-token forwards take another kernel in recurrent layers, one whose backward flash-linear-attention does not
    have. From an empty state even one token takes the chunk kernel, so a prefix of a single token is its own chunk.
    """
    return 2 if any(isinstance(spec, RecurrentSpec) for spec in specs) else 1


def chunk_bounds(n_tokens: int, chunk_tokens: int, min_tokens: int) -> list[int]:
    """Offsets 0 .. n_tokens of the chunks. A last chunk of less than `min_tokens` joins the chunk before it."""
    bounds = [*range(0, n_tokens, chunk_tokens), n_tokens]
    if len(bounds) > 2 and bounds[-1] - bounds[-2] < min_tokens:
        del bounds[-2]
    return bounds


@torch.no_grad()
def capture_prefix(
    bound: BoundModel,
    prefix_ids: torch.Tensor,
    pool: PagePool,
    owner: str,
    *,
    chunk_tokens: int,
    keep_boundaries: bool,
    placement: Placement | None = None,
) -> ResidentState:
    """The resident state of `prefix_ids` [P - 1]. On any failure every page is given back.

    Args:
        keep_boundaries: keep the recurrent state at every chunk boundary, which the sweep needs; otherwise only the
            last one.
        placement: where pages live if not beside the model.
    """
    where = Placement(bound.device) if placement is None else placement
    state = ResidentState(bound.specs, prefix_ids, pool, owner, where.device, where.link)
    try:
        bounds = chunk_bounds(len(prefix_ids), chunk_tokens, min_chunk_tokens(bound.specs))
        with progress(len(prefix_ids), "capture") as advance:
            for start, end in pairwise(bounds):
                out = bound.adapter.forward(
                    bound.base, prefix_ids[None, start:end], StateView(state, state.last_boundary)
                )
                state.append_chunk(end - start, out.produced, keep_boundaries=keep_boundaries)
                advance(end - start)
        if len(prefix_ids) and not bool(out.hidden[:, -1].isfinite().all()):
            raise NumericsError(
                f"the prompt's hidden state is not finite after {len(prefix_ids)} tokens; check the weights, the dtype "
                "and whether the positions are within what the model was trained for"
            )
    except BaseException:
        state.release()
        raise
    return state
