"""Softmax attention of new tokens over a resident prefix and causally over themselves.

Both parts share one softmax, computed block by block with the running maximum and sum of Rabe & Staats (arXiv
2112.05682) and Flash-Attention (arXiv 2205.14135). The backward recomputes every tile of probabilities from the saved
log-sum-exp of the whole row, so nothing of the size of the prefix is kept between forward and backward, and gradients
of prefix rows are added in place to their accumulators instead of travelling through autograd.
"""

from __future__ import annotations

from typing import Any

import torch

from ..state.resident import PagedView
from ..types import accumulation_dtype
from .autocast import without_autocast

MAX_TILE_ELEMENTS = 2**24
"""Bound on the scores held at once (64 MiB in float32); more queries are tiled. 2**22 to 2**26 ran alike on a CPU."""


def prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: PagedView | None, scale: float
) -> torch.Tensor:
    """Attention output [B, Hq, T, Dv] of T new tokens.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, L, D] and [B, Hkv, L, Dv], the new rows; Hq is a multiple of Hkv. L >= T: the first L - T
            rows precede the first query (what each row decoded so far), the rest is causal.
        view: the resident rows that every one of the B rows may attend to, or None. If it is split, the T new tokens
            are this rank's slice, L = T, and every rank of the context calls with equal shapes.
        scale: factor on the scores.

    The arithmetic is float32 (float64 for float64 inputs); the result has the dtype of `query`.
    """
    out: torch.Tensor = _PrefixAttention.apply(query, key, value, view, scale)
    return out


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: PagedView | None, scale: float
    ) -> torch.Tensor:
        dtype = accumulation_dtype(query.dtype)
        grouped = _grouped(query, key)
        q = grouped.to(dtype) * scale
        k, v = (_seen(_heads_first(x), view).to(dtype) for x in (key, value))
        parts = [_attend_causally(q, k, v)]
        if view is not None:
            flat_q = _all_queries(q, grouped, view, scale)
            parts += _merge_ranks(q, _attend_to_pages(flat_q, v.shape[-1], view), view)
        out, lse = _merged(parts)
        out = _ungrouped(out).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.view, ctx.scale = view, scale
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
        dtype = accumulation_dtype(query.dtype)
        grouped, grouped_d = _grouped(query, key), _grouped(grad_outputs[0], key)
        q, d_out = grouped.to(dtype) * scale, grouped_d.to(dtype)
        k, v = (_seen(_heads_first(x), view).to(dtype) for x in (key, value))
        delta = (d_out * _grouped(out, key).to(dtype)).sum(-1)  # [Hkv, B, g, T]
        d_q, d_k, d_v = _back_causally(q, k, v, d_out, lse, delta)
        if view is not None:
            view.mark_gradient()
            flat_q, flat_d = _all_queries(q, grouped, view, scale), _all_queries(d_out, grouped_d, view)
            flat_lse, flat_delta = (_all_queries(x, x, view) for x in (lse[..., None], delta[..., None]))
            d_q += _own_queries(_back_to_pages(flat_q, flat_d, flat_lse, flat_delta, view), q, view)
            d_k, d_v = (_own_rows(x, key.shape[2], view) for x in (d_k, d_v))
        d_query = _ungrouped(d_q * scale).to(query.dtype)
        return d_query, d_k.transpose(0, 1).to(key.dtype), d_v.transpose(0, 1).to(value.dtype), None, None


Part = tuple[torch.Tensor, torch.Tensor]
"""Attention to some of the keys: output [..., Dv] and log-sum-exp [...] of the scores, -inf where there is no key."""


def _attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for start, end, keys, hidden in _causal_tiles(q, k):
        scores = _local_scores(q, k, start, end, keys, hidden)
        top = scores.amax(-1)
        weights = scores.sub_(top[..., None]).exp_()
        total = weights.sum(-1)
        lse[..., start:end] = top + total.log()
        tile = _ungroup(weights.flatten(2, 3) @ v[:, :, :keys], q.shape[2])
        out[..., start:end, :] = tile.div_(total[..., None])
    return out, lse


def _back_causally(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `_attend_causally`. A function of its own, so that its tiles are gone before the pages' turn."""
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    for start, end, keys, hidden in _causal_tiles(q, k):
        tile = slice(start, end)
        scores = _local_scores(q, k, start, end, keys, hidden)
        weights = torch.exp(scores - lse[..., tile, None]).flatten(2, 3)
        d_tile, q_tile = d_out[..., tile, :].flatten(2, 3), q[..., tile, :].flatten(2, 3)
        d_weights = d_tile @ v[:, :, :keys].transpose(-1, -2)
        d_scores = weights * (d_weights - delta[..., tile].flatten(2)[..., None])
        d_q[..., tile, :] += _ungroup(d_scores @ k[:, :, :keys], q.shape[2])
        d_k[:, :, :keys] += d_scores.transpose(-1, -2) @ q_tile
        d_v[:, :, :keys] += weights.transpose(-1, -2) @ d_tile
    return d_q, d_k, d_v


def _attend_to_pages(flat_q: torch.Tensor, value_dim: int, view: PagedView) -> Part:
    """[Hkv, N, Dv] and [Hkv, N]. One batch axis per key-value head: all rows share the prefix, nothing is repeated."""
    top = flat_q.new_full(flat_q.shape[:-1], float("-inf"))
    total, acc = torch.zeros_like(top), flat_q.new_zeros(*top.shape, value_dim)
    for block in view.blocks():
        page_k, page_v = block.values["k"].to(flat_q.dtype), block.values["v"].to(flat_q.dtype)
        for rows in _row_tiles(flat_q, page_k):
            scores = flat_q[:, rows] @ page_k.transpose(1, 2)
            new_top = torch.maximum(top[:, rows], scores.amax(-1))
            shrink = torch.exp(top[:, rows] - new_top)
            weights = scores.sub_(new_top[..., None]).exp_()
            total[:, rows].mul_(shrink).add_(weights.sum(-1))
            acc[:, rows].mul_(shrink[..., None]).add_(weights @ page_v)
            top[:, rows] = new_top
    return acc.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]), top + total.log()


def _back_to_pages(
    flat_q: torch.Tensor, flat_d: torch.Tensor, flat_lse: torch.Tensor, flat_delta: torch.Tensor, view: PagedView
) -> torch.Tensor:
    """Gradient [Hkv, N, D] of the queries through the pages; gradients of the pages go to their accumulators."""
    flat_dq = torch.zeros_like(flat_q)
    for block in view.blocks(with_grads=True):
        page_k, page_v = block.values["k"].to(flat_q.dtype), block.values["v"].to(flat_q.dtype)
        for rows in _row_tiles(flat_q, page_k):
            scores = flat_q[:, rows] @ page_k.transpose(1, 2)
            weights = scores.sub_(flat_lse[:, rows]).exp_()
            d_scores = flat_d[:, rows] @ page_v.transpose(1, 2)
            d_scores.sub_(flat_delta[:, rows]).mul_(weights)
            flat_dq[:, rows].baddbmm_(d_scores, page_k)
            if block.grads is not None:
                block.grads["k"].baddbmm_(d_scores.transpose(1, 2), flat_q[:, rows])
                block.grads["v"].baddbmm_(weights.transpose(1, 2), flat_d[:, rows])
    return flat_dq


def _merged(parts: list[Part]) -> Part:
    """Attention to the union of the parts' keys."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    first, *others = (out * torch.exp(part_lse - lse)[..., None] for out, part_lse in parts)
    for other in others:
        first += other
    return first, lse


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


def _all_queries(own: torch.Tensor, narrow: torch.Tensor, view: PagedView, scale: float = 1.0) -> torch.Tensor:
    """[Hkv, B, g, T, D] -> [Hkv, N, D], the queries of all ranks. `own` is `narrow * scale`; `narrow` travels."""
    if not view.split:
        return own.flatten(1, 3)
    assert view.context is not None
    return view.context.gather_tokens(narrow.flatten(1, 3)).to(own.dtype) * scale


def _own_queries(d_flat: torch.Tensor, q: torch.Tensor, view: PagedView) -> torch.Tensor:
    """The reverse of `_all_queries` for gradients: each rank's pages contributed to every query."""
    if view.context is None:
        return d_flat.view_as(q)
    if view.split:
        return view.context.sum_scatter(view.context.by_rank(d_flat)).view_as(q)
    return view.context.gather(d_flat).sum(0).view_as(q)


def _merge_ranks(q: torch.Tensor, found: Part, view: PagedView) -> list[Part]:
    """What the pages of each rank had for this rank's queries."""
    out, lse = found
    rows = q.shape[:-1]
    if view.context is None:
        return [(out.view(*rows, -1), lse.view(rows))]
    both = torch.cat([out, lse[..., None]], -1)
    if view.split:
        pieces = view.context.exchange(view.context.by_rank(both))
    else:
        pieces = view.context.gather(both)
    return [(piece[..., :-1].reshape(*rows, -1), piece[..., -1].reshape(rows)) for piece in pieces]


def _grouped(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, Hq, T, D] -> contiguous [Hkv, B, g, T, D]."""
    batch, n_heads, n_tokens, dim = x.shape
    n_kv_heads = key.shape[1]
    return x.reshape(batch, n_kv_heads, n_heads // n_kv_heads, n_tokens, dim).transpose(0, 1).contiguous()


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    """[Hkv, B, g, T, D] -> [B, Hq, T, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def _ungroup(x: torch.Tensor, n_groups: int) -> torch.Tensor:
    """[Hkv, B, g * n, D] -> [Hkv, B, g, n, D]."""
    return x.unflatten(2, (n_groups, -1))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, L, D] -> [Hkv, B, L, D]."""
    return x.transpose(0, 1)


def _causal_tiles(q: torch.Tensor, k: torch.Tensor) -> Any:
    """Query tiles (start, end, number of keys up to the last query, [n, keys] mask of keys that lie in the future)."""
    n_kv_heads, batch, n_groups, n_tokens, _ = q.shape
    n_keys = k.shape[2]
    size = max(1, min(256, MAX_TILE_ELEMENTS // max(1, n_kv_heads * batch * n_groups * n_keys)))
    before = n_keys - n_tokens
    for start in range(0, n_tokens, size):
        end = min(start + size, n_tokens)
        positions = torch.arange(before + start, before + end, device=q.device)
        hidden = positions[:, None] < torch.arange(before + end, device=q.device)[None]
        yield start, end, before + end, hidden


def _local_scores(
    q: torch.Tensor, k: torch.Tensor, start: int, end: int, keys: int, hidden: torch.Tensor
) -> torch.Tensor:
    """Masked scores [Hkv, B, g, n, keys] of queries `start:end`."""
    scores = q[..., start:end, :].flatten(2, 3) @ k[:, :, :keys].transpose(-1, -2)
    return _ungroup(scores, q.shape[2]).masked_fill(hidden, float("-inf"))


def _row_tiles(flat_q: torch.Tensor, page: torch.Tensor) -> Any:
    """Slices of query rows whose scores against one page stay under the tile bound."""
    size = max(1, MAX_TILE_ELEMENTS // max(1, flat_q.shape[0] * page.shape[1]))
    for start in range(0, flat_q.shape[1], size):
        yield slice(start, min(start + size, flat_q.shape[1]))
