"""Capture: one chunked forward of the prefix without autograd, which fills the resident state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch

from .adapter import DecoderOutput, StateView
from .bound import BoundModel, progress
from .errors import NumericsError
from .state import (
    ContextGroup,
    PagePool,
    Placement,
    ResidentState,
    StateBytes,
    StateSpec,
    min_forward_tokens,
)

logger = logging.getLogger(__name__)


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
    context: ContextGroup | None = None,
) -> ResidentState:
    """The resident state of `prefix_ids` [P - 1]. On any failure every page is given back.

    Args:
        keep_boundaries: keep the recurrent state at every chunk boundary, which the sweep needs; otherwise only the
            last one.
        placement: where pages live if not beside the model.
        context: the ranks among which the prompt is split; None if this one has all of it.
    """
    where = Placement(bound.device) if placement is None else placement
    bounds = chunk_bounds(len(prefix_ids), chunk_tokens, min_forward_tokens(bound.specs))
    n_own = -(-len(prefix_ids) // (1 if context is None else context.size))
    layers, others = _bytes_of(bound.specs, n_own, pool.page_tokens, len(bounds) - 1 if keep_boundaries else 0)
    away = where.host_layers(layers, others)
    if where.room is not None and away:
        logger.info("pages of %d of %d layers live in host memory: all do not fit", len(away), len(layers))
    state = ResidentState(bound.specs, prefix_ids, pool, owner, where.device, where.link, context, away)
    _forward_chunks(bound, state, bounds, keep_boundaries=keep_boundaries)
    return state


@torch.no_grad()
def extend_prefix(
    bound: BoundModel, state: ResidentState, prefix_ids: torch.Tensor, *, chunk_tokens: int, keep_boundaries: bool
) -> int:
    """Let `state` go on to `prefix_ids`, which begin with its own; returns the tokens forwarded.

    On any failure every page is given back. `why_not_extend` must have been None.
    """
    start = state.n_tokens
    bounds = chunk_bounds(len(prefix_ids) - start, chunk_tokens, min_forward_tokens(bound.specs))
    state.prefix_ids = prefix_ids
    _forward_chunks(bound, state, [start + offset for offset in bounds], keep_boundaries=keep_boundaries)
    return len(prefix_ids) - start


def why_not_extend(bound: BoundModel, state: ResidentState, prefix_ids: torch.Tensor) -> str | None:
    """What keeps `state` from going on to `prefix_ids`, or None."""
    n_known, n_new = state.n_tokens, len(prefix_ids) - state.n_tokens
    least = min_forward_tokens(bound.specs)
    if n_known == 0:
        return "nothing of it is resident"
    if not torch.equal(prefix_ids[:n_known], state.prefix_ids):
        same = prefix_ids[: min(n_known, len(prefix_ids))] == state.prefix_ids[: min(n_known, len(prefix_ids))]
        return f"its ids are the same for {int(same.long().cumprod(0).sum())} of {n_known} tokens only"
    if 0 < n_new < least:
        return f"{n_new} new tokens are fewer than the {least} that a forward of its recurrent layers takes"
    return None


def _forward_chunks(bound: BoundModel, state: ResidentState, bounds: Sequence[int], *, keep_boundaries: bool) -> None:
    n_new = bounds[-1] - bounds[0]
    out: DecoderOutput | None = None
    try:
        with progress(n_new, "capture") as advance:
            for start, end in pairwise(bounds):
                view = StateView(state, state.last_boundary, state_only=True)
                out = None  # what the chunk before produced must not stay: 0.6 GiB of 8,192 tokens at 27B
                out = bound.adapter.forward(bound.base, state.prefix_ids[None, start:end], view)
                state.append_chunk(end - start, out.produced, keep_boundaries=keep_boundaries)
                advance(end - start)
        if out is not None and not _is_finite(state, out):
            raise NumericsError(
                f"the prompt's hidden state is not finite after {bounds[-1]} tokens; check the weights, the dtype "
                "and whether the positions are within what the model was trained for"
            )
    except BaseException:
        state.release()
        raise


def _bytes_of(
    specs: Sequence[StateSpec], n_tokens: int, page_tokens: int, n_boundaries: int
) -> tuple[dict[int, tuple[int, int]], int]:
    """Per layer, bytes of the pages of `n_tokens` and of their gradients; and bytes of all recurrent states.

    Without boundaries to keep, no gradient of the prompt is collected and the last state is the only one.
    """
    held = StateBytes.of(specs, n_tokens, page_tokens)
    layers = {layer: (n, gradients if n_boundaries else 0) for layer, (n, gradients) in held.by_layer.items()}
    return layers, max(1, n_boundaries) * held.boundary


def _is_finite(state: ResidentState, out: DecoderOutput) -> bool:
    """Whether all that the last chunk computed is finite, on all ranks; padding is a copy of a token of the text."""
    tensors = [out.hidden, *(tensor for by_name in out.produced.values() for tensor in by_name.values())]
    own = bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())
    return own if state.context is None else state.context.agree(own)
