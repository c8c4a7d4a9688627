"""Scores of a sparse-attention indexer (DeepSeek sparse attention, arXiv 2512.02556), by a kernel that sums its heads.

The reference writes [S * H, T] float32 products to memory and reads them three times; the kernel keeps them in
registers and writes [S, T].
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

from ..environment import kernels_off
from .trial import too_far, tried

_LOG = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)

ROWS, KEYS, STEPS = 256, 64, 16
"""(query, head) rows and keys per product, and products per program, which loads its queries once.

Compiled for sm_90 at 32 heads of 128 (triton 3.7): 128 registers in 8 warps without spills and 98 KiB of shared memory,
so that two programs fit an SM and one multiplies while the other sums. With 128 rows each key would be read twice as
often, which asks for more of the L2 cache than it gives.
"""


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Float32 scores [B, S, T]: the sum over heads of `weights * relu(query @ key * scale)`, for all queries and keys.

    By the kernel where `uses_kernel`; it has no backward, so that calls which need one go to the reference.

    Args:
        query: [B, S, H, D].
        weights: [B, S, H].
        keys: [B or 1, T, D]; those of one batch entry serve all rows.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, weights, keys))
    if needs_grad or not uses_kernel(query, keys):
        return index_scores_reference(query, weights, keys, scale)
    return index_scores_fused(query, weights, keys, scale)


def uses_kernel(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernel scores `keys` where no gradient is asked for: it multiplies equal dtypes only."""
    return keys.dtype == query.dtype and why_no_index_kernel(query) is None


def index_scores_reference(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """`index_scores` in plain PyTorch."""
    # One product for all queries and heads; a product per query, as broadcasting does, copies the keys.
    flat = query.flatten(1, 2) if len(keys) > 1 else query.flatten(0, 2)[None]  # [B or 1, s * H, D]
    per_head = torch.matmul(flat.float(), keys.float().transpose(1, 2)).mul_(scale).relu_()
    return torch.matmul(weights.float().unsqueeze(-2), per_head.view(*query.shape[:3], -1)).squeeze(-2)


def index_scores_fused(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`index_scores` by the Triton kernel, where `knows_heads(H, D)`.

    Queries and keys share a dtype, bfloat16 or float16. Keys may have any stride but along their last axis. A score is
    computed alike, to the last bit, wherever its query and its key lie among the others.
    """
    batch, n_queries, n_heads, dim = query.shape
    assert knows_heads(n_heads, dim) and keys.dtype == query.dtype and len(keys) in (1, batch)
    out = torch.empty(batch, n_queries, keys.shape[1], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    if scale < 0:
        query, scale = -query, -scale
    query, weights = (x if x[0].is_contiguous() else x.contiguous() for x in (query, weights))
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    from .index_score_kernel import index_score_kernel

    blocks = -(-n_queries * n_heads // ROWS) * -(-keys.shape[1] // (KEYS * STEPS))
    index_score_kernel[blocks, batch](
        query,
        weights,
        keys,
        out,
        n_queries,
        keys.shape[1],
        query.stride(0),
        weights.stride(0),
        keys.stride(0) if len(keys) > 1 else 0,
        keys.stride(1),
        scale,
        H=n_heads,
        D=dim,
        QUERIES=ROWS // n_heads,
        KEYS=KEYS,
        STEPS=STEPS,
        num_warps=8,
        num_stages=2,
    )
    return out


def knows_heads(n_heads: int, dim: int) -> bool:
    """Whether the kernel knows such an indexer: 8 to 128 heads of 16 to 256 numbers, both powers of two."""
    return 8 <= n_heads <= 128 and 16 <= dim <= 256 and n_heads & (n_heads - 1) == 0 and dim & (dim - 1) == 0


def why_no_index_kernel(query: torch.Tensor) -> str | None:
    """What keeps the kernel from being used for `query` [B, S, H, D], or None. Found, and logged, once per kind."""
    return _why(kernels_off(), query.device, query.dtype, query.shape[-2], query.shape[-1])


@cache
def _why(off: str | None, device: torch.device, dtype: torch.dtype, n_heads: int, dim: int) -> str | None:
    if off is not None:
        reason: str | None = off
    elif device.type != "cuda":
        reason = f"the kernel needs CUDA, not {device.type}"
    elif dtype not in DTYPES:
        reason = f"the kernel multiplies bfloat16 or float16, not {dtype}"
    elif not knows_heads(n_heads, dim):
        reason = f"the kernel knows 8 to 128 heads of 16 to 256 numbers, both powers of two, not {n_heads} of {dim}"
    elif find_spec("triton") is None:
        reason = "Triton is not installed"
    else:
        reason = tried(lambda: _trial(device, dtype, n_heads, dim), device)
    told = "fused kernel" if reason is None else f"reference, because {reason}"
    _LOG.info("indexer scores of %s on %s, %d heads of %d: %s", dtype, device, n_heads, dim, told)
    return reason


@torch.no_grad()
def _trial(device: torch.device, dtype: torch.dtype, n_heads: int, dim: int) -> str | None:
    """2 rows of 37 queries against 1,100 keys, shared or their own, that lie on wider rows, beside the reference."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query, weights, keys = draw(2, 37, n_heads, dim), draw(2, 37, n_heads).float(), draw(2, 1100, 2 * dim)[..., :dim]
    for name, some in (("scores by shared keys", keys[:1]), ("scores by keys of each row", keys)):
        found = index_scores_fused(query, weights, some, dim**-0.5)
        wanted = index_scores_reference(query.float(), weights, some.float(), dim**-0.5)
        if reason := too_far(name, found, wanted, dtype):
            return reason
    moved = index_scores_fused(query[:, 5:], weights[:, 5:], keys[:, 77:], dim**-0.5)
    if not torch.equal(moved, found[:, 5:, 77:]):
        return "in a trial the last bits of a score changed with its place among the others"
    keys[:, -1] = float("nan")
    found = index_scores_fused(query, weights, keys, dim**-0.5)
    if not found[..., -1].isnan().all() or not found[..., :-1].isfinite().all():
        return "in a trial a key that is not a number did not give exactly its own scores as such"
    return None
