"""Ledgers of layers with sparse latent attention and experts (GLM-5.2), after `models/glm52` and its operators.

Where tokens decide sizes, selections are taken to be random, which is nearly the most that they can differ, and experts
to be asked for equally often.
"""

from __future__ import annotations

from math import expm1
from typing import Any

from ..ops.sparse_attention import CUDA_FACTOR, MAX_GATHERED_ELEMENTS
from ..ops.sparse_selection import MAX_CUDA_ELEMENTS, MAX_TILE_ELEMENTS
from .layers import lora_linear, rms_norm
from .ledger import Ledger, Sized
from .passes import Numbers, Pass

PACKING_BYTES = 36
"""Per score, while it is packed with its position (`ops/sparse_selection.py`)."""

INDEX_BYTES = 8


def sparse_layer(config: Any, run: Pass, num: Numbers, *, selects: bool, experts: bool) -> Ledger:
    """A decoder layer; `selects` if it has an indexer of its own, `experts` if its MLP is a mixture."""
    n, e, hidden = run.n_tokens, num.model, config.hidden_size
    book = Ledger(n * hidden * e)
    x = book.x
    normed = rms_norm(book, x, n * hidden, n, num, fused=False)
    attended = _attention(book, normed, config, run, num, selects=selects)
    joined = book.op(n * hidden * e, x, attended, passes=True)
    normed = rms_norm(book, joined, n * hidden, n, num, fused=False)
    if experts:
        out = _experts(book, normed, config, run, num)
        shared = config.moe_intermediate_size * config.n_shared_experts
        beside = _factored_mlp(book, normed, hidden, shared, run, num)
        out = book.op(n * hidden * e, out, beside, passes=True)
    else:
        out = _factored_mlp(book, normed, hidden, config.intermediate_size, run, num)
    book.op(n * hidden * e, joined, out, passes=True)
    return book


def _attention(book: Ledger, x: Sized, config: Any, run: Pass, num: Numbers, *, selects: bool) -> Sized:
    n, e, a, r = run.n_tokens, num.model, num.sums, num.lora_rank
    n_heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value, q_rank = config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank
    heads = n * n_heads
    residual = lora_linear(book, x, config.hidden_size, q_rank, run, num)
    residual = rms_norm(book, residual, n * q_rank, n, num, fused=False)
    query = lora_linear(book, residual, q_rank, n_heads * (nope + rope), run, num)
    compressed = lora_linear(book, x, config.hidden_size, rank + rope, run, num)
    turned = book.op(heads * rope * e, query, work=2 * heads * rope * e, back_work=query.n_bytes)
    key_rope = book.op(n * rope * e, compressed, back_work=compressed.n_bytes)
    latent = rms_norm(book, compressed, n * rank, n, num, fused=False)
    book.produce(latent, key_rope)
    top_k = min(config.index_topk, run.prefix + run.width * run.ranks)
    selected = book.op(n * top_k * INDEX_BYTES if selects else 0.0, residual, constant=True)
    if selects:
        book.recall(selected.n_bytes)
        keys = book.op(
            n * config.index_head_dim * e, x, constant=True, work=_select_work(config, run, num, top_k), once=True
        )
        book.produce(keys)
    # Into latent space: the base product, widened, plus the LoRA part in its own dtype.
    wide = heads * rank * a
    lora = heads * r * a + (heads * nope * a if num.narrow else 0)
    base = book.op(wide, query, saves=(query,), extra=lora, work=heads * rank * e if num.narrow else 0)
    query_latent = book.op(wide, base, work=2 * wide, passes=True)
    joined = book.op(heads * (rank + rope) * a, query_latent, turned)
    out = book.op(
        wide,
        joined,
        latent,
        key_rope,
        saves=(joined, latent, key_rope, selected),
        extra=heads * a,
        work=_attend_work(config, run, num, top_k, back=False),
        back_work=_attend_work(config, run, num, top_k, back=True),
    )
    book.save(out)
    book.hold(query, turned, compressed, latent, selected)
    sizes = heads * value * a
    out = book.op(sizes, out, extra=heads * r * a, work=2 * sizes + (heads * rank * e if num.narrow else 0))
    out = book.op(heads * value * e, out)
    return lora_linear(book, out, n_heads * value, config.hidden_size, run, num)


def _factored_linear(book: Ledger, x: Sized, n_in: int, n_out: int, run: Pass, num: Numbers) -> Sized:
    """`FactoredLinear` of `models/glm52/experts.py`, which multiplies in the dtype of LoRA."""
    n, e, a = run.n_tokens, num.model, num.sums
    wide = n * n_out * a
    if not num.narrow:
        return book.op(wide, x, saves=(x,), extra=n * num.lora_rank * a, work=2 * wide, back_work=x.n_bytes)
    copy = n * n_in * a
    both = book.op(wide, x, extra=copy + n * num.lora_rank * a, work=wide + n * n_out * e, back_work=copy + x.n_bytes)
    return book.op(n * n_out * e, both)


def _factored_mlp(book: Ledger, x: Sized, hidden: int, width: int, run: Pass, num: Numbers) -> Sized:
    gate = _factored_linear(book, x, hidden, width, run, num)
    active = book.op(gate.n_bytes, gate, saves=(gate,))
    up = _factored_linear(book, x, hidden, width, run, num)
    inner = book.op(gate.n_bytes, active, up, saves=(active, up))
    return _factored_linear(book, inner, width, hidden, run, num)


def _experts(book: Ledger, x: Sized, config: Any, run: Pass, num: Numbers) -> Sized:
    """Routing, and the experts of this rank on as many rows as it sends away."""
    n, e, a, r = run.n_tokens, num.model, num.sums, num.lora_rank
    hidden, width, top_k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    routes = n * config.n_routed_experts * 4
    wide_x = n * hidden * 4 if num.narrow else 0.0
    scores = book.op(routes, x, work=wide_x + 3 * routes, back_work=2 * routes)
    weights = book.op(n * top_k * 4, scores, saves=(scores,), extra=2 * n * top_k * INDEX_BYTES, back_work=routes)
    rows = n * top_k
    sent = book.op(rows * hidden * e, x)
    if run.expert_ranks > 1:
        sent = book.op(rows * hidden * e, sent, work=rows * hidden * e, back_work=rows * hidden * e)
    lora = 2 * rows * r * a + (rows * hidden * a if num.narrow else 0)
    gate_up = book.op(
        2 * rows * width * a, sent, saves=(sent,), extra=lora, work=rows * width * a, back_work=rows * hidden * a
    )
    active = book.op(rows * width * a, gate_up, saves=(gate_up,), back_work=2 * rows * width * a)
    inner = book.op(rows * width * a, active, gate_up, saves=(active,))
    extra = rows * width * e if num.narrow else 0.0
    results = book.op(rows * hidden * a, inner, saves=(inner,), work=extra + rows * hidden * a / 4)
    results = book.op(rows * hidden * a, results)  # joined over experts
    if run.expert_ranks > 1:
        results = book.op(rows * hidden * a, results, work=rows * hidden * a, back_work=rows * hidden * a)
    by_token = book.op(rows * hidden * a, results)
    weighed = book.op(rows * hidden * a, by_token, weights, saves=(by_token, weights), back_work=rows * hidden * a)
    book.hold(sent, results, by_token)
    return book.op(n * hidden * e, weighed, work=n * hidden * a if num.narrow else 0.0)


def _attend_work(config: Any, run: Pass, num: Numbers, top_k: int, *, back: bool) -> float:
    """Of attention to selected rows, beside its output or the gradients that it returns."""
    a, n_heads = num.sums, config.num_attention_heads
    rank, width = config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
    bound = MAX_GATHERED_ELEMENTS * (CUDA_FACTOR if num.on_gpu else 1)
    queries = max(1, min(run.n_tokens, bound // (top_k * width)))
    entries = queries * top_k
    rows, latents = entries * width * a, entries * rank * a
    scores = queries * n_heads * top_k * a
    scaled = run.n_tokens * n_heads * width * a
    found = min(1.0, run.prefix / max(1, top_k))  # the part of the rows that lie on pages
    indices = 4 * entries * INDEX_BYTES
    read = rows * (2.0 if not num.narrow else 1 + 2 * num.model / a)  # by component, joined, and widened
    gather = rows + max(found * read, (1 - found) * latents) + indices
    fetched, fetching = _fetch_work(config, run, num, top_k)
    several = run.n_tokens > queries  # what the tile before found is still named
    if not back:
        tile = max(gather + (rows + 2 * scores if several else 0), rows + 3 * scores + latents / 8)
        return scaled + max(fetching, fetched + tile)
    sums = run.n_tokens * run.ranks * width * a
    old = 2 * rows + 3 * scores if several else 0
    tile = max(gather + old, 2 * rows + max(latents, found * rows if run.accumulate else 0) + 3 * scores + indices)
    if run.accumulate and run.ranks > 1:
        fetched += distinct_rows(run.n_tokens * top_k, run.prefix) * width * a
    return 2 * scaled + sums + max(fetching, fetched + tile)


def distinct_rows(n_selected: int, prefix: int) -> float:
    """How many of `prefix` rows are among `n_selected`, drawn at random: selections of a text share more."""
    return prefix * -expm1(-n_selected / prefix) if prefix else 0.0


def _fetch_work(config: Any, run: Pass, num: Numbers, top_k: int) -> tuple[float, float]:
    """Bytes of selected rows of other ranks that stay while a rank attends, and the most while they come."""
    if run.ranks == 1:
        return 0.0, 0.0
    width = (config.kv_lora_rank + config.qk_rope_head_dim) * num.model
    asked = distinct_rows(run.n_tokens * top_k, run.prefix)
    named = run.n_tokens * top_k * INDEX_BYTES
    served = asked  # of this rank, by the others
    stay = asked * width + (2 * asked + 2 * served) * INDEX_BYTES + 2 * named
    return stay, stay + (asked + 2 * served) * width + 4 * named


def _select_work(config: Any, run: Pass, num: Numbers, top_k: int) -> float:
    """Of the indexer: its queries and scores, of all ranks' queries against this rank's keys, and the best so far."""
    n = run.n_tokens * run.ranks
    n_heads, dim, page = config.index_n_heads, config.index_head_dim, run.page_tokens
    own = run.n_tokens * n_heads * dim * num.model
    asked = own * (1 + run.ranks) if run.ranks > 1 else own
    n_keys = max(1, run.resident + run.width)
    if num.fused:
        keys = min(n_keys, max(page, MAX_CUDA_ELEMENTS // max(1, n, dim)))
        scores = min(n * keys, MAX_CUDA_ELEMENTS)
        scoring = 8 * scores + keys * dim * num.model  # the scores before are still named
        waiting = 0 if n * keys <= MAX_CUDA_ELEMENTS else n * keys
    else:
        bound = MAX_CUDA_ELEMENTS if num.on_gpu else MAX_TILE_ELEMENTS
        span = max(1, min(n, bound // (n_heads * page)))
        scores = span * page
        copies = (span * n_heads + page) * dim * 4 if num.narrow else 0
        scoring = 4 * scores * n_heads + 8 * scores + copies
        waiting = n * page if span < n else 0
    packing = scores * (4 + PACKING_BYTES)
    merging = (3 * n * top_k + 2 * max(waiting, min(n * page, scores))) * INDEX_BYTES
    best = n * top_k * INDEX_BYTES
    pieces = 2 * run.ranks * run.n_tokens * top_k * INDEX_BYTES if run.ranks > 1 else 0.0
    return max(3 * own, asked + best + max(waiting * INDEX_BYTES + max(scoring, packing), merging, pieces))
