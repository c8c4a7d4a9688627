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
        view: the resident rows that every one of the B rows may attend to, or None.
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
        q, k, v = _grouped(query, key).to(dtype) * scale, _heads_first(key).to(dtype), _heads_first(value).to(dtype)
        rows = q.shape[:-1]  # [Hkv, B, g, T]
        top, total = q.new_empty(rows), q.new_empty(rows)
        acc = q.new_empty(*rows, v.shape[-1])

        for start, end, keys, hidden in _causal_tiles(q, k):
            scores = _local_scores(q, k, start, end, keys, hidden)
            tile_top = scores.amax(-1)
            weights = torch.exp(scores - tile_top[..., None])
            top[..., start:end] = tile_top
            total[..., start:end] = weights.sum(-1)
            acc[..., start:end, :] = _ungroup(weights.flatten(2, 3) @ v[:, :, :keys], q.shape[2])

        if view is not None:
            # One batch axis per key-value head: all packed rows share the prefix, nothing is repeated.
            flat_q, flat_top, flat_total, flat_acc = _flat(q), top.flatten(1), total.flatten(1), _flat(acc)
            for block in view.blocks():
                page_k, page_v = block.values["k"].to(dtype), block.values["v"].to(dtype)
                for rows_slice in _row_tiles(flat_q, page_k):
                    scores = flat_q[:, rows_slice] @ page_k.transpose(1, 2)
                    new_top = torch.maximum(flat_top[:, rows_slice], scores.amax(-1))
                    shrink = torch.exp(flat_top[:, rows_slice] - new_top)
                    weights = scores.sub_(new_top[..., None]).exp_()
                    flat_total[:, rows_slice].mul_(shrink).add_(weights.sum(-1))
                    flat_acc[:, rows_slice].mul_(shrink[..., None]).add_(weights @ page_v)
                    flat_top[:, rows_slice] = new_top
        out = _ungrouped(acc / total[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, top + total.log())
        ctx.view, ctx.scale = view, scale
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
        dtype = accumulation_dtype(query.dtype)
        q, k, v = _grouped(query, key).to(dtype) * scale, _heads_first(key).to(dtype), _heads_first(value).to(dtype)
        d_out = _grouped(grad_outputs[0], key).to(dtype)
        delta = (d_out * _grouped(out, key).to(dtype)).sum(-1)  # [Hkv, B, g, T]
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

        if view is not None:
            flat_q, flat_d, flat_dq = _flat(q), _flat(d_out), _flat(d_q)
            flat_lse, flat_delta = lse.flatten(1), delta.flatten(1)
            for block in view.blocks(with_grads=True):
                page_k, page_v = block.values["k"].to(dtype), block.values["v"].to(dtype)
                for rows_slice in _row_tiles(flat_q, page_k):
                    scores = flat_q[:, rows_slice] @ page_k.transpose(1, 2)
                    weights = scores.sub_(flat_lse[:, rows_slice, None]).exp_()
                    d_scores = flat_d[:, rows_slice] @ page_v.transpose(1, 2)
                    d_scores.sub_(flat_delta[:, rows_slice, None]).mul_(weights)
                    flat_dq[:, rows_slice].baddbmm_(d_scores, page_k)
                    if block.grads is not None:
                        block.grads["k"].baddbmm_(d_scores.transpose(1, 2), flat_q[:, rows_slice])
                        block.grads["v"].baddbmm_(weights.transpose(1, 2), flat_d[:, rows_slice])
        d_query = _ungrouped(d_q * scale).to(query.dtype)
        return d_query, d_k.transpose(0, 1).to(key.dtype), d_v.transpose(0, 1).to(value.dtype), None, None


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


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[Hkv, B, g, T, D] -> a view [Hkv, B * g * T, D]."""
    return x.flatten(1, 3)


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
