"""`sparse_forward_kernel` on Hopper, in Gluon, where each warpgroup computes half of the scores.

Triton gives every warp rows of its own in a product that feeds another, so that of 64 heads both warpgroups compute all
scores. Here they share each product: scores by selected rows, the output by columns. The output of one tile of rows is
multiplied while the next tile arrives, whose scores follow at once; the tile behind it is gathered meanwhile.

Compiled for sm_90 at 64 heads, latent 512 and rope 64 (triton 3.6): 220 KiB of shared memory, 255 registers in 8 warps,
44 bytes of spills, products not serialised. Carrying the output's product over to the next turn of the loop, where its
scores would be asked for first, serialises all of them (ptxas C7514).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # the name changed with triton 3.7


@gluon.jit
def _gather(
    k_s, k_rope_s, page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, page_row, page_rope_row, new_row, new_rope_row,
    at, at_rope, limit, first_new, R: gl.constexpr, DR: gl.constexpr, K: gl.constexpr, K_ROPE: gl.constexpr,
):  # fmt: skip
    """Rows `at`, laid out as in K and in K_ROPE, into shared memory; zeros where nothing is selected."""
    rows = gl.where(at < limit, page_ptr + at * page_row, new_ptr + (at - limit + first_new) * new_row)
    rows = rows[:, None] + gl.arange(0, R, gl.SliceLayout(0, K))[None, :]
    async_copy.async_copy_global_to_shared(k_s, rows, mask=(at >= 0)[:, None])
    behind = new_rope_ptr + (at_rope - limit + first_new) * new_rope_row
    rows = gl.where(at_rope < limit, page_rope_ptr + at_rope * page_rope_row, behind)
    rows = rows[:, None] + gl.arange(0, DR, gl.SliceLayout(0, K_ROPE))[None, :]
    async_copy.async_copy_global_to_shared(k_rope_s, rows, mask=(at_rope >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _asked(selected_ptr, start, n_selected, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    places = start + gl.arange(0, ROWS, LAYOUT)
    return gl.load(selected_ptr + places, mask=places < n_selected, other=-1)


@gluon.jit
def _score(q_s, q_rope_s, k_s, k_rope_s, zero):
    job = warpgroup_mma(q_s, k_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope_s, k_rope_s.permute((1, 0)), job, is_async=True)


@gluon.jit
def _weigh(scores, there, scale2, most, weight):
    """Weights [HEADS, ROWS] relative to the greatest score so far, and the factor on those before them."""
    scores = gl.where(there[None, :], scores * scale2, float("-inf"))
    # Tiles in front may select nothing: -inf less -inf would be NaN for good.
    now = gl.maximum(most, gl.max(scores, 1))
    base = gl.where(now == float("-inf"), 0.0, now)
    weights = gl.exp2(scores - base[:, None])
    fade = gl.exp2(most - base)
    return now, weight * fade[:, None] + weights, weights, fade


@gluon.jit(do_not_specialize=["n_queries", "n_heads", "limit", "n_local"])
def sparse_forward_hopper(
    q_ptr, page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, selected_ptr, out_ptr, lse_ptr,
    n_queries, n_selected, n_heads, limit, n_local, page_row, page_rope_row, new_row, new_rope_row, scale,
    R: gl.constexpr, DR: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    k_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    r_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    k_rows: gl.constexpr = gl.SliceLayout(1, k_layout)
    r_rows: gl.constexpr = gl.SliceLayout(1, r_layout)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, R // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, R], dtype)
    r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DR], dtype)
    q_s = gl.allocate_shared_memory(dtype, [HEADS, R], k_shared)
    q_rope_s = gl.allocate_shared_memory(dtype, [HEADS, DR], r_shared)
    k_s = gl.allocate_shared_memory(dtype, [2, ROWS, R], k_shared)
    k_rope_s = gl.allocate_shared_memory(dtype, [2, ROWS, DR], r_shared)

    query = gl.program_id(0).to(gl.int64)
    first = gl.program_id(1) * HEADS
    first_new = query // n_queries * n_local
    selected_ptr += query * n_selected
    tiles = gl.cdiv(n_selected, ROWS)

    heads = first + gl.arange(0, HEADS, k_rows)
    place = (q_ptr + (query * n_heads + heads) * (R + DR))[:, None]
    columns = gl.arange(0, R, gl.SliceLayout(0, k_layout))[None, :]
    async_copy.async_copy_global_to_shared(q_s, place + columns, mask=(heads < n_heads)[:, None])
    heads = first + gl.arange(0, HEADS, r_rows)
    place = (q_ptr + (query * n_heads + heads) * (R + DR) + R)[:, None]
    columns = gl.arange(0, DR, gl.SliceLayout(0, r_layout))[None, :]
    async_copy.async_copy_global_to_shared(q_rope_s, place + columns, mask=(heads < n_heads)[:, None])
    at = _asked(selected_ptr, 0, n_selected, ROWS, k_rows)
    at_rope = _asked(selected_ptr, 0, n_selected, ROWS, r_rows)
    _gather(
        k_s.index(0), k_rope_s.index(0), page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, page_row, page_rope_row,
        new_row, new_rope_row, at, at_rope, limit, first_new, R, DR, k_layout, r_layout,
    )  # fmt: skip
    at = _asked(selected_ptr, ROWS, n_selected, ROWS, k_rows)
    at_rope = _asked(selected_ptr, ROWS, n_selected, ROWS, r_rows)

    scale2 = scale * 1.4426950408889634  # base-2 exponentials
    zero = gl.zeros([HEADS, ROWS], gl.float32, s_layout)
    most = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    weight = gl.zeros([HEADS, ROWS], gl.float32, s_layout)  # summed over its columns at the end
    total = gl.zeros([HEADS, R], gl.float32, o_layout)
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()
    s_job = _score(q_s, q_rope_s, k_s.index(0), k_rope_s.index(0), zero)
    _gather(
        k_s.index(1), k_rope_s.index(1), page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, page_row, page_rope_row,
        new_row, new_rope_row, at, at_rope, limit, first_new, R, DR, k_layout, r_layout,
    )  # fmt: skip
    there = _asked(selected_ptr, 0, n_selected, ROWS, gl.SliceLayout(0, s_layout)) >= 0
    scores = warpgroup_mma_wait(0, deps=[s_job])
    most, weight, weights, fade = _weigh(scores, there, scale2, most, weight)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    for tile in range(1, tiles):
        now_in, into = tile % 2, 1 - tile % 2
        at = _asked(selected_ptr, (tile + 1) * ROWS, n_selected, ROWS, k_rows)
        at_rope = _asked(selected_ptr, (tile + 1) * ROWS, n_selected, ROWS, r_rows)
        o_job = warpgroup_mma(p, k_s.index(into), total, is_async=True)
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        s_job = _score(q_s, q_rope_s, k_s.index(now_in), k_rope_s.index(now_in), zero)
        there = _asked(selected_ptr, tile * ROWS, n_selected, ROWS, gl.SliceLayout(0, s_layout)) >= 0
        total, p = warpgroup_mma_wait(2, deps=[o_job, p])
        _barrier()  # both warpgroups have read the tile before: its place is free
        _gather(
            k_s.index(into), k_rope_s.index(into), page_ptr, page_rope_ptr, new_ptr, new_rope_ptr, page_row,
            page_rope_row, new_row, new_rope_row, at, at_rope, limit, first_new, R, DR, k_layout, r_layout,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[s_job])
        most, weight, weights, fade = _weigh(scores, there, scale2, most, weight)
        total *= gl.convert_layout(fade, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)
    last_job = warpgroup_mma(p, k_s.index((tiles - 1) % 2), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[last_job])

    weight = gl.sum(weight, 1)
    heads = first + gl.arange(0, HEADS, gl.SliceLayout(1, s_layout))
    lse = (most + gl.log2(weight)) * 0.6931471805599453
    gl.store(lse_ptr + query * n_heads + heads, lse, mask=heads < n_heads)
    heads = first + gl.arange(0, HEADS, gl.SliceLayout(1, o_layout))
    place = (out_ptr + (query * n_heads + heads) * R)[:, None]
    columns = gl.arange(0, R, gl.SliceLayout(0, o_layout))[None, :]
    total /= gl.convert_layout(weight, gl.SliceLayout(1, o_layout))[:, None]
    gl.store(place + columns, total, mask=(heads < n_heads)[:, None])
