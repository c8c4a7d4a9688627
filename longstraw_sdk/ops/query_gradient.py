"""Gradient of queries alone through attention to keys that collect none: three matrix products instead of five.

The tiling is that of FlashAttention-2's backward for queries (arXiv 2307.08691): a block of queries stays, blocks of
keys pass by, probabilities are recomputed from the log-sum-exp of the whole row.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

ROWS, KEYS = 128, 64
"""Queries and keys per block. With heads of 256 one stage of them fits the 227 KiB that a block of an H200 may use.

Behind 131,072 keys, for 8,192 tokens of 24 heads, it took 93 ms; 128 x 32 in two stages 96, 64 x 64 in two 114, cuDNN's
whole backward 181 (torch 2.11, triton 3.6).
"""


@cache
def has_kernel(dim: int) -> bool:
    """Whether `query_gradient` knows heads of `dim` numbers: powers of two from 16, where Triton is installed."""
    return find_spec("triton") is not None and dim >= 16 and dim & (dim - 1) == 0


def query_gradient_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    d_q: torch.Tensor,
) -> None:
    """Add to `d_q` [H, N, D] the gradient of `q` [H, N, D] through `k` [H, S, D] and `v` [H, S, Dv].

    Args:
        d_out: [H, N, Dv], gradient of the attention output.
        lse, delta: [H, N], log-sum-exp over all keys of the row, and the sum of output times `d_out`.
    """
    q, k, v, d_out = (x.to(d_q.dtype) for x in (q, k, v, d_out))
    weights = torch.exp(q @ k.transpose(1, 2) * scale - lse[..., None])
    d_scores = weights * (d_out @ v.transpose(1, 2) - delta[..., None])
    d_q += d_scores @ k * scale


def query_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    d_q: torch.Tensor,
) -> None:
    """`query_gradient_reference` as a Triton kernel, where `has_kernel(D)` and Dv = D.

    Operands are bfloat16 or float16 and `d_q` float32. Keys and values may have any stride but along their last axis.
    """
    n_heads, n_queries, dim = q.shape
    assert has_kernel(dim) and v.shape[-1] == dim and d_q.dtype == torch.float32 and d_q.is_contiguous()
    q, d_out, lse, delta = (x.contiguous() for x in (q, d_out, lse, delta))
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    from .query_gradient_kernel import query_gradient_kernel

    query_gradient_kernel[-(-n_queries // ROWS), n_heads](
        q,
        k,
        v,
        d_out,
        lse,
        delta,
        d_q,
        n_queries,
        k.shape[1],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        scale,
        D=dim,
        ROWS=ROWS,
        KEYS=KEYS,
        num_warps=8,
        num_stages=1 if dim > 128 else 2,
    )
