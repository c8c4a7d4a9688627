"""Tokens that travel to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..state import ContextGroup

Run = Callable[[torch.Tensor, list[int]], torch.Tensor]
ThroughExperts = Callable[[torch.Tensor, torch.Tensor, int, ContextGroup, Run], torch.Tensor]
"""Functions with the signature of `through_experts`."""


def through_experts(
    rows: torch.Tensor,
    experts: torch.Tensor,
    n_experts: int,
    group: ContextGroup,
    run: Run,
) -> torch.Tensor:
    """`run` of each row by the rank that holds its expert, [N, H] in the order of `rows`; rank r holds the r-th part.

    A rank that gets no row runs nothing, but takes part in both exchanges, forward and backward: the others wait.

    Args:
        rows: [N, H], sorted by expert.
        experts: LongTensor [N], ascending, of all experts of the layer.
        n_experts: experts of the layer, on all ranks together.
        run: given rows [M, H] sorted by own expert, and how many each own expert has; returns [M, H'], which must
            hang on the rows' graph even where there are none.
    """
    counts = experts.bincount(minlength=n_experts).view(group.size, -1)
    arriving = group.exchange(counts)  # [W, own experts], by the rank that they come from
    n_sent, n_received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    received = _Exchange.apply(rows, n_sent, n_received, group)
    n_own = arriving.shape[1]
    which = torch.arange(n_own, device=rows.device).repeat(group.size).repeat_interleave(arriving.flatten())
    order = which.argsort(stable=True)
    results = run(received[order], arriving.sum(0).tolist())
    returned: torch.Tensor = _Exchange.apply(results[order.argsort()], n_received, n_sent, group)
    return returned


class _Exchange(torch.autograd.Function):
    """The first `n_sent[0]` rows go to rank 0, and so on; gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, n_sent: list[int], n_received: list[int], group: ContextGroup
    ) -> torch.Tensor:
        ctx.n_sent, ctx.n_received, ctx.group = n_sent, n_received, group
        return group.exchange_uneven(x, n_sent, n_received)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return ctx.group.exchange_uneven(grad_outputs[0], ctx.n_received, ctx.n_sent), None, None, None
