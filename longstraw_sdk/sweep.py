"""Sweep: the reverse pass over the prefix chunks that turns gradients of the resident state into LoRA gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .adapter import DecoderOutput, StateView
from .bound import BoundModel, progress
from .state import ResidentState


def sweep_prefix(bound: BoundModel, state: ResidentState) -> int:
    """Back-propagate everything the replays collected through the prefix; returns the tokens swept.

    From the last chunk to the first: forward the chunk again from the state at its opening boundary, then one backward
    from the rows it produced and its closing state, with the collected gradients as cotangents. That backward adds to
    the LoRA gradients, to the rows of earlier chunks and to the state at the opening boundary. When a chunk's turn
    comes, all later readers of its rows have added their part.
    """
    with progress(state.n_tokens, "sweep") as advance, torch.enable_grad():
        for boundary in range(state.last_boundary, 0, -1):
            sweep_chunk(bound, state, boundary)
            advance(state.bounds[boundary] - state.bounds[boundary - 1])
    state.drop_accumulators()
    return state.n_tokens


def sweep_chunk(bound: BoundModel, state: ResidentState, boundary: int) -> None:
    start, end = state.bounds[boundary - 1], state.bounds[boundary]
    view = StateView(state, boundary - 1, accumulate=True, state_only=True)
    out = bound.adapter.forward(bound.base, state.prefix_ids[None, start:end], view)
    # One after the other: in float32 the gradients of all layers' rows would not be small.
    pairs = list(_roots_and_cotangents(state, boundary, out))
    if pairs and bound.is_sharded and out.hidden.requires_grad:
        # FSDP2 fetches a layer's weights for its backward when a gradient of the layer's output comes in.
        pairs.append((out.hidden, torch.zeros_like(out.hidden)))
    del out  # with it the graph of the last hidden state, which nothing here differentiates
    if pairs:
        roots, gradients = zip(*pairs, strict=True)
        del pairs
        torch.autograd.backward(roots, gradients)


def _roots_and_cotangents(
    state: ResidentState, boundary: int, out: DecoderOutput
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the chunk before `boundary` produced and its collected gradient, where it has one.

    Taken before the backward, which collects the gradient of the chunk's opening state in the same place.
    """
    first, last = state.owned[boundary - 1], state.owned[boundary]
    for key, paged in state.paged.items():
        rows = paged.first_rows(out.produced[key], last - first)
        yield from _differentiable(rows, paged.cotangents(first, last))
    for key, recurrent in state.recurrent.items():
        yield from _differentiable(out.produced[key], recurrent.take_cotangents())


def _differentiable(
    roots: Mapping[str, torch.Tensor], cotangents: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name, cotangent in cotangents.items():
        root = roots[name]
        if root.requires_grad:
            yield root, cotangent.to(root.device, root.dtype)
