"""The kernel behind `query_gradient` on Hopper, in Gluon: a warp that loads, two warpgroups that multiply.

A block has 128 queries. Their rows and those of `d_out` stay in shared memory; blocks of 64 keys (two deep) and values
(one deep) pass through the rest of it, copied by the tensor memory accelerator from one warp. Each warpgroup has 64 of
the queries and sums in registers; while one of them takes exponentials or waits, the other multiplies.

On an H200, 4 x 24,576 queries of 256 behind 32,768 keys: 848 TFLOP/s, where Triton's kernel had 425. Carrying a
product over to the next block of keys (799), letting the warpgroups take turns (682 to 705), and one group of 8 warps
that loads for itself (725) were slower (triton 3.6).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, d_out_desc, q_s, d_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    head, first, tiles, D: gl.constexpr, KEYS: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_full, 4 * 64 * D * 2)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(q_desc, [head, first + part * 64, 0], q_full, q_s.index(part))
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(d_out_desc, [head, first + part * 64, 0], q_full, d_out_s.index(part))
    for tile in range(tiles):
        at = tile % KB
        mbarrier.wait(k_empty.index(at), ((tile // KB) & 1) ^ 1)
        mbarrier.expect(k_full.index(at), KEYS * D * 2)
        tma.async_copy_global_to_shared(k_desc, [head, tile * KEYS, 0], k_full.index(at), k_s.index(at))
        at = tile % VB
        mbarrier.wait(v_empty.index(at), ((tile // VB) & 1) ^ 1)
        mbarrier.expect(v_full.index(at), KEYS * D * 2)
        tma.async_copy_global_to_shared(v_desc, [head, tile * KEYS, 0], v_full.index(at), v_s.index(at))


@gluon.jit
def _scores(a, b, zero):
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _weights(scores, lse2, scale2, left, KEYS: gl.constexpr, layout: gl.constexpr):
    weights = gl.exp2(scores * scale2 - lse2[:, None])
    if left < KEYS:  # Keys beyond the last are rows of zeros, whose weight may be infinite.
        weights = gl.where((gl.arange(0, KEYS, gl.SliceLayout(0, layout)) < left)[None, :], weights, 0.0)
    return weights


@gluon.jit
def _attend(
    q_s, d_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, lse_ptr, delta_ptr, d_q_ptr,
    head, first, n_queries, n_keys, tiles, scale, part: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = q_s.dtype
    base = head.to(gl.int64) * n_queries
    rows = first + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    # Base-2 exponentials: exp(x * scale - lse) = 2 ** (x * scale2 - lse2).
    lse2 = gl.load(lse_ptr + base + rows, mask=rows < n_queries, other=0.0) * 1.4426950408889634
    delta = gl.load(delta_ptr + base + rows, mask=rows < n_queries, other=0.0)
    scale2 = scale * 1.4426950408889634
    zero = gl.zeros([64, KEYS], gl.float32, s_layout)
    total = gl.zeros([64, D], gl.float32, o_layout)
    mbarrier.wait(q_full, 0)
    for tile in range(tiles):
        # A zero the compiler cannot see through, or it keeps every operand's address in registers and spills.
        nil = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        q = q_s.index(part + nil).reshape([64, D])
        d_out = d_out_s.index(part + nil).reshape([64, D])
        k_at = tile % KB
        v_at = tile % VB
        k = k_s.index(k_at).reshape([KEYS, D])
        v = v_s.index(v_at).reshape([KEYS, D])
        mbarrier.wait(k_full.index(k_at), (tile // KB) & 1)
        s_job = _scores(q, k, zero)
        mbarrier.wait(v_full.index(v_at), (tile // VB) & 1)
        p_job = _scores(d_out, v, zero)
        scores = warpgroup_mma_wait(1, deps=[s_job])
        weights = _weights(scores, lse2, scale2, n_keys - tile * KEYS, KEYS, s_layout)
        d_weights = warpgroup_mma_wait(0, deps=[p_job])
        mbarrier.arrive(v_empty.index(v_at), count=1)
        d_scores = gl.convert_layout((weights * (d_weights - delta[:, None])).to(dtype), a_layout)
        o_job = warpgroup_mma(d_scores, k, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[o_job])
        mbarrier.arrive(k_empty.index(k_at), count=1)
    rows = first + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    place = d_q_ptr + (base + rows)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
    real = (rows < n_queries)[:, None]
    gl.store(place, gl.load(place, mask=real, other=0.0) + total * scale, mask=real)


@gluon.jit(do_not_specialize=["n_queries", "n_keys"])
def query_gradient_kernel(
    q_desc, k_desc, v_desc, d_out_desc, lse_ptr, delta_ptr, d_q_ptr, n_queries, n_keys, scale,
    D: gl.constexpr, KEYS: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(1)
    first = gl.program_id(0) * 128
    tiles = gl.cdiv(n_keys, KEYS)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, D], q_desc.layout)
    d_out_s = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(q_desc.dtype, [KB, 1, KEYS, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(q_desc.dtype, [VB, 1, KEYS, D], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [KB, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [KB, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [VB, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [VB, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(KB):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(VB):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                q_s, d_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, lse_ptr, delta_ptr, d_q_ptr,
                head, first, n_queries, n_keys, tiles, scale, 0, D, KEYS, KB, VB,
            )),
            (_attend, (
                q_s, d_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, lse_ptr, delta_ptr, d_q_ptr,
                head, first, n_queries, n_keys, tiles, scale, 1, D, KEYS, KB, VB,
            )),
            (_load, (
                q_desc, k_desc, v_desc, d_out_desc, q_s, d_out_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
                head, first, tiles, D, KEYS, KB, VB,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


BLOCK_QUERIES, BLOCK_KEYS = 128, 64
DEPTHS = {256: (2, 1), 128: (4, 3), 64: (4, 3)}
"""Blocks of keys and of values that shared memory holds, by the size of a head."""


def query_gradient_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    d_q: torch.Tensor,
) -> None:
    """`query_gradient_reference` where `why_not_hopper` is None; the same operands as `query_gradient`."""
    n_heads, n_queries, dim = q.shape
    n_keys = k.shape[1]
    if n_queries == 0 or n_keys == 0:
        return  # the kernel would wait for a first block for ever
    assert q.dtype == k.dtype == v.dtype == d_out.dtype and d_q.is_contiguous()
    q, d_out, lse, delta = (x.contiguous() for x in (q, d_out, lse, delta))
    q, d_out, k, v = (x if _readable(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, d_out, k, v))
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, dim], gl.bfloat16)  # of float16 it is the same
    tiles = (TensorDescriptor.from_tensor(x, [1, 64, dim], layout) for x in (q, k, v, d_out))
    keys, values = DEPTHS[dim]
    query_gradient_kernel[-(-n_queries // BLOCK_QUERIES), n_heads](
        *tiles, lse, delta, d_q, n_queries, n_keys, scale,
        D=dim, KEYS=BLOCK_KEYS, KB=keys, VB=values, num_warps=4,
    )  # fmt: skip


def _readable(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read `x` [H, S, D] where it lies."""
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    return x.stride(-1) == 1 and all(step % 16 == 0 for step in steps)
