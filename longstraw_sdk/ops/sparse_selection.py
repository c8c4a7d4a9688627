"""Exact top-k selection of a sparse-attention indexer, tile by tile (DeepSeek sparse attention, arXiv 2512.02556).

Scores of one query against all keys never exist at once: each tile is scored, packed into unique integers and merged
into the running best. Unique integers make the selected set well defined whatever the tiling, and merging associative,
so that chunks, pages and ranks cannot change what is selected.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import NumericsError
from ..state import ContextGroup
from .autocast import without_autocast

MAX_TILE_ELEMENTS = 2**22
"""Bound on the per-head scores held at once (16 MiB in float32); more queries are tiled."""

NOT_SELECTED = -1
Tile = tuple[int | torch.Tensor, torch.Tensor]
"""Position of the first key, or LongTensor [T] of all positions, and keys [T, D] or [B, T, D]; keys with one batch
entry serve all rows."""

_LEAST = torch.iinfo(torch.int64).min
MAX_POSITION = 2**32 - 1
"""Behind every query, so that no query selects a key with it."""
_FLOAT32 = torch.zeros((), dtype=torch.float32)


@without_autocast
def select_top_k(
    query: torch.Tensor,
    weights: torch.Tensor,
    query_positions: torch.Tensor,
    tiles: Iterable[Tile],
    top_k: int,
    scale: float,
) -> torch.Tensor:
    """Positions [B, S, K] of the `top_k` best keys of each query among those not behind it, in ascending order.

    The score of a key is the sum over heads of `weights * relu(query @ key * scale)`, in float32; of equal scores
    the lower position wins. Where fewer keys can be seen than K = min(top_k, number of keys), `NOT_SELECTED` fills the
    front.

    Args:
        query: [B, S, H, D].
        weights: [B, S, H].
        query_positions: LongTensor [S], the absolute position of each query.
        tiles: keep their bounds on a fixed grid: a score's last bits depend on the shape of the product it comes from.
        top_k: keys per query.
        scale: factor on the products.

    Raises `NumericsError` if a score is not finite.
    """
    best, finite = _best(query, weights, query_positions, tiles, top_k, scale)
    _require(bool(finite))
    return unpack_positions(best).sort(-1).values


@without_autocast
def select_top_k_over_ranks(
    query: torch.Tensor,
    weights: torch.Tensor,
    query_positions: torch.Tensor,
    resident_tiles: Iterable[Tile],
    new_tiles: Iterable[Tile],
    top_k: int,
    scale: float,
    context: ContextGroup,
    *,
    split: bool,
) -> torch.Tensor:
    """`select_top_k` where each rank has some of the resident keys, and with `split` its own queries.

    Queries travel to the keys, and the `top_k` candidates of each rank travel back.

    Args:
        resident_tiles: this rank's keys of the prefix.
        new_tiles: the keys of all new tokens that this rank's queries may see.
    """
    asked = (query, weights, query_positions)
    if split:
        asked = (
            context.gather_tokens(query),
            context.gather_tokens(weights),
            context.gather(query_positions).flatten(),
        )
    found, finite_here = _best(*asked, resident_tiles, top_k, scale)
    found = torch.nn.functional.pad(found, (0, top_k - found.shape[-1]), value=_LEAST)
    if split:
        pieces = context.exchange(context.by_rank(found))
    else:
        pieces = context.gather(found)
    best, finite = _best(query, weights, query_positions, new_tiles, top_k, scale)
    for piece in pieces:
        best = merge_top_k(best, piece, top_k)
    _require(context.agree(bool(finite_here & finite)))
    return unpack_positions(best).sort(-1).values


def _best(
    query: torch.Tensor,
    weights: torch.Tensor,
    query_positions: torch.Tensor,
    tiles: Iterable[Tile],
    top_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed keys [B, S, at most K] of the best, unordered, and whether all scores were finite."""
    batch, n_queries, n_heads, _ = query.shape
    best: list[torch.Tensor | None] = []
    finite = torch.ones((), dtype=torch.bool, device=query.device)
    spans: list[slice] = []
    for where, keys in tiles:
        keys = keys if keys.ndim == 3 else keys[None]
        if not spans:
            size = max(1, MAX_TILE_ELEMENTS // (batch * n_heads * max(1, keys.shape[1])))
            spans = [slice(i, min(i + size, n_queries)) for i in range(0, n_queries, size)]
            best = [None] * len(spans)
        if isinstance(where, torch.Tensor):
            positions = where
        else:
            positions = torch.arange(where, where + keys.shape[1], device=query.device)
        for i, span in enumerate(spans):
            scores = index_scores(query[:, span], weights[:, span], keys, scale)
            finite &= scores.isfinite().all()
            packed = pack_keys(scores, positions)
            packed = packed.masked_fill(positions > query_positions[span, None], _LEAST)
            best[i] = merge_top_k(best[i], packed, top_k)
    if not best:
        return torch.empty(batch, n_queries, 0, dtype=torch.int64, device=query.device), finite
    return torch.cat([b for b in best if b is not None], 1), finite


def _require(finite: bool) -> None:
    if not finite:
        raise NumericsError(
            "the sparse-attention indexer gave a score that is not finite, so no selection is right; check the "
            "weights, the dtype and the positions"
        )


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Scores [B, S, T] of keys [B or 1, T, D] by the formula of `select_top_k`, every key seen by every query."""
    # One product for all queries and heads; a product per query, as broadcasting does, copies the keys.
    flat = query.flatten(1, 2) if len(keys) > 1 else query.flatten(0, 2)[None]  # [B or 1, s * H, D]
    per_head = torch.matmul(flat.float(), keys.float().transpose(1, 2)).mul_(scale).relu_()
    return torch.matmul(weights.float().unsqueeze(-2), per_head.view(*query.shape[:3], -1)).squeeze(-2)


def pack_keys(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 keys, greater for a higher float32 score and, among equal scores, for a lower position. No two are equal.

    Args:
        scores: any shape, finite.
        positions: LongTensor that broadcasts against `scores`, within 0 to 2**32 - 1.
    """
    # Cast to the dtype of a tensor: a float64 reference run redirects casts that name float32. Adding zero folds -0.0.
    bits = (scores.to(_FLOAT32.to(scores.device)) + 0.0).contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (MAX_POSITION - positions)


def unpack_positions(packed: torch.Tensor) -> torch.Tensor:
    """The positions in `pack_keys`, `NOT_SELECTED` where there is none."""
    return torch.where(packed == _LEAST, NOT_SELECTED, MAX_POSITION - (packed & MAX_POSITION))


def merge_top_k(best: torch.Tensor | None, packed: torch.Tensor, top_k: int) -> torch.Tensor:
    """The `top_k` greatest of both along the last axis, unordered. Associative and commutative as a set."""
    both = packed if best is None else torch.cat([best, packed], -1)
    return both if both.shape[-1] <= top_k else both.topk(top_k, -1, sorted=False).values
