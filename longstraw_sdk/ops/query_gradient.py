"""Gradient of queries alone through attention to keys that collect none: three matrix products instead of five.

The tiling is that of FlashAttention-2's backward for queries (arXiv 2307.08691): a block of queries stays, blocks of
keys pass by, probabilities are recomputed from the log-sum-exp of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from .trial import too_far, tried

ROWS, KEYS = 128, 64
"""Queries and keys per block. With heads of 256 one stage of them fits the 227 KiB that a block of an H200 may use.

Behind 131,072 keys, for 8,192 tokens of 24 heads, it took 93 ms; 128 x 32 in two stages 96, 64 x 64 in two 114, cuDNN's
whole backward 181 (torch 2.11, triton 3.6).
"""

GLUON_VERSIONS = ("3.6.",)
"""Of Triton, whose Gluon is experimental: elsewhere a kernel that waits for its own copies is not tried."""


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
    """`query_gradient_reference` as a kernel, where `has_kernel(D)` and Dv = D.

    Operands are bfloat16 or float16 and `d_q` float32. Keys and values may have any stride but along their last axis.
    """
    n_heads, n_queries, dim = q.shape
    assert has_kernel(dim) and v.shape[-1] == dim and d_q.dtype == torch.float32 and d_q.is_contiguous()
    if why_not_hopper(q.device, q.dtype, dim) is None:
        from .query_gradient_hopper import query_gradient_hopper

        return query_gradient_hopper(q, k, v, d_out, lse, delta, scale, d_q)
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


@cache
def why_not_hopper(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """What keeps the kernel for compute capability 9.0 from being used, or None after a trial on the device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs compute capability 9.0"
    version = import_module("triton").__version__
    if not version.startswith(GLUON_VERSIONS):
        return f"it is written for triton {', '.join(v + 'x' for v in GLUON_VERSIONS)}, not {version}"
    from .query_gradient_hopper import DEPTHS, query_gradient_hopper

    if dim not in DEPTHS:
        return f"heads of {dim} numbers are none of {', '.join(map(str, DEPTHS))}"
    return tried(lambda: trial_of(query_gradient_hopper, device, dtype, dim), device)


def trial_of(run: Callable[..., None], device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """`run` beside the reference: 200 queries through 331 keys that lie token after token, as on pages."""
    generator = torch.Generator(device).manual_seed(0)
    q, d_out = (torch.randn(2, 200, dim, generator=generator, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(331, 2, dim, generator=generator, device=device).to(dtype).transpose(0, 1) for _ in range(2))
    lse = (q.float() @ k.float().transpose(1, 2) * dim**-0.5).logsumexp(-1)
    delta, found = torch.zeros_like(lse), torch.zeros_like(q, dtype=torch.float32)
    wanted = torch.zeros_like(found)
    run(q, k, v, d_out, lse, delta, dim**-0.5, found)
    query_gradient_reference(q, k, v, d_out, lse, delta, dim**-0.5, wanted)
    return too_far("gradient of queries", found, wanted, dtype)
