"""States that cross the ranks of a context: recurrent matrices and convolution tails of a forward split by position.

A gated delta rule maps the state at the start of a slice to the state at its end by an affine map, `S -> A @ S + B`
(Gated Delta Networks, arXiv 2412.06464, equation 10, multiplied out over the slice). Every rank computes the map of its
own slice, all maps are gathered, and each rank applies those before it: no rank waits for the one before it to finish.

What enters (the state before the forward) and what leaves (the state behind it) is the same on every rank, and so are
their gradients; what a rank's own slice starts from is its own.
"""

from __future__ import annotations

from typing import Any

import torch

from ..state import ContextGroup
from .autocast import without_autocast


def carry_state(
    affine: torch.Tensor, initial: torch.Tensor, context: ContextGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state that this rank's slice starts from, and the one behind all slices.

    Args:
        affine: [..., Dk, Dv + Dk], B and A of this rank's slice beside each other: the end of the slice when it starts
            from zero, and what it multiplies the state by.
        initial: [..., Dk, Dv], the state before the first slice, equal on all ranks.
    """
    start, end = _CarryState.apply(affine, initial, context)
    return start, end


class _CarryState(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, affine: torch.Tensor, initial: torch.Tensor, context: ContextGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states, width = [initial], initial.shape[-1]
        for own in context.gather(affine):
            states.append(own[..., width:] @ states[-1] + own[..., :width])
        ctx.context = context
        # Those of all ranks would not fit beside many layers. A copy: the view alone would keep the whole map alive.
        ctx.save_for_backward(affine[..., width:].clone(), states[context.rank])
        return states[context.rank].clone(), states[-1]

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        transition, start = ctx.saved_tensors
        d_start, d_state = grad_outputs
        width = d_start.shape[-1]
        gathered = ctx.context.gather(torch.cat([d_start, transition], -1))
        for s in reversed(range(ctx.context.size)):
            if s == ctx.context.rank:
                d_affine = torch.cat([d_state, d_state @ start.transpose(-1, -2)], -1)
            d_state = gathered[s, ..., width:].transpose(-1, -2) @ d_state + gathered[s, ..., :width]
        return d_affine, d_state, None


def carry_tail(
    columns: torch.Tensor, initial: torch.Tensor, n_real: list[int], context: ContextGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last K columns before this rank's slice, and the last K behind all slices.

    Args:
        columns: [B, C, T], this rank's slice, padding at its end.
        initial: [B, C, K], the columns before the first slice, equal on all ranks.
        n_real: columns of each rank's slice without padding.
    """
    before, end = _CarryTail.apply(columns, initial, n_real, context)
    return before, end


class _CarryTail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, columns: torch.Tensor, initial: torch.Tensor, n_real: list[int], context: ContextGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = initial.shape[-1]
        widths = [min(size, n) for n in n_real]
        ctx.context, ctx.widths, ctx.n_real, ctx.n_columns = context, widths, n_real[context.rank], columns.shape[-1]
        mine = columns[..., ctx.n_real - widths[context.rank] : ctx.n_real]
        pieces = context.gather(torch.nn.functional.pad(mine, (size - mine.shape[-1], 0)))
        known = [initial, *(piece[..., size - width :] for piece, width in zip(pieces, widths, strict=True))]
        before = torch.cat(known[: context.rank + 1], -1)[..., -size:]
        return before.contiguous(), torch.cat(known, -1)[..., -size:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        d_before, d_end = grad_outputs
        context, widths = ctx.context, ctx.widths
        size = d_end.shape[-1]
        d_known = d_end.new_zeros(*d_end.shape[:-1], size + sum(widths))
        d_known[..., -size:] += d_end
        last = size
        for rank, d_rank in enumerate(context.gather(d_before)):
            d_known[..., last - size : last] += d_rank
            if rank == context.rank:
                first = last
            last += widths[rank]
        d_columns = d_end.new_zeros(*d_end.shape[:-1], ctx.n_columns)
        width = widths[context.rank]
        d_columns[..., ctx.n_real - width : ctx.n_real] = d_known[..., first : first + width]
        return d_columns, d_known[..., :size], None, None
