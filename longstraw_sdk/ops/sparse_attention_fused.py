"""`sparse_latent_attention` by kernels that gather, multiply and sum in one: no gathered row is written to memory.

Products multiply in the dtype of the rows and sum in float32; queries and gradients of the output are first rounded to
that dtype, which the reference does not do.

Output, log-sum-exp and gradients of queries have the same bits in every run. Gradients of rows are float32 atomic
additions, whose order, and so whose last bits, change from run to run, as `index_add_` of the reference does on CUDA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..state.resident import PagedView, Tensors
from .autocast import without_autocast
from .fetched_rows import own_part, reachable
from .latent_pages import LatentPages, gradient_sums, rows_in_one_piece

HEADS = 64
"""Heads per program at most: the rows of one warpgroup's product."""

ROWS, STAGES = 64, 3
"""Selected rows per step of the forward, and its depth: indices, then rows, are on their way while a step computes.

Compiled for sm_90 at 64 heads, latent 512 and rope 64 (triton 3.6): 217 KiB of shared memory of 227, 255 registers in 8
warps, 56 bytes of spills.
"""

BACK_ROWS = 32
"""The same of the gradient of queries, which holds those of the output too: 213 KiB, 255 registers, no spills."""

SUM_ROWS, SUM_COLUMNS = 64, 128
"""The same of the gradient of rows, and columns per program: 64 KiB, 195 registers in 4 warps, no spills."""

MAX_KEPT_ELEMENTS = 2**27
"""Bound on the weights, and on the gradients of scores, that a backward keeps at once (256 MiB each in bfloat16)."""


class _Source(NamedTuple):
    """Where selected rows lie: those before `limit` on one page, and new ones [B * L, R or Dr] behind it."""

    latent: torch.Tensor
    rope: torch.Tensor
    new_latent: torch.Tensor
    new_rope: torch.Tensor
    limit: int
    n_local: int

    @classmethod
    def of(cls, prefix: LatentPages, latent: torch.Tensor, key_rope: torch.Tensor) -> _Source:
        n_local = latent.shape[1]
        latent, key_rope = (_dense(x.flatten(0, 1)) for x in (latent, key_rope))
        if not prefix.limit:
            return cls(latent, key_rope, latent, key_rope, 0, n_local)
        rows = rows_in_one_piece(prefix, copy=True)
        assert rows is not None
        return cls(_dense(rows["latent"]), _dense(rows["k_rope"]), latent, key_rope, prefix.limit, n_local)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class FusedSparseAttention(torch.autograd.Function):
    """The arguments of `sparse_latent_attention`, where `fits` and `knows_sizes`; `hopper` where `hopper_knows`."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        selected: torch.Tensor,
        view: PagedView,
        scale: float,
        hopper: bool,
    ) -> torch.Tensor:
        q = torch.cat([x.to(latent.dtype) for x in (query_latent, query_rope)], -1).flatten(0, 1)
        prefix, chosen, new_latent, new_rope = reachable(view, selected, latent, key_rope)
        out, lse = _attend(q, _Source.of(prefix, new_latent, new_rope), chosen, scale, hopper=hopper)
        ctx.save_for_backward(q, latent, key_rope, selected, out, lse)
        ctx.view, ctx.scale, ctx.query_dtypes = view, scale, (query_latent.dtype, query_rope.dtype)
        return out.view(query_latent.shape)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        q, latent, key_rope, selected, out, lse = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
        prefix, chosen, new_latent, new_rope = reachable(view, selected, latent, key_rope)
        d_latent, d_rope = (torch.zeros_like(x, dtype=torch.float32) for x in (new_latent, new_rope))
        view.mark_gradient()
        source = _Source.of(prefix, new_latent, new_rope)
        with gradient_sums(prefix) as sums:
            d_q = _backward(q, source, chosen, out, lse, grad_outputs[0].flatten(0, 1), scale, d_latent, d_rope, sums)
        d_latent, d_rope = (own_part(x, view) for x in (d_latent, d_rope))
        parts = d_q.view(*selected.shape[:2], *q.shape[1:]).split([latent.shape[-1], key_rope.shape[-1]], -1)
        d_queries = (part.to(dtype) for part, dtype in zip(parts, ctx.query_dtypes, strict=True))
        return *d_queries, d_latent.to(latent.dtype), d_rope.to(key_rope.dtype), None, None, None, None


def fits(view: PagedView) -> bool:
    """Whether the rows of `view` can be handed to a kernel as one tensor; fetched ones always can."""
    return view.context is not None or not view.limit or rows_in_one_piece(view) is not None


def knows_sizes(rank: int, rope_dim: int) -> bool:
    """Whether the kernels know such rows: powers of two, latents of 16 to 512 and rotary keys of 16 to 128 numbers."""
    return 16 <= rank <= 512 and 16 <= rope_dim <= 128 and not rank & (rank - 1) and not rope_dim & (rope_dim - 1)


def hopper_knows(rank: int, rope_dim: int) -> bool:
    """The same of the forward on Hopper, which shares the columns of a latent between two warpgroups."""
    return rank in (256, 512) and rope_dim == 64


def _head_block(n_heads: int) -> int:
    return min(HEADS, max(16, 1 << (n_heads - 1).bit_length()))


def _attend(
    q: torch.Tensor, source: _Source, selected: torch.Tensor, scale: float, *, hopper: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, H, R] and log-sum-exp [N, H] in float32, of contiguous queries [N, H, R + Dr]."""
    if hopper:
        from .sparse_attention_hopper import sparse_forward_hopper as kernel

        block, stages = HEADS, {}
    else:
        from .sparse_attention_kernel import sparse_forward_kernel as kernel

        block, stages = _head_block(q.shape[1]), {"num_stages": STAGES}
    n, n_heads, _ = q.shape
    rank, rope_dim = source.latent.shape[-1], source.rope.shape[-1]
    out = q.new_empty(n, n_heads, rank, dtype=torch.float32)
    lse = q.new_empty(n, n_heads, dtype=torch.float32)
    kernel[n, -(-n_heads // block)](
        q,
        source.latent,
        source.rope,
        source.new_latent,
        source.new_rope,
        selected.contiguous(),
        out,
        lse,
        selected.shape[1],
        selected.shape[2],
        n_heads,
        source.limit,
        source.n_local,
        source.latent.stride(0),
        source.rope.stride(0),
        source.new_latent.stride(0),
        source.new_rope.stride(0),
        scale,
        R=rank,
        DR=rope_dim,
        HEADS=block,
        ROWS=ROWS,
        num_warps=8,
        **stages,
    )
    return out, lse


def _backward(
    q: torch.Tensor,
    source: _Source,
    selected: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    scale: float,
    d_latent: torch.Tensor,
    d_rope: torch.Tensor,
    sums: Tensors | None,
) -> torch.Tensor:
    """Gradient [N, H, R + Dr] of the queries in float32; those of rows are added to `d_latent`, `d_rope` and `sums`."""
    n_queries, top_k = selected.shape[1:]
    flat = selected.flatten(0, 1).contiguous()
    d_q = torch.empty_like(q, dtype=torch.float32)
    size = max(1, MAX_KEPT_ELEMENTS // max(1, q.shape[1] * top_k))
    kept_from = source.limit if sums is None else 0
    new = [x.flatten(0, 1) for x in (d_latent, d_rope)]
    page = new if sums is None else [sums["latent"], sums["k_rope"]]
    for start in range(0, len(q), size):
        tile = slice(start, start + size)
        # Everything is linear in a query's gradient; of a size of one it loses nothing in float16.
        norm = torch.linalg.vector_norm(d_out[tile], float("inf"), (1, 2), dtype=torch.float32)
        norm = norm.clamp_min(torch.finfo(torch.float32).tiny)
        d_tile = torch.div(d_out[tile], norm[:, None, None], out=torch.empty_like(q[tile, :, : out.shape[-1]]))
        given = _Tile(q[tile], d_tile, flat[tile], norm, start, n_queries, source, kept_from, scale)
        weights, d_scores = _query_gradient(given, out[tile], lse[tile], d_q[tile])
        for columns, width in enumerate((source.latent.shape[-1], source.rope.shape[-1])):
            _row_gradient(given, weights, d_scores, page[columns], new[columns], width, latent=columns == 0)
    return d_q


class _Tile(NamedTuple):
    """Some queries [n, H, R + Dr] and their gradients of the output over `norm` [n]; the first is number `start`."""

    q: torch.Tensor
    d_out: torch.Tensor
    selected: torch.Tensor  # [n, K]
    norm: torch.Tensor
    start: int
    n_queries: int
    source: _Source
    kept_from: int
    scale: float


def _query_gradient(
    tile: _Tile, out: torch.Tensor, lse: torch.Tensor, d_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills `d_q`; returns weights and gradients of scores [n, H, K], written for rows from `kept_from` on only."""
    from .sparse_attention_kernel import sparse_query_gradient_kernel

    source, (n, n_heads, _) = tile.source, tile.q.shape
    top_k = tile.selected.shape[1]
    weights, d_scores = (tile.q.new_empty(n, n_heads, top_k) for _ in range(2))
    block = _head_block(n_heads)
    sparse_query_gradient_kernel[n, -(-n_heads // block)](
        tile.q,
        tile.d_out,
        out,
        source.latent,
        source.rope,
        source.new_latent,
        source.new_rope,
        tile.selected,
        lse,
        tile.norm,
        d_q,
        weights,
        d_scores,
        tile.start,
        tile.n_queries,
        top_k,
        n_heads,
        source.limit,
        tile.kept_from,
        source.n_local,
        source.latent.stride(0),
        source.rope.stride(0),
        source.new_latent.stride(0),
        source.new_rope.stride(0),
        tile.scale,
        R=source.latent.shape[-1],
        DR=source.rope.shape[-1],
        HEADS=block,
        ROWS=BACK_ROWS,
        num_warps=8,
        num_stages=STAGES,
    )
    return weights, d_scores


def _row_gradient(
    tile: _Tile,
    weights: torch.Tensor,
    d_scores: torch.Tensor,
    d_page: torch.Tensor,
    d_new: torch.Tensor,
    width: int,
    *,
    latent: bool,
) -> None:
    """Adds to the gradients `d_page` and `d_new` of latents or of rotary keys, `width` numbers each."""
    from .sparse_attention_kernel import sparse_row_gradient_kernel

    n, n_heads, whole = tile.q.shape
    rank = tile.source.latent.shape[-1]
    columns, block = min(SUM_COLUMNS, width), _head_block(n_heads)
    sparse_row_gradient_kernel[n * (width // columns), -(-n_heads // block)](
        tile.q,
        tile.d_out,
        tile.selected,
        weights,
        d_scores,
        tile.norm,
        d_page,
        d_new,
        tile.start,
        tile.n_queries,
        tile.selected.shape[1],
        n_heads,
        tile.source.limit,
        tile.kept_from,
        tile.source.n_local,
        d_page.stride(0),
        d_new.stride(0),
        tile.scale,
        R=rank,
        WIDTH=whole,
        OFFSET=0 if latent else rank,
        COLUMNS=columns,
        BLOCKS=width // columns,
        HEADS=block,
        ROWS=SUM_ROWS,
        VALUES=latent,
        num_warps=4,
    )
