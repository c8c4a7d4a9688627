"""Capture: one chunked forward of the prefix without autograd, which fills the resident state."""

from __future__ import annotations

from itertools import pairwise

import torch

from .adapter import StateView
from .bound import BoundModel, progress
from .errors import NumericsError
from .state import PagePool, Placement, ResidentState


def chunk_bounds(n_tokens: int, chunk_tokens: int) -> list[int]:
    """Offsets 0 .. n_tokens of the chunks. A last chunk of one token joins the chunk before it.

    One-token forwards take another kernel in recurrent layers, one whose backward flash-linear-attention does not
    have. A prefix of a single token is its own chunk: from an empty state even that takes the chunk kernel.
    """
    bounds = [*range(0, n_tokens, chunk_tokens), n_tokens]
    if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
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
        bounds = chunk_bounds(len(prefix_ids), chunk_tokens)
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
