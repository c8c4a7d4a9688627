"""What softmax attention (`ops/attention_reference.py`, `ops/attention_cudnn.py`) allocates beside its results."""

from __future__ import annotations

from ..ops.attention_cudnn import KEYS_PER_CALL
from ..ops.attention_reference import MAX_TILE_ELEMENTS
from .passes import Numbers, Pass

CAUSAL_TILE = 256
"""Queries per tile of `ReferenceAttention.attend_causally`, at most."""


def _causal_queries(n_heads: int, run: Pass) -> int:
    """Queries of a tile; the last rank sees all new tokens."""
    fit = MAX_TILE_ELEMENTS // max(1, run.n_rows * n_heads * run.width * run.ranks)
    return max(1, min(CAUSAL_TILE, fit, run.width))


def _tiles(n_heads: int, n_kv: int, run: Pass, num: Numbers) -> tuple[float, float, float]:
    """Bytes of the last tile of scores among new tokens, of the one before, which is still named, and of one against
    a page."""
    queries, seen = _causal_queries(n_heads, run), run.width * run.ranks
    own = run.n_rows * n_heads * queries * seen
    before = run.n_rows * n_heads * queries * (seen - queries) if queries < run.width else 0
    page = min(run.page_tokens, run.resident)
    rows = run.n_tokens * run.ranks * n_heads // n_kv  # per head of keys
    to_page = n_kv * min(rows, max(1, MAX_TILE_ELEMENTS // max(1, n_kv * page))) * page
    return own * num.sums, before * num.sums, to_page * num.sums


def attention_work(n_heads: int, n_kv: int, dim: int, run: Pass, num: Numbers) -> float:
    """Of the forward, beside its output."""
    q = run.n_tokens * n_heads * dim
    kv = 2 * run.n_tokens * run.ranks * n_kv * dim
    everyone = q * run.ranks
    grouped = q * num.model
    if num.fused:
        n_pieces = -(-run.resident // KEYS_PER_CALL)
        parts = q * 4 + n_pieces * everyone * 4
        # Each part in the dtype of the model and in float32, then every part once more with its weight.
        return grouped + (everyone * num.model if run.ranks > 1 else 0) + max(parts + everyone * num.model, 2 * parts)
    own, before, to_page = _tiles(n_heads, n_kv, run, num)
    wide = num.sums
    copies = kv * wide if num.narrow else 0
    causal = q * wide * 2 + copies + 2 * own + before
    gathered = kv * num.model if run.ranks > 1 else 0
    page = 2 * min(run.page_tokens, run.resident) * n_kv * dim * wide if num.narrow else 0
    travel = everyone * num.model if run.ranks > 1 else 0
    if not run.resident:
        return grouped + gathered + max(causal, 2 * q * wide)
    pages = q * wide + travel + 2 * everyone * wide + 2 * to_page + page
    merged = 2 * (q + (everyone if run.ranks > 1 else q)) * wide + travel - (0 if num.narrow else q * wide)
    return grouped + gathered + max(causal, pages, merged)


def attention_work_back(n_heads: int, n_kv: int, dim: int, run: Pass, num: Numbers) -> float:
    """Of the backward, beside the gradients that it returns."""
    q = run.n_tokens * n_heads * dim
    kv = 2 * run.n_tokens * run.ranks * n_kv * dim
    everyone = q * run.ranks
    grouped = 2 * q * num.model
    if num.fused:
        sums = 4 * (2 * q + kv) + 3 * q * num.model  # float32 sums, and what one call returns
        if not run.accumulate:
            return grouped + sums
        keys = min(run.resident, KEYS_PER_CALL)
        returned = 2 * keys * n_kv * dim * num.model + everyone * (num.model + 4)
        return grouped + 4 * (2 * q + kv) + returned + (3 * everyone * num.model if run.ranks > 1 else 0)
    own, before, to_page = _tiles(n_heads, n_kv, run, num)
    wide = num.sums
    extra = (q + kv) * wide if num.narrow else 0  # sums that are cast at the end
    copies = (2 * q + kv) * wide if num.narrow else q * wide
    causal = copies + 5 * own + before
    page = 2 * min(run.page_tokens, run.resident) * n_kv * dim * wide if num.narrow else 0
    travel = 2 * everyone * num.model if run.ranks > 1 else 0
    pages = travel + 3 * everyone * wide + 3 * to_page + page if run.resident else 0
    return grouped + extra + max(causal, pages)
