"""Sweep: the reverse pass over the prefix chunks that turns gradients of the resident state into LoRA gradients."""

from __future__ import annotations

import torch

from .adapter import StateView
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
    owned = state.owned[boundary - 1], state.owned[boundary]
    cotangents = {key: paged.cotangents(*owned) for key, paged in state.paged.items()}
    # Taken before the backward below, which collects the gradient of the opening boundary in the same place.
    cotangents |= {key: recurrent.take_cotangents() for key, recurrent in state.recurrent.items()}

    view = StateView(state, boundary - 1, accumulate=True, state_only=True)
    out = bound.adapter.forward(bound.base, state.prefix_ids[None, start:end], view)
    produced = dict(out.produced)
    for key, paged in state.paged.items():
        produced[key] = paged.first_rows(produced[key], owned[1] - owned[0])
    roots, gradients = [], []
    for key, by_name in cotangents.items():
        for name, cotangent in by_name.items():
            root = produced[key][name]
            if root.requires_grad:
                roots.append(root)
                gradients.append(cotangent.to(root.device, root.dtype))
    if roots and bound.is_sharded and out.hidden.requires_grad:
        # FSDP2 fetches a layer's weights for its backward when a gradient of the layer's output comes in.
        roots.append(out.hidden)
        gradients.append(torch.zeros_like(out.hidden))
    if roots:
        torch.autograd.backward(roots, gradients)
