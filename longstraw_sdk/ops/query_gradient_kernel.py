"""The Triton kernel behind `query_gradient`."""

import triton
import triton.language as tl


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, d_q_ptr,
    n_queries, n_keys, k_head, k_row, v_head, v_row, scale,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    real = rows < n_queries
    place = (head * n_queries + rows)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + place, mask=real[:, None], other=0.0)
    d_out = tl.load(d_out_ptr + place, mask=real[:, None], other=0.0)
    # Base-2 exponentials: exp(x * scale - lse) = 2 ** (x * scale2 - lse2).
    lse2 = tl.load(lse_ptr + head * n_queries + rows, mask=real, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + head * n_queries + rows, mask=real, other=0.0)
    scale2 = scale * 1.4426950408889634
    total = tl.zeros((ROWS, D), dtype=tl.float32)
    for start in range(0, n_keys, KEYS):
        keys = start + tl.arange(0, KEYS)
        there = keys < n_keys
        offsets = keys.to(tl.int64)[:, None]
        k = tl.load(k_ptr + head * k_head + offsets * k_row + dims[None, :], mask=there[:, None], other=0.0)
        v = tl.load(v_ptr + head * v_head + offsets * v_row + dims[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale2 - lse2[:, None]
        weights = tl.where(there[None, :], tl.exp2(scores), 0.0)
        d_weights = tl.dot(d_out, tl.trans(v))
        d_scores = (weights * (d_weights - delta[:, None])).to(k.dtype)
        total = tl.dot(d_scores, k, total)
    before = tl.load(d_q_ptr + place, mask=real[:, None], other=0.0)
    tl.store(d_q_ptr + place, before + total * scale, mask=real[:, None])
