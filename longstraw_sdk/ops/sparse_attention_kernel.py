"""The Triton kernels behind `sparse_attention_fused`: one program per query and block of its heads.

Rows are gathered from where they lie, prefix or new, straight into shared memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

VARYING = ["n_queries", "n_heads", "limit", "n_local", "first", "kept_from"]
"""Whether these are 1 or multiples of 16 is no reason to compile anew: some change with every decoded token."""


@triton.jit
def _rows(page_ptr, page_row, new_ptr, new_row, at, limit, first_new):
    """Where the rows `at` begin: on the one page of the prefix below `limit`, else behind it."""
    return tl.where(at < limit, page_ptr + at * page_row, new_ptr + (at - limit + first_new) * new_row)


@triton.jit(do_not_specialize=VARYING)
def sparse_forward_kernel(
    q_ptr, page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, selected_ptr, out_ptr, lse_ptr,
    n_queries, n_selected, n_heads, limit, n_local, page_row, page_rope_row, new_row, new_rope_row, scale,
    R: tl.constexpr, DR: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first_new = query // n_queries * n_local
    dims, rope_dims = tl.arange(0, R), tl.arange(0, DR)
    real = heads < n_heads
    q_rows = q_ptr + (query * n_heads + heads) * (R + DR)
    q = tl.load(q_rows[:, None] + dims[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(q_rows[:, None] + (R + rope_dims)[None, :], mask=real[:, None], other=0.0)
    scale2 = scale * 1.4426950408889634  # base-2 exponentials
    most = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((HEADS,), dtype=tl.float32)
    total = tl.zeros((HEADS, R), dtype=tl.float32)
    for start in range(0, n_selected, ROWS):
        places = start + tl.arange(0, ROWS)
        at = tl.load(selected_ptr + query * n_selected + places, mask=places < n_selected, other=-1)
        there = at >= 0
        rows = _rows(page_ptr, page_row, new_ptr, new_row, at, limit, first_new)
        k = tl.load(rows[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        rows = _rows(page_rope_ptr, page_rope_row, new_rope_ptr, new_rope_row, at, limit, first_new)
        k_rope = tl.load(rows[:, None] + rope_dims[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q_rope, tl.trans(k_rope), tl.dot(q, tl.trans(k)))
        scores = tl.where(there[None, :], scores * scale2, float("-inf"))
        # Tiles in front may select nothing: -inf less -inf would be NaN for good.
        now = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(most - base)
        weight = weight * fade + tl.sum(weights, 1)
        total = tl.dot(weights.to(k.dtype), k, total * fade[:, None])
        most = now
    place = query * n_heads + heads
    tl.store(out_ptr + place[:, None] * R + dims[None, :], total / weight[:, None], mask=real[:, None])
    tl.store(lse_ptr + place, (most + tl.log2(weight)) * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=VARYING)
def sparse_query_gradient_kernel(
    q_ptr, d_out_ptr, out_ptr, page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, selected_ptr, lse_ptr, size_ptr,
    d_q_ptr, weights_ptr, d_scores_ptr,
    first, n_queries, n_selected, n_heads, limit, kept_from, n_local,
    page_row, page_rope_row, new_row, new_rope_row, scale,
    R: tl.constexpr, DR: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Also keeps the weights and the gradients of the scores [n, H, K] of entries from row `kept_from` on."""
    query = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * HEADS
    heads = part + tl.arange(0, HEADS)
    first_new = (first + query) // n_queries * n_local
    dims, rope_dims = tl.arange(0, R), tl.arange(0, DR)
    real = heads < n_heads
    place = query * n_heads + heads
    # Queries over gradients of the output: one product with all 8 warps, each of which has rows of its own, where two
    # products of 64 rows would be computed by both warpgroups.
    both = tl.arange(0, 2 * HEADS)
    both_heads = part + both % HEADS
    both_place = query * n_heads + both_heads
    stacked = tl.where(both < HEADS, q_ptr + both_place * (R + DR), d_out_ptr + both_place * R)
    q = tl.load(stacked[:, None] + dims[None, :], mask=(both_heads < n_heads)[:, None], other=0.0)
    q_rows = q_ptr + place * (R + DR)
    q_rope = tl.load(q_rows[:, None] + (R + rope_dims)[None, :], mask=real[:, None], other=0.0)
    lse2 = tl.load(lse_ptr + place, mask=real, other=0.0) * 1.4426950408889634
    delta = tl.zeros((HEADS,), dtype=tl.float32)
    for column in tl.static_range(0, R, 64 if R > 64 else R):  # all at once would take too many registers
        columns = place[:, None] * R + column + tl.arange(0, 64 if R > 64 else R)[None, :]
        d_out = tl.load(d_out_ptr + columns, mask=real[:, None], other=0.0).to(tl.float32)
        delta += tl.sum(d_out * tl.load(out_ptr + columns, mask=real[:, None], other=0.0), 1)
    scale2 = scale * 1.4426950408889634
    total = tl.zeros((HEADS, R), dtype=tl.float32)
    total_rope = tl.zeros((HEADS, DR), dtype=tl.float32)
    for start in range(0, n_selected, ROWS):
        places = start + tl.arange(0, ROWS)
        at = tl.load(selected_ptr + query * n_selected + places, mask=places < n_selected, other=-1)
        there = at >= 0
        rows = _rows(page_ptr, page_row, new_ptr, new_row, at, limit, first_new)
        k = tl.load(rows[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        rows = _rows(page_rope_ptr, page_rope_row, new_rope_ptr, new_rope_row, at, limit, first_new)
        k_rope = tl.load(rows[:, None] + rope_dims[None, :], mask=there[:, None], other=0.0)
        products = tl.reshape(tl.dot(q, tl.trans(k)), (2, HEADS, ROWS))
        scores, d_weights = tl.split(tl.permute(products, (1, 2, 0)))
        scores = (scores + tl.dot(q_rope, tl.trans(k_rope))) * scale2 - lse2[:, None]
        weights = tl.where(there[None, :], tl.exp2(scores), 0.0)
        d_scores = (weights * (d_weights - delta[:, None])).to(k.dtype)
        total = tl.dot(d_scores, k, total)
        # A product of its own, so that both are awaited here: carried over to the next tile, all products of the loop
        # are serialised (ptxas C7515).
        total_rope += tl.dot(d_scores, k_rope) * scale
        kept = place[:, None] * n_selected + places[None, :]
        keep = real[:, None] & ((at >= kept_from) & (places < n_selected))[None, :]
        tl.store(weights_ptr + kept, weights.to(k.dtype), mask=keep)
        tl.store(d_scores_ptr + kept, d_scores, mask=keep)
    size = tl.load(size_ptr + query)
    d_q_rows = d_q_ptr + place[:, None] * (R + DR)
    tl.store(d_q_rows + dims[None, :], total * (scale * size), mask=real[:, None])
    tl.store(d_q_rows + (R + rope_dims)[None, :], total_rope * size, mask=real[:, None])


@triton.jit(do_not_specialize=VARYING)
def sparse_row_gradient_kernel(
    q_ptr, d_out_ptr, selected_ptr, weights_ptr, d_scores_ptr, size_ptr, d_page_ptr, d_new_ptr,
    first, n_queries, n_selected, n_heads, limit, kept_from, n_local, d_page_row, d_new_row, scale,
    R: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of rows from `kept_from` on, a block of columns per program. `VALUES`: of latents."""
    query = (tl.program_id(0) // BLOCKS).to(tl.int64)
    part = tl.program_id(1) * HEADS
    heads = part + tl.arange(0, HEADS)
    columns = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    first_new = (first + query) // n_queries * n_local
    real = heads < n_heads
    place = query * n_heads + heads
    q_rows = q_ptr + place * WIDTH
    q = tl.load(q_rows[:, None] + (OFFSET + columns)[None, :], mask=real[:, None], other=0.0)
    size = tl.load(size_ptr + query)
    if VALUES:
        d_out = tl.load((d_out_ptr + place * R)[:, None] + columns[None, :], mask=real[:, None], other=0.0)
    for start in range(0, n_selected, ROWS):
        places = start + tl.arange(0, ROWS)
        at = tl.load(selected_ptr + query * n_selected + places, mask=places < n_selected, other=-1)
        keep = at >= kept_from
        if tl.max(at, 0) >= kept_from:
            kept = place[None, :] * n_selected + places[:, None]
            mask = keep[:, None] & real[None, :]
            d_scores = tl.load(d_scores_ptr + kept, mask=mask, other=0.0)
            if VALUES:
                weights = tl.load(weights_ptr + kept, mask=mask, other=0.0)
                found = tl.dot(weights, d_out, tl.dot(d_scores, q) * scale)
            else:
                found = tl.dot(d_scores, q) * scale
            rows = _rows(d_page_ptr, d_page_row, d_new_ptr, d_new_row, at, limit, first_new)
            tl.atomic_add(rows[:, None] + columns[None, :], found * size, mask=keep[:, None], sem="relaxed")
