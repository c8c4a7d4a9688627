"""Attention of each query over its own selected rows of a latent state (absorbed multi-head latent attention).

All heads of a query read the same selected latents, which stay compressed: the query is brought into latent space
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2) and so is the output. Rows that nobody selected are never touched. The
backward gathers the rows again instead of keeping them, and adds gradients of prefix rows in place to their
accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..state.resident import PagedView
from ..types import accumulation_dtype
from .autocast import without_autocast
from .fetched_rows import FetchedRows
from .latent_pages import LatentPages, OfPage, PageHits, joined, page_bounds
from .sparse_selection import NOT_SELECTED

MAX_GATHERED_ELEMENTS = 2**24
"""Bound on the gathered elements held at once (64 MiB in float32); more queries are tiled."""

CUDA_FACTOR = 8
"""The bound is as many times as large on CUDA, where small tiles leave most of the device idle."""


def sparse_latent_attention(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    selected: torch.Tensor,
    view: PagedView,
    scale: float,
) -> torch.Tensor:
    """Output [B, S, H, R] in latent space and in the accumulation dtype (float32, or float64 for float64 inputs).

    Args:
        query_latent: [B, S, H, R], queries without position multiplied into latent space.
        query_rope: [B, S, H, Dr].
        latent, key_rope: [B, L, R] and [B, L, Dr], the rows behind the prefix; row j has position `view.limit + j`.
        selected: LongTensor [B, S, K] of positions; `NOT_SELECTED` entries are skipped. Every query needs one other.
        view: the resident rows, components "latent" and "k_rope", which all B rows share.
        scale: factor on the scores.
    """
    query = torch.cat([query_latent, query_rope.to(query_latent.dtype)], -1)
    out: torch.Tensor = _SparseLatentAttention.apply(query, latent, key_rope, selected, view, scale)
    return out


class _SparseLatentAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        query: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        selected: torch.Tensor,
        view: PagedView,
        scale: float,
    ) -> torch.Tensor:
        q = query.to(accumulation_dtype(query.dtype)).flatten(0, 1) * scale  # [N, H, W]
        rank = latent.shape[-1]
        out, lse = q.new_empty(*q.shape[:2], rank), q.new_empty(q.shape[:2])
        prefix, chosen, new_latent, new_rope = _reachable(view, selected, latent, key_rope)
        for tile, plan in _tiles(chosen, new_latent.shape[1], q.shape[-1], prefix):
            rows = _gather(plan, new_latent, new_rope, prefix, q.dtype)
            scores = torch.einsum("nhw,nkw->nhk", q[tile], rows).masked_fill(plan.hidden[:, None], float("-inf"))
            lse[tile] = scores.logsumexp(-1)
            out[tile] = torch.exp(scores - lse[tile][..., None]) @ rows[..., :rank]
        ctx.save_for_backward(query, latent, key_rope, selected, out, lse)
        ctx.view, ctx.scale = view, scale
        return out.view(*query.shape[:-1], rank)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, latent, key_rope, selected, out, lse = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
        q = query.to(out.dtype).flatten(0, 1) * scale
        rank = latent.shape[-1]
        d_out = grad_outputs[0].to(out.dtype).flatten(0, 1)
        delta = (d_out * out).sum(-1)
        d_q = torch.empty_like(q)
        prefix, chosen, new_latent, new_rope = _reachable(view, selected, latent, key_rope)
        d_latent, d_rope = (torch.zeros(x.shape, dtype=q.dtype, device=x.device) for x in (new_latent, new_rope))
        view.mark_gradient()
        with prefix.accumulators() as of_page:
            for tile, plan in _tiles(chosen, new_latent.shape[1], q.shape[-1], prefix):
                rows = _gather(plan, new_latent, new_rope, prefix, q.dtype)
                scores = torch.einsum("nhw,nkw->nhk", q[tile], rows).masked_fill(plan.hidden[:, None], float("-inf"))
                weights = torch.exp(scores - lse[tile][..., None])
                d_scores = weights * (d_out[tile] @ rows[..., :rank].transpose(1, 2) - delta[tile][..., None])
                d_q[tile] = d_scores @ rows
                d_rows = d_scores.transpose(1, 2) @ q[tile]
                d_rows[..., :rank] += weights.transpose(1, 2) @ d_out[tile]
                _scatter(plan, d_rows, d_latent, d_rope, prefix, of_page)
        d_latent, d_rope = (_own_part(x, view) for x in (d_latent, d_rope))
        d_query = (d_q * scale).view_as(query).to(query.dtype)
        return d_query, d_latent.to(latent.dtype), d_rope.to(key_rope.dtype), None, None, None


def _reachable(
    view: PagedView, selected: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor
) -> tuple[LatentPages, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Resident rows, the selection in terms of them, and all new rows, once everything selected is on this rank."""
    if view.context is None:
        return joined(view), selected, latent, key_rope
    fetched = FetchedRows(view, selected)
    if view.split:
        latent, key_rope = (view.context.gather_tokens(x) for x in (latent, key_rope))
    return fetched, fetched.selected, latent, key_rope


def _own_part(d_new: torch.Tensor, view: PagedView) -> torch.Tensor:
    """Gradient of this rank's new rows, summed over the ranks that attended to them."""
    if view.context is None or not view.split:
        return d_new
    return view.context.sum_scatter(view.context.by_rank(d_new))


class _Plan(NamedTuple):
    """Where the selected rows of some queries live."""

    hits: PageHits  # of the flattened selection, n * K
    local: torch.Tensor  # flat index in [B * L] of each entry behind the pages
    hidden: torch.Tensor  # [n, K], entries that select nothing

    @property
    def behind(self) -> torch.Tensor:
        """Where the entries behind the pages stand in the flattened selection."""
        return self.hits.order[self.hits.edges[-1] :]


def _tiles(selected: torch.Tensor, n_local: int, width: int, pages: LatentPages) -> Iterator[tuple[slice, _Plan]]:
    """Tiles of the B * S queries whose gathered rows stay under the bound."""
    n_rows, n_queries, top_k = selected.shape
    flat = selected.flatten(0, 1)
    bound = MAX_GATHERED_ELEMENTS * (CUDA_FACTOR if selected.is_cuda else 1)
    size = max(1, bound // (top_k * width))
    bounds = page_bounds(pages, selected.device)
    for start in range(0, n_rows * n_queries, size):
        tile = slice(start, min(start + size, n_rows * n_queries))
        hits = PageHits.of(flat[tile].flatten(), bounds)
        first = hits.edges[-1]
        batch = (start + hits.order[first:] // top_k) // n_queries
        local = batch * n_local + hits.rows[first:] - pages.limit
        yield tile, _Plan(hits, local, flat[tile] == NOT_SELECTED)


def _gather(
    plan: _Plan, latent: torch.Tensor, key_rope: torch.Tensor, pages: LatentPages, dtype: torch.dtype
) -> torch.Tensor:
    """Rows [n, K, R + Dr]; zeros where nothing is selected."""
    rank, width = latent.shape[-1], latent.shape[-1] + key_rope.shape[-1]
    rows = torch.zeros(plan.hidden.numel(), width, dtype=dtype, device=latent.device)
    plan.hits.read(pages, rows)
    rows[plan.behind, :rank] = latent.flatten(0, 1)[plan.local].to(dtype)
    rows[plan.behind, rank:] = key_rope.flatten(0, 1)[plan.local].to(dtype)
    return rows.view(*plan.hidden.shape, width)


def _scatter(
    plan: _Plan,
    d_rows: torch.Tensor,
    d_latent: torch.Tensor,
    d_rope: torch.Tensor,
    pages: LatentPages,
    of_page: OfPage | None,
) -> None:
    """Add gradients of the gathered rows to those of the local rows and to the accumulators of the pages."""
    rank = d_latent.shape[-1]
    flat = d_rows.flatten(0, 1)
    if of_page is not None:
        plan.hits.add(flat, of_page, pages.page_tokens)
    d_latent.flatten(0, 1).index_add_(0, plan.local, flat[plan.behind, :rank])
    d_rope.flatten(0, 1).index_add_(0, plan.local, flat[plan.behind, rank:])
