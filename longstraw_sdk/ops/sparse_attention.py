"""Attention of each query over its own selected rows of a latent state (absorbed multi-head latent attention).

All heads of a query read the same selected latents, which stay compressed: the query is brought into latent space
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2) and so is the output. Rows that nobody selected are never touched. The
backward gathers the rows again instead of keeping them, and adds gradients of prefix rows in place to their
accumulators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from ..environment import kernels_off
from ..state import MLALatentSpec, PagedLayerState, PagePool
from ..state.resident import PagedView
from ..types import accumulation_dtype
from .autocast import without_autocast
from .fetched_rows import own_part, reachable
from .latent_pages import LatentPages, OfPage, PageHits, page_bounds
from .sparse_attention_fused import FusedSparseAttention, fits, hopper_knows, knows_sizes
from .sparse_selection import NOT_SELECTED
from .trial import too_far, tried

_LOG = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)

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

    By kernels where `why_not_fused` finds nothing against them.

    Args:
        query_latent: [B, S, H, R], queries without position multiplied into latent space.
        query_rope: [B, S, H, Dr].
        latent, key_rope: [B, L, R] and [B, L, Dr], the rows behind the prefix; row j has position `view.limit + j`.
        selected: LongTensor [B, S, K] of positions; `NOT_SELECTED` entries are skipped. Every query needs one other.
        view: the resident rows, components "latent" and "k_rope", which all B rows share.
        scale: factor on the scores.
    """
    given = (query_latent, query_rope, latent, key_rope, selected, view, scale)
    if why_not_fused(query_latent, query_rope, latent, key_rope, view) is None:
        hopper = why_not_hopper(latent, query_latent.shape[-2], key_rope.shape[-1]) is None
        out: torch.Tensor = FusedSparseAttention.apply(*given, hopper)
        return out
    return sparse_latent_attention_reference(*given)


def sparse_latent_attention_reference(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    selected: torch.Tensor,
    view: PagedView,
    scale: float,
) -> torch.Tensor:
    """`sparse_latent_attention` in plain PyTorch, which multiplies in the accumulation dtype."""
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
        prefix, chosen, new_latent, new_rope = reachable(view, selected, latent, key_rope)
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
        prefix, chosen, new_latent, new_rope = reachable(view, selected, latent, key_rope)
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
        d_latent, d_rope = (own_part(x, view) for x in (d_latent, d_rope))
        d_query = (d_q * scale).view_as(query).to(query.dtype)
        return d_query, d_latent.to(latent.dtype), d_rope.to(key_rope.dtype), None, None, None


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


def why_not_fused(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    view: PagedView,
) -> str | None:
    """What keeps the kernels from being used for these arguments of `sparse_latent_attention`, or None.

    Found by a trial, and logged, once per kind of rows and number of heads.
    """
    sizes = (query_latent.shape[-2], latent.shape[-1], key_rope.shape[-1])
    reason = _why(kernels_off(), latent.device, latent.dtype, *sizes)
    if reason is not None:
        return reason
    rows = {key_rope.dtype} | ({c.dtype for c in view.layer_state.components} if view.first_new else set())
    if rows != {latent.dtype} or {query_latent.dtype, query_rope.dtype} - {latent.dtype, torch.float32}:
        return "rows differ in dtype, or queries are neither in theirs nor in float32"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms were asked for, and the order of atomic additions is none"
    return None if fits(view) else "the pages of the prefix do not lie next to each other"


@cache
def _why(
    off: str | None, device: torch.device, dtype: torch.dtype, n_heads: int, rank: int, rope_dim: int
) -> str | None:
    if off is not None:
        reason: str | None = off
    elif device.type != "cuda":
        reason = f"the kernels need CUDA, not {device.type}"
    elif dtype not in DTYPES:
        reason = f"the kernels multiply bfloat16 or float16, not {dtype}"
    elif not knows_sizes(rank, rope_dim):
        reason = f"the kernels know latents of 16 to 512 and rotary keys of 16 to 128, not {rank} and {rope_dim}"
    elif find_spec("triton") is None:
        reason = "Triton is not installed"
    else:
        reason = tried(lambda: _trial(device, dtype, n_heads, rank, rope_dim), device)
    told = "fused kernels" if reason is None else f"reference, because {reason}"
    what = f"{n_heads} heads over latents of {rank} and {rope_dim}"
    _LOG.info("sparse attention of %s on %s, %s: %s", dtype, device, what, told)
    return reason


def why_not_hopper(latent: torch.Tensor, n_heads: int, rope_dim: int) -> str | None:
    """The same of the forward kernel for Hopper, where nothing is against the others."""
    return _why_not_hopper(kernels_off(), latent.device, latent.dtype, n_heads, latent.shape[-1], rope_dim)


@cache
def _why_not_hopper(
    off: str | None, device: torch.device, dtype: torch.dtype, n_heads: int, rank: int, rope_dim: int
) -> str | None:
    if off is not None:
        reason: str | None = off
    elif not hopper_knows(rank, rope_dim):
        reason = f"it knows latents of 256 and 512 and rotary keys of 64, not {rank} and {rope_dim}"
    elif (major := torch.cuda.get_device_capability(device)[0]) != 9:
        reason = f"it needs compute capability 9, not {major}"
    else:
        reason = tried(lambda: _trial(device, dtype, n_heads, rank, rope_dim, hopper=True), device)
    told = "used" if reason is None else f"unused, because {reason}"
    _LOG.info("sparse attention of %s on %s, its forward kernel for Hopper: %s", dtype, device, told)
    return reason


Operator = Callable[..., torch.Tensor]


def _trial(
    device: torch.device, dtype: torch.dtype, n_heads: int, rank: int, rope_dim: int, *, hopper: bool = False
) -> str | None:
    """2 rows of 9 new tokens behind 200 others, each of which selects up to 150, beside the reference in float32."""
    case = _TrialCase(device, dtype, n_heads, rank, rope_dim)

    def kernels(*given: Any) -> torch.Tensor:
        out: torch.Tensor = FusedSparseAttention.apply(*given, hopper)
        return out

    found = case.run(kernels, dtype)
    wanted = case.run(sparse_latent_attention_reference, torch.float32)
    for name, a, b in zip(_TrialCase.NAMES, found, wanted, strict=True):
        if reason := too_far(name, a, b, dtype):
            return reason
    again = case.run(kernels, dtype)
    for name, a, b in zip(_TrialCase.NAMES[:3], found, again, strict=False):
        if not torch.equal(a, b):
            return f"in a trial the last bits of its {name} changed from one run to the next"
    return None


class _TrialCase:
    """Inputs for one call. Rows that nobody selected are not a number, so that a read of them is found."""

    N_PREFIX, N_NEW, TOP_K = 200, 9, 150
    NAMES = (
        "output",
        "gradient of queries",
        "gradient of rotary queries",
        "gradient of new latents",
        "gradient of new rotary keys",
        "gradient of latents",
        "gradient of rotary keys",
    )

    def __init__(self, device: torch.device, dtype: torch.dtype, n_heads: int, rank: int, rope_dim: int):
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.sizes = (rank, rope_dim)
        self.queries = [draw(2, self.N_NEW, n_heads, width) for width in self.sizes]
        self.new = [draw(2, self.N_NEW, width) for width in self.sizes]
        self.prefix = [draw(1, self.N_PREFIX, width) for width in self.sizes]
        self.d_out = draw(2, self.N_NEW, n_heads, rank)
        # Up to 150 of all that a query may see; the first query selects a few only, the others each an own set.
        at = torch.arange(self.N_PREFIX + self.N_NEW, device=device)
        last = torch.arange(self.N_PREFIX, self.N_PREFIX + self.N_NEW, device=device)
        luck = torch.rand(2, self.N_NEW, len(at), generator=generator, device=device)
        luck = luck.masked_fill((at > last[:, None]) | (at == 17), -1.0)
        luck[:, 0, 3:-1] = -1.0
        best = luck.topk(self.TOP_K)
        self.selected = torch.where(best.values < 0, NOT_SELECTED, best.indices).sort(-1).values
        for rows in self.prefix:
            rows[:, 17] = float("nan")

    def run(self, operator: Operator, dtype: torch.dtype) -> list[torch.Tensor]:
        """Output, gradients of queries and of new rows, and those of the prefix, with rows in `dtype`."""
        rank, rope_dim = self.sizes
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*self.queries, *self.new)]
        pool = PagePool(64)
        pool.open("trial")
        spec = MLALatentSpec(layer=0, latent_dim=rank, rope_dim=rope_dim, dtype=dtype)
        pages = PagedLayerState(spec, pool, "trial", self.d_out.device, self.N_PREFIX)
        pages.append(dict(zip(("latent", "k_rope"), (x.to(dtype) for x in self.prefix), strict=True)))
        view = PagedView(pages, self.N_PREFIX, True)
        with torch.enable_grad():
            out = operator(*leaves, self.selected, view, (rank + rope_dim) ** -0.5)
            out.backward(self.d_out.to(out.dtype))
        sums = pages.cotangents(0, self.N_PREFIX)
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None), sums["latent"], sums["k_rope"]]
