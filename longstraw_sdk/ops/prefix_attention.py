"""Softmax attention of new tokens over a resident prefix and causally over themselves.

Both parts share one softmax. Nothing of the size of the prefix is kept between forward and backward, and gradients of
prefix rows are added in place to their accumulators instead of travelling through autograd. What computes a part is an
`AttentionOperator`; this module puts parts together, over the ranks of a context too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..state.resident import PagedView
from .attention_choice import choose_attention
from .attention_parts import AttentionOperator, Gradients, Part, merge_parts
from .autocast import without_autocast


class Recall:
    """What attention found in a forward, for the recomputation of a checkpointed layer, which need not attend again.

    Keeps the output [B, Hq, T, Dv] and the log-sum-exp of one layer from the forward to the layer's backward.
    """

    def __init__(self) -> None:
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        # The returned tensor itself would hold the graph, and the graph this object.
        self._found = out.detach(), lse

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        found, self._found = self._found, None
        return found


def prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: PagedView | None,
    scale: float,
    recall: Recall | None = None,
) -> torch.Tensor:
    """Attention output [B, Hq, T, Dv] of T new tokens.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, L, D] and [B, Hkv, L, Dv], the new rows; Hq is a multiple of Hkv. L >= T: the first L - T
            rows precede the first query (what each row decoded so far), the rest is causal.
        view: the resident rows that every one of the B rows may attend to, or None. If it is split, the T new tokens
            are this rank's slice, L = T, and every rank of the context calls with equal shapes.
        scale: factor on the scores.
        recall: shared by the forward and the recomputation of a checkpointed layer, and by nothing else.

    The result has the dtype of `query`; the arithmetic is that of the operator that `choose_attention` picks.
    """
    kept = recall if torch.is_grad_enabled() else None
    out: torch.Tensor = _PrefixAttention.apply(query, key, value, view, scale, kept)
    return out


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: PagedView | None,
        scale: float,
        recall: Recall | None,
    ) -> torch.Tensor:
        operator = choose_attention(query, value)
        known = None if recall is None else recall.take()
        out, lse = _attend(operator, query, key, value, view, scale) if known is None else known
        if recall is not None and known is None:
            recall.keep(out, lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.view, ctx.scale, ctx.operator = view, scale, operator
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        view, scale, operator = ctx.view, ctx.scale, ctx.operator
        q, out, d_out = (_grouped(x, key) for x in (query, out, grad_outputs[0]))
        k, v = (_seen(_heads_first(x), view) for x in (key, value))
        delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [Hkv, B, g, T]
        row = Gradients(d_out, lse, delta, out)
        d_q, d_k, d_v = operator.back_causally(q, k, v, row, scale)
        if view is not None:
            view.mark_gradient()
            row = _all_rows(row, view, with_out=operator.pages_need_out(view))
            d_q += _own_queries(operator.back_to_pages(_all_queries(q, view), row, view, scale), q, view)
            d_k, d_v = (_own_rows(x, key.shape[2], view) for x in (d_k, d_v))
        d_query = _ungrouped(d_q).to(query.dtype)
        return d_query, d_k.transpose(0, 1).to(key.dtype), d_v.transpose(0, 1).to(value.dtype), None, None, None


def _attend(
    operator: AttentionOperator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: PagedView | None,
    scale: float,
) -> Part:
    """Output [B, Hq, T, Dv] in the dtype of `query`, and log-sum-exp [Hkv, B, g, T]."""
    q = _grouped(query, key)
    k, v = (_seen(_heads_first(x), view) for x in (key, value))
    of_pages: Callable[[], list[Part]] = list
    if view is not None:  # first, so that what was found travels while the new rows are attended to
        found = operator.attend_to_pages(_all_queries(q, view), view, scale, v.shape[-1])
        of_pages = _start_return(q, found, view)
    parts = [operator.attend_causally(q, k, v, scale)]
    out, lse = merge_parts(parts + of_pages())
    return _ungrouped(out).to(query.dtype), lse


# Over the ranks of a context. New tokens are split by position, so each rank has its own queries and new keys, and the
# prefix lies on all ranks: queries travel to the pages, and what they found there travels back. Inputs travel in their
# own dtype and sums in the accumulation dtype.


def _seen(x: torch.Tensor, view: PagedView | None) -> torch.Tensor:
    """[Hkv, B, L, D] -> all new rows up to this rank's last one, from all ranks."""
    if view is None or not view.split:
        return x
    assert view.context is not None
    return view.context.gather(x)[: view.context.rank + 1].permute(1, 2, 0, 3, 4).flatten(2, 3)


def _own_rows(d_x: torch.Tensor, n_own: int, view: PagedView) -> torch.Tensor:
    """The reverse of `_seen` for gradients: summed over the ranks that saw a row."""
    if not view.split:
        return d_x
    assert view.context is not None
    size = view.context.size
    padded = torch.nn.functional.pad(d_x, (0, 0, 0, size * n_own - d_x.shape[2]))
    return view.context.sum_scatter(padded.unflatten(2, (size, n_own)).movedim(2, 0))


def _all_queries(own: torch.Tensor, view: PagedView) -> torch.Tensor:
    """[Hkv, B, g, T, D] -> [Hkv, N, D], those of the queries of all ranks."""
    if not view.split:
        return own.flatten(1, 3)
    assert view.context is not None
    return view.context.gather_tokens(own.flatten(1, 3))


def _all_rows(own: Gradients, view: PagedView, *, with_out: bool) -> Gradients:
    """What belongs to the queries of `_all_queries`."""
    lse, delta = (_all_queries(x[..., None], view)[..., 0] for x in (own.lse, own.delta))
    out = _all_queries(own.out, view) if with_out and own.out is not None else None
    return Gradients(_all_queries(own.d_out, view), lse, delta, out)


def _own_queries(d_flat: torch.Tensor, q: torch.Tensor, view: PagedView) -> torch.Tensor:
    """The reverse of `_all_queries` for gradients: each rank's pages contributed to every query."""
    if view.context is None:
        return d_flat.view_as(q)
    if view.split:
        return view.context.sum_scatter(view.context.by_rank(d_flat)).view_as(q)
    return view.context.gather(d_flat).sum(0).view_as(q)


def _start_return(q: torch.Tensor, found: Part, view: PagedView) -> Callable[[], list[Part]]:
    """Send home what this rank's pages had for all queries; the result waits for what all pages had for its own."""
    rows = q.shape[:-1]

    def parts(outs: Iterable[torch.Tensor], sums: Iterable[torch.Tensor]) -> list[Part]:
        return [(out.reshape(*rows, -1), lse.reshape(rows)) for out, lse in zip(outs, sums, strict=True)]

    context = view.context
    if context is None:
        return lambda: parts(*([x] for x in found))
    if not view.split:
        return lambda: parts(*(context.gather(x) for x in found))
    # Not as one tensor: rows of D + 1 numbers are not aligned.
    begun = [context.start_exchange(context.by_rank(x)) for x in found]
    return lambda: parts(*(finish() for finish in begun))


def _grouped(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, Hq, T, D] -> contiguous [Hkv, B, g, T, D]."""
    batch, n_heads, n_tokens, dim = x.shape
    n_kv_heads = key.shape[1]
    return x.reshape(batch, n_kv_heads, n_heads // n_kv_heads, n_tokens, dim).transpose(0, 1).contiguous()


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    """[Hkv, B, g, T, D] -> [B, Hq, T, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, L, D] -> [Hkv, B, L, D]."""
    return x.transpose(0, 1)
