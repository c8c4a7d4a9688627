"""The Triton kernel behind `index_scores`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def index_score_kernel(
    q_ptr, w_ptr, k_ptr, out_ptr,
    n_queries, n_keys, q_batch, w_batch, k_batch, k_row, scale,
    H: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    n_parts = tl.cdiv(n_keys, KEYS * STEPS)
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // n_parts
    first = tl.program_id(0) % n_parts * (KEYS * STEPS)
    rows = block.to(tl.int64) * (QUERIES * H) + tl.arange(0, QUERIES * H)  # (query, head)
    dims = tl.arange(0, D)
    real = rows // H < n_queries
    q = tl.load(q_ptr + batch * q_batch + rows[:, None] * D + dims[None, :], mask=real[:, None], other=0.0)
    # For a positive scale, weight * relu(scale * x) = (weight * scale) * relu(x).
    w = tl.load(w_ptr + batch * w_batch + rows, mask=real, other=0.0).to(tl.float32) * scale
    queries = block.to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    out_rows = out_ptr + (batch * n_queries + queries) * n_keys
    for start in range(first, min(first + KEYS * STEPS, n_keys), KEYS):
        keys = start + tl.arange(0, KEYS)
        there = keys < n_keys
        k_rows = k_ptr + batch * k_batch + keys.to(tl.int64) * k_row
        k = tl.load(k_rows[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        # Keys are the rows of the product: on tensor cores the heads of a query then lie within four threads, and
        # their sum needs no shared memory. NaN must pass, or a poisoned key would get a finite score.
        per_head = tl.maximum(tl.dot(k, tl.trans(q)), 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores = tl.sum(tl.reshape(per_head * w[None, :], [KEYS, QUERIES, H]), 2)
        tl.store(out_rows[None, :] + keys[:, None], scores, mask=there[:, None] & (queries < n_queries)[None, :])
