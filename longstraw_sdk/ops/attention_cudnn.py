"""The parts of prefix attention on CUDA by the fused kernels of PyTorch: cuDNN's, and FlashAttention's for odd sizes.

Their backward accepts the output and the log-sum-exp of the whole row, so that it gives the gradient of one part of the
keys. Where nobody collects gradients of the prefix, a kernel of our own computes those of the queries alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from ..state.resident import PagedView
from .attention_parts import AttentionOperator, Gradients, Part, merge_parts
from .attention_reference import ReferenceAttention
from .fused_attention import PLANNED
from .fused_attention import fused_attention as _forward
from .fused_attention import fused_attention_backward as _backward
from .query_gradient import has_kernel, query_gradient, trial_of
from .trial import too_far, tried

KEYS_PER_CALL = 131_072
"""Rows of the prefix per kernel. Bounds what its backward allocates for them: 268 MB twice at 4 heads of 256."""

QUERY_MULTIPLE = 2048
"""Queries [N] of the prefix are padded to a multiple, so that packs of all lengths share a few of cuDNN's plans."""

FEW_MULTIPLE = 64
"""The same of few queries."""

FEW_QUERIES = 1024
"""Up to so many queries [N] per head the keys are split over the batch axis, so that all of the device computes."""

KEYS_PER_SPLIT = 4096

FEW_NEW_TOKENS = 16
"""Up to so many new tokens the reference computes their causal part: it is small, and while rows decode its number of
keys grows with every token, for each of which cuDNN would build and keep a plan."""


class CudnnAttention:
    """Implements `AttentionOperator` for bfloat16 and float16; `with_kernel` uses `query_gradient`."""

    name = "cudnn"

    def __init__(self, *, with_kernel: bool):
        self.with_kernel = with_kernel
        self._few = ReferenceAttention()

    def pages_need_out(self, view: PagedView) -> bool:
        return view.accumulate or not self.with_kernel

    def attend_causally(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
        if q.shape[3] <= FEW_NEW_TOKENS:
            return self._few.attend_causally(q, k, v, scale)
        batch = _batch_first(q)
        parts = []
        for keys, causal in _causal_parts(q, k):
            out, lse = _forward(batch, _rows(k, keys), _rows(v, keys), causal, scale)
            parts.append((_groups_first(out, q).float(), _groups_first(lse[..., None], q)[..., 0]))
        return merge_parts(parts)

    def back_causally(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Gradients, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if q.shape[3] <= FEW_NEW_TOKENS:
            return self._few.back_causally(q, k, v, row, scale)
        assert row.out is not None
        d_q = torch.zeros_like(q, dtype=torch.float32)
        d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        d_out, queries, out, lse = (_batch_first(x) for x in (row.d_out, q, row.out, row.lse[..., None]))
        for keys, causal in _causal_parts(q, k):
            found = _backward(d_out, queries, _rows(k, keys), _rows(v, keys), out, lse, causal, scale)
            d_q += _groups_first(found[0], q)
            d_k[:, :, keys] += found[1].transpose(0, 1)
            d_v[:, :, keys] += found[2].transpose(0, 1)
        return d_q, d_k, d_v

    def attend_to_pages(self, q: torch.Tensor, view: PagedView, scale: float, value_dim: int) -> Part:
        asked = _padded(q)
        attend = _attend_split if asked.shape[1] <= FEW_QUERIES else _attend
        parts = [attend(asked, k, v, scale) for k, v, _ in _pieces(view, with_grads=False)]
        if parts:
            out, lse = merge_parts(parts)
            return out[:, : q.shape[1]], lse[:, : q.shape[1]]
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        return q.new_zeros(*q.shape[:-1], value_dim, dtype=torch.float32), lse

    def back_to_pages(self, q: torch.Tensor, row: Gradients, view: PagedView, scale: float) -> torch.Tensor:
        d_q = torch.zeros_like(q, dtype=torch.float32)
        if not self.pages_need_out(view):
            for k, v, _ in _pieces(view, with_grads=False):
                query_gradient(q, k, v, row.d_out, row.lse, row.delta, scale, d_q)
            return d_q
        assert row.out is not None
        # A padded row has weight one everywhere, and a gradient of zero.
        queries, d_out, out, lse = (_padded(x)[None] for x in (q, row.d_out, row.out, row.lse[..., None]))
        for k, v, grads in _pieces(view, with_grads=True):
            found = _backward(d_out, queries, k[None], v[None], out, lse, False, scale)
            d_q += found[0][0, :, : q.shape[1]]
            if grads is not None:
                grads[0].add_(found[1][0])
                grads[1].add_(found[2][0])
        return d_q


Piece = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]


def _pieces(view: PagedView, *, with_grads: bool) -> Iterator[Piece]:
    """Keys and values [Hkv, n, D] of the prefix, and their gradients if they are collected."""
    for block in view.runs(with_grads=with_grads):
        k, v = block.values["k"], block.values["v"]
        for keys in _key_ranges(k.shape[1]):
            grads = None if block.grads is None else (block.grads["k"][:, keys], block.grads["v"][:, keys])
            yield k[:, keys], v[:, keys], grads


def _key_ranges(n_keys: int) -> Iterator[slice]:
    """As few calls as possible whose sizes are planned sizes, and one for the rest."""
    start = 0
    while start < n_keys:
        left = min(KEYS_PER_CALL, n_keys - start)
        size = left // KEYS_PER_SPLIT * KEYS_PER_SPLIT or left
        yield slice(start, start + size)
        start += size


def _padded(x: torch.Tensor) -> torch.Tensor:
    """[H, N, D] with zeros behind the last of N, up to a number for which there are few plans."""
    n = x.shape[1]
    multiple = QUERY_MULTIPLE if n > FEW_QUERIES else FEW_MULTIPLE
    return F.pad(x, (0, 0, 0, -n % multiple)) if n % multiple else x


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    out, lse = _forward(q[None], k[None], v[None], False, scale)
    return out[0].float(), lse[0]


def _attend_split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """The same, with runs of `KEYS_PER_SPLIT` keys as a batch."""
    n_splits = k.shape[1] // KEYS_PER_SPLIT
    parts = []
    if n_splits:
        whole = n_splits * KEYS_PER_SPLIT
        split_k, split_v = (x[:, :whole].unflatten(1, (n_splits, KEYS_PER_SPLIT)).transpose(0, 1) for x in (k, v))
        out, lse = _forward(q.expand(n_splits, *q.shape), split_k, split_v, False, scale)
        total = lse.logsumexp(0)
        parts.append(((out.float() * torch.exp(lse - total)[..., None]).sum(0), total))
    if k.shape[1] % KEYS_PER_SPLIT:
        rest = slice(n_splits * KEYS_PER_SPLIT, None)
        parts.append(_attend(q, k[:, rest], v[:, rest], scale))
    return merge_parts(parts)


def _causal_parts(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, bool]]:
    """cuDNN's causal mask begins at the first key: keys before the first query are a part of their own."""
    before = k.shape[2] - q.shape[3]
    if before:
        yield slice(0, before), False
    yield slice(before, None), True


def _rows(x: torch.Tensor, keys: slice) -> torch.Tensor:
    """[Hkv, B, L, D] -> [B, Hkv, n, D]."""
    return x[:, :, keys].transpose(0, 1)


def _batch_first(x: torch.Tensor) -> torch.Tensor:
    """[Hkv, B, g, T, D] -> contiguous [B, Hq, T, D]."""
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def _groups_first(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B, Hq, T, D] -> [Hkv, B, g, T, D] as `q`."""
    return x.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


def why_not_cudnn(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """What keeps this operator from being used, or None after a trial on the device that agreed with the reference."""
    if device.type != "cuda":
        return f"cuDNN needs CUDA, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN computes in bfloat16 and float16, not {dtype}"
    if dim != value_dim or dim % 8 or dim > 256:
        return f"heads of {dim} and {value_dim} numbers are not equal multiples of 8 up to 256"
    if not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    return tried(lambda: _trial(device, dtype, dim), device)


def why_not_kernel(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """The same for `query_gradient`."""
    if not has_kernel(dim):
        return f"Triton is not installed or heads of {dim} are no power of two"
    return tried(lambda: trial_of(query_gradient, device, dtype, dim), device)


def _trial(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Causal attention of 2 rows behind as many other tokens, beside the reference, in sizes for both libraries."""
    return _trial_of(PLANNED, device, dtype, dim) or _trial_of(70, device, dtype, dim)


def _trial_of(n: int, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2, 2, 2, n, dim), (2, 2, 2 * n, dim), (2, 2, 2 * n, dim), (2, 2, 2, n, dim))
    q, k, v, d_out = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
    scale = dim**-0.5
    found = _both_ways(CudnnAttention(with_kernel=False), q, k, v, d_out, scale)
    wanted = _both_ways(ReferenceAttention(), q.float(), k.float(), v.float(), d_out.float(), scale)
    for name, a, b in zip(("output", "gradient of queries", "of keys", "of values"), found, wanted, strict=True):
        if reason := too_far(name, a, b, dtype):
            return reason
    return None


def _both_ways(
    operator: AttentionOperator,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    out, lse = operator.attend_causally(q, k, v, scale)
    out = out.to(q.dtype)
    row = Gradients(d_out, lse, (out.to(lse.dtype) * d_out.to(lse.dtype)).sum(-1), out)
    return (out, *operator.back_causally(q, k, v, row, scale))
