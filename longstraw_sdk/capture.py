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
    PagedSpec,
    PagePool,
    Placement,
    RecurrentSpec,
    ResidentState,
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
    try:
        with progress(len(prefix_ids), "capture") as advance:
            for start, end in pairwise(bounds):
                view = StateView(state, state.last_boundary, state_only=True)
                out = bound.adapter.forward(bound.base, prefix_ids[None, start:end], view)
                state.append_chunk(end - start, out.produced, keep_boundaries=keep_boundaries)
                advance(end - start)
        if len(prefix_ids) and not _is_finite(state, out):
            raise NumericsError(
                f"the prompt's hidden state is not finite after {len(prefix_ids)} tokens; check the weights, the dtype "
                "and whether the positions are within what the model was trained for"
            )
    except BaseException:
        state.release()
        raise
    return state


def _bytes_of(
    specs: Sequence[StateSpec], n_tokens: int, page_tokens: int, n_boundaries: int
) -> tuple[dict[int, tuple[int, int]], int]:
    """Per layer, bytes of the pages of `n_tokens` and of their gradients; and bytes of all recurrent states.

    Without boundaries to keep, no gradient of the prompt is collected and the last state is the only one.
    """
    layers: dict[int, tuple[int, int]] = {}
    others = 0
    for spec in specs:
        if isinstance(spec, PagedSpec):
            pages, gradients = layers.get(spec.layer, (0, 0))
            pages += spec.resident_bytes(n_tokens, page_tokens)
            gradients += spec.gradient_bytes(n_tokens, page_tokens) if n_boundaries else 0
            layers[spec.layer] = (pages, gradients)
        elif isinstance(spec, RecurrentSpec):
            others += max(1, n_boundaries) * spec.bytes_per_boundary
    return layers, others


def _is_finite(state: ResidentState, out: DecoderOutput) -> bool:
    """Whether all that the last chunk computed is finite, on all ranks; padding is a copy of a token of the text."""
    tensors = [out.hidden, *(tensor for by_name in out.produced.values() for tensor in by_name.values())]
    own = bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())
    return own if state.context is None else state.context.agree(own)
