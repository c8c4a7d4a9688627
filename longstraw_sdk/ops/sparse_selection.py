"""Exact top-k selection of a sparse-attention indexer, tile by tile (DeepSeek sparse attention, arXiv 2512.02556).

Scores of one query against all keys never exist at once: each tile is scored, packed into unique integers and merged
into the running best. Unique integers make the selected set well defined whatever the tiling, and merging associative,
so that chunks, pages and ranks cannot change what is selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..errors import NumericsError
from ..state import ContextGroup
from .autocast import without_autocast
from .index_scores import index_scores, uses_kernel

MAX_TILE_ELEMENTS = 2**22
"""Bound on the per-head scores held at once (16 MiB in float32); more queries are tiled."""

MAX_CUDA_ELEMENTS = 2**27
"""The same on CUDA: 512 MiB of per-head scores by the reference.

With the kernel there are none, and it bounds the scores themselves, for which tiles are joined: packing takes up to 36
bytes for each, 4.5 GiB, merging 20 and what topk allocates. It bounds joined keys too (256 MiB in bfloat16).
"""

FEW_SCORES = 2**17
"""Fewer scores are all candidates for the best: finding those that are takes longer than merging all."""

FEW_CANDIDATES = 2
"""Candidates are picked out of a tile if no query has more of them than one in so many keys."""

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


@torch.no_grad()
def _best(
    query: torch.Tensor,
    weights: torch.Tensor,
    query_positions: torch.Tensor,
    tiles: Iterable[Tile],
    top_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed keys [B, S, at most K] of the best, unordered, and whether all scores were finite."""
    batch, n_queries = query.shape[:2]
    best = _Best(batch, n_queries, top_k, query.device)
    finite = torch.ones((), dtype=torch.bool, device=query.device)
    for positions, keys in _joined(query, tiles):
        found = []
        for span in _spans(query, keys):
            scores = index_scores(query[:, span], weights[:, span], keys, scale)
            if scores.numel():
                finite &= torch.stack(scores.aminmax()).isfinite().all()
            least = best.least(span) if scores.numel() >= FEW_SCORES else None
            found.append(_candidates(scores, positions, query_positions[span], least))
        best.add(found)
    return best.merged(), finite


class _Best:
    """The best keys so far, and candidates for their places, which are merged once they are as many."""

    def __init__(self, batch: int, n_queries: int, top_k: int, device: torch.device):
        self._best = torch.empty(batch, n_queries, 0, dtype=torch.int64, device=device)
        self._least: torch.Tensor | None = None
        self._waiting: list[torch.Tensor] = []
        self._top_k = top_k

    def add(self, found: list[torch.Tensor]) -> None:
        """Packed keys [B, n, any] of all queries, some after the others."""
        if not found:
            return
        if len(found) > 1:
            width = max(packed.shape[-1] for packed in found)
            padded = [torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=_LEAST) for x in found]
            found = [torch.cat(padded, 1)]
        self._waiting += found
        if sum(packed.shape[-1] for packed in self._waiting) >= self._top_k:
            self.merged()

    def merged(self) -> torch.Tensor:
        if self._waiting:
            self._best = merge_top_k(self._best, torch.cat(self._waiting, -1), self._top_k)
            self._waiting, self._least = [], None
        return self._best

    def least(self, span: slice) -> torch.Tensor | None:
        """Packed keys [B, n] of the queries of `span`: none below is among the best. None while all are."""
        if self._least is None and 0 < self._best.shape[-1] == self._top_k:
            self._least = self._best.amin(-1)
        return None if self._least is None else self._least[:, span]


def _candidates(
    scores: torch.Tensor, positions: torch.Tensor, query_positions: torch.Tensor, least: torch.Tensor | None
) -> torch.Tensor:
    """Packed keys [B, S, any] of all keys that may be among the best, unordered, filled up with `_LEAST`.

    Scores are compared before they are packed: of a million keys few are ever candidates, and packing one and finding
    the best of all takes tens of times as long as comparing it.

    Args:
        scores: [B, S, T].
        positions: LongTensor [T]; `query_positions` LongTensor [S].
        least: packed keys [B, S] that candidates are not below; None if all keys are candidates.
    """
    scores = _in_float32(scores)
    if least is not None and scores.numel():
        # Where only later positions follow, an equal score is not enough.
        bound, behind = unpack_scores(least), unpack_positions(least) < positions.min()
        bound = torch.where(behind, bound.nextafter(bound.new_tensor(float("inf"))), bound)
        wanted = scores >= bound[..., None]
        if positions.max() > query_positions.min():
            wanted &= positions <= query_positions[:, None]
        counts = wanted.sum(-1).flatten()
        width = int(counts.max())
        if width <= scores.shape[-1] // FEW_CANDIDATES:
            row, column = wanted.flatten(0, 1).nonzero(as_tuple=True)
            place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
            found = torch.full((len(counts), width), _LEAST, dtype=torch.int64, device=scores.device)
            found[row, place] = pack_keys(scores.flatten(0, 1)[row, column], positions[column])
            return found.view(*scores.shape[:2], width)
    return pack_keys(scores, positions).masked_fill(positions > query_positions[:, None], _LEAST)


def _spans(query: torch.Tensor, keys: torch.Tensor) -> list[slice]:
    """The queries to score against `keys` [B or 1, T, D] at once."""
    batch, n_queries, n_heads, _ = query.shape
    bound = MAX_CUDA_ELEMENTS if query.is_cuda else MAX_TILE_ELEMENTS
    held = 1 if uses_kernel(query, keys) else n_heads
    size = max(1, bound // (batch * held * max(1, keys.shape[1])))
    return [slice(i, min(i + size, n_queries)) for i in range(0, n_queries, size)]


def _joined(query: torch.Tensor, tiles: Iterable[Tile]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Positions [T] and keys [B or 1, T, D] of `tiles`, where the kernel scores them several as one.

    Choosing the best of many keys at once costs less than of each tile with the best before it. Tiles for the reference
    stay as they are: its last bits depend on their shape, those of the kernel do not.
    """
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for where, keys in tiles:
        keys = keys if keys.ndim == 3 else keys[None]
        if not isinstance(where, torch.Tensor):
            where = torch.arange(where, where + keys.shape[1], device=query.device)
        n_keys = len(where) + sum(len(positions) for positions, _ in held)
        if held and not (_alike(keys, held[0][1]) and n_keys <= _room(query, keys)):
            yield _concatenated(held)
            held = []
        held.append((where, keys))
    if held:
        yield _concatenated(held)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return len(a) == len(b) and a.dtype == b.dtype


def _room(query: torch.Tensor, keys: torch.Tensor) -> int:
    """How many keys like `keys` [B or 1, T, D] to score at once."""
    if not uses_kernel(query, keys):
        return 0
    return MAX_CUDA_ELEMENTS // max(1, query.shape[0] * query.shape[1], keys.shape[0] * keys.shape[2])


def _concatenated(tiles: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(tiles) == 1:
        return tiles[0]
    return torch.cat([positions for positions, _ in tiles]), torch.cat([keys for _, keys in tiles], 1)


def _require(finite: bool) -> None:
    if not finite:
        raise NumericsError(
            "the sparse-attention indexer gave a score that is not finite, so no selection is right; check the "
            "weights, the dtype and the positions"
        )


def pack_keys(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 keys, greater for a higher float32 score and, among equal scores, for a lower position. No two are equal.

    Args:
        scores: any shape, finite.
        positions: LongTensor that broadcasts against `scores`, within 0 to 2**32 - 1.
    """
    bits = (_in_float32(scores) + 0.0).contiguous().view(torch.int32)  # adding zero folds -0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (MAX_POSITION - positions)


def _in_float32(scores: torch.Tensor) -> torch.Tensor:
    # By the dtype of a tensor: a float64 reference run redirects casts that name float32.
    return scores.to(_FLOAT32.to(scores.device))


def unpack_positions(packed: torch.Tensor) -> torch.Tensor:
    """The positions in `pack_keys`, `NOT_SELECTED` where there is none."""
    return torch.where(packed == _LEAST, NOT_SELECTED, MAX_POSITION - (packed & MAX_POSITION))


def unpack_scores(packed: torch.Tensor) -> torch.Tensor:
    """The float32 scores in `pack_keys`, -inf where there is none."""
    ordered = (packed >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return scores.masked_fill(packed == _LEAST, float("-inf"))


def merge_top_k(best: torch.Tensor | None, packed: torch.Tensor, top_k: int) -> torch.Tensor:
    """The `top_k` greatest of both along the last axis, unordered. Associative and commutative as a set."""
    both = packed if best is None else torch.cat([best, packed], -1)
    return both if both.shape[-1] <= top_k else both.topk(top_k, -1, sorted=False).values
