"""Replay: forward of `[prompt[-1]] + response[:-1]` against the resident state, with the graph of the response only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .adapter import StateView
from .bound import BoundModel
from .ops import selective_log_probs
from .state import ContextGroup, GatherReplicated, ResidentState, TokenSlice
from .types import ReplayOutput, accumulation_dtype


def pack_rows(lengths: Sequence[int], replay_tokens: int | None) -> list[list[int]]:
    """Group row indices so that each pack, padded to its longest row, holds at most `replay_tokens` tokens.

    Rows of similar length go together. `None` replays one row at a time; a row longer than the budget goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if replay_tokens is None:
        return [[i] for i in order]
    packs: list[list[int]] = []
    for i in order:
        if packs and (len(packs[-1]) + 1) * lengths[packs[-1][0]] <= replay_tokens:
            packs[-1].append(i)
        else:
            packs.append([i])
    return packs


def replay_rows(
    bound: BoundModel,
    state: ResidentState,
    last_token: torch.Tensor,
    rows: Sequence[torch.Tensor],
    *,
    accumulate: bool,
    temperature: float,
) -> list[ReplayOutput]:
    """Log-probs and entropies of all tokens of each row.

    Args:
        last_token: LongTensor [], `prompt[-1]`, which predicts the first response token and opens every replay.
        rows: responses, LongTensors [R_i] with R_i >= 1; several are packed as rows of one batch, padded on the right,
            where causality keeps the padding from mattering.
        accumulate: let the backward pass collect gradients of the resident state (full scope).
    """
    width = max(state.min_forward_tokens, *(len(row) for row in rows))
    inputs = last_token.repeat(len(rows), width)
    for i, row in enumerate(rows):
        inputs[i, 1 : len(row)] = row[:-1]
    view = StateView(state, state.last_boundary, n_rows=len(rows), accumulate=accumulate)
    hidden = bound.adapter.forward(bound.base, inputs, view).hidden
    if state.context is not None:
        return _gather_scores(bound, state.context, state.slice_of(width), hidden, rows, temperature)
    scored = torch.cat([hidden[i, : len(row)] for i, row in enumerate(rows)])
    logps, entropies = selective_log_probs(scored, torch.cat(list(rows)), bound.head, bound.vocab_size, temperature)
    lengths = [len(row) for row in rows]
    return [ReplayOutput(*pair) for pair in zip(logps.split(lengths), entropies.split(lengths), strict=True)]


def _gather_scores(
    bound: BoundModel,
    context: ContextGroup,
    part: TokenSlice,
    hidden: torch.Tensor,
    rows: Sequence[torch.Tensor],
    temperature: float,
) -> list[ReplayOutput]:
    """The same on every rank, from `hidden` [B, width, H] of each rank's slice."""
    own = [row[part.start : part.start + part.width] for row in rows]
    padded = hidden.new_zeros(2, len(rows), part.width, dtype=accumulation_dtype(hidden.dtype))
    if any(len(row) for row in own):
        scored = torch.cat([hidden[i, : len(row)] for i, row in enumerate(own)])
        found = selective_log_probs(scored, torch.cat(own), bound.head, bound.vocab_size, temperature)
        taken = torch.zeros(len(rows), part.width, dtype=torch.bool, device=hidden.device)
        for i, row in enumerate(own):
            taken[i, : len(row)] = True
        padded = padded.masked_scatter(taken, torch.stack(found))
    # The sum is zero. It ties a rank without a token to its forward, whose backward the other ranks wait for.
    padded = padded + hidden[:, :0].sum().to(padded.dtype)
    logps, entropies = GatherReplicated.apply(padded, context).permute(1, 2, 0, 3).flatten(2)
    return [ReplayOutput(logps[i, : len(row)], entropies[i, : len(row)]) for i, row in enumerate(rows)]
