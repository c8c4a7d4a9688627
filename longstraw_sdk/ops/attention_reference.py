"""The parts of prefix attention in plain PyTorch, for every device and dtype.

Arithmetic is float32 (float64 for float64 inputs): softmax block by block with the running maximum and sum of Rabe &
Staats (arXiv 2112.05682) and Flash-Attention (arXiv 2205.14135). Gradients recompute every tile of probabilities from
the log-sum-exp of the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..state.resident import PagedView
from ..types import accumulation_dtype
from .attention_parts import Gradients, Part

MAX_TILE_ELEMENTS = 2**24
"""Bound on the scores held at once (64 MiB in float32); more queries are tiled. 2**22 to 2**26 ran alike on a CPU."""


class ReferenceAttention:
    """Implements `AttentionOperator`."""

    name = "reference"

    def pages_need_out(self, view: PagedView) -> bool:
        return False

    def attend_causally(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
        q, k, v = _scaled(q, scale), _wide(k), _wide(v)
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

    def back_causally(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Gradients, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, d_out, delta = _scaled(q, scale), _wide(k), _wide(v), _wide(row.d_out), row.delta
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, end, keys, hidden in _causal_tiles(q, k):
            tile = slice(start, end)
            scores = _local_scores(q, k, start, end, keys, hidden)
            weights = torch.exp(scores - row.lse[..., tile, None]).flatten(2, 3)
            d_tile, q_tile = d_out[..., tile, :].flatten(2, 3), q[..., tile, :].flatten(2, 3)
            d_weights = d_tile @ v[:, :, :keys].transpose(-1, -2)
            d_scores = weights * (d_weights - delta[..., tile].flatten(2)[..., None])
            d_q[..., tile, :] += _ungroup(d_scores @ k[:, :, :keys], q.shape[2])
            d_k[:, :, :keys] += d_scores.transpose(-1, -2) @ q_tile
            d_v[:, :, :keys] += weights.transpose(-1, -2) @ d_tile
        return d_q.mul_(scale), d_k, d_v

    def attend_to_pages(self, q: torch.Tensor, view: PagedView, scale: float, value_dim: int) -> Part:
        q = _scaled(q, scale)
        top = q.new_full(q.shape[:-1], float("-inf"))
        total, acc = torch.zeros_like(top), q.new_zeros(*top.shape, value_dim)
        for block in view.blocks():
            page_k, page_v = block.values["k"].to(q.dtype), block.values["v"].to(q.dtype)
            for rows in _row_tiles(q, page_k):
                scores = q[:, rows] @ page_k.transpose(1, 2)
                new_top = torch.maximum(top[:, rows], scores.amax(-1))
                shrink = torch.exp(top[:, rows] - new_top)
                weights = scores.sub_(new_top[..., None]).exp_()
                total[:, rows].mul_(shrink).add_(weights.sum(-1))
                acc[:, rows].mul_(shrink[..., None]).add_(weights @ page_v)
                top[:, rows] = new_top
        return acc.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]), top + total.log()

    def back_to_pages(self, q: torch.Tensor, row: Gradients, view: PagedView, scale: float) -> torch.Tensor:
        q, d_out, lse, delta = _scaled(q, scale), _wide(row.d_out), row.lse[..., None], row.delta[..., None]
        d_q = torch.zeros_like(q)
        for block in view.blocks(with_grads=True):
            page_k, page_v = block.values["k"].to(q.dtype), block.values["v"].to(q.dtype)
            for rows in _row_tiles(q, page_k):
                scores = q[:, rows] @ page_k.transpose(1, 2)
                weights = scores.sub_(lse[:, rows]).exp_()
                d_scores = d_out[:, rows] @ page_v.transpose(1, 2)
                d_scores.sub_(delta[:, rows]).mul_(weights)
                d_q[:, rows].baddbmm_(d_scores, page_k)
                if block.grads is not None:
                    block.grads["k"].baddbmm_(d_scores.transpose(1, 2), q[:, rows])
                    block.grads["v"].baddbmm_(weights.transpose(1, 2), d_out[:, rows])
        return d_q.mul_(scale)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _scaled(q: torch.Tensor, scale: float) -> torch.Tensor:
    return _wide(q) * scale


def _ungroup(x: torch.Tensor, n_groups: int) -> torch.Tensor:
    """[Hkv, B, g * n, D] -> [Hkv, B, g, n, D]."""
    return x.unflatten(2, (n_groups, -1))


def _causal_tiles(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, int, int, torch.Tensor]]:
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


def _row_tiles(flat_q: torch.Tensor, page: torch.Tensor) -> Iterator[slice]:
    """Slices of query rows whose scores against one page stay under the tile bound."""
    size = max(1, MAX_TILE_ELEMENTS // max(1, flat_q.shape[0] * page.shape[1]))
    for start in range(0, flat_q.shape[1], size):
        yield slice(start, min(start + size, flat_q.shape[1]))
