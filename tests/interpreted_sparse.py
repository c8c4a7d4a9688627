"""The kernels of sparse latent attention in Triton's interpreter, for `test_sparse_kernels.py`, which starts this file
with TRITON_INTERPRET=1: beside a dense softmax in float64. Prints the largest error, and the least of controls.
"""

import importlib
import tempfile

import torch
import torch.distributed as dist
from test_sparse_ops import INPUTS, accumulated, dense, draw_case, draw_selection, view_of, worst

from longstraw_sdk.ops import sparse_attention_fused as fused
from longstraw_sdk.ops.sparse_attention_fused import FusedSparseAttention, fits
from longstraw_sdk.ops.sparse_selection import NOT_SELECTED
from longstraw_sdk.state import ContextGroup, PagedView
from longstraw_sdk.state.context import RowMap

fetched_rows = importlib.import_module("longstraw_sdk.ops.fetched_rows")
FLOAT32, FLOAT16 = 1e-5, 5e-3


def draw(**sizes):
    return draw_case(**{"dims": (16, 16), "dtype": torch.float32, **sizes})


def run(case, selected, view, n_backwards=1):
    leaves = [getattr(case, name).clone().requires_grad_() for name in INPUTS]
    out = FusedSparseAttention.apply(*leaves, selected, view, case.scale, False)
    for _ in range(n_backwards):
        out.backward(case.d_out.to(out.dtype), retain_graph=True)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def error(case, selected, **how):
    found = run(case, selected, view_of(case, **how))
    if case.pages.has_gradient:
        found += accumulated(case)
    # Gradients through the weight of a single row are 0 on paper; the others here have norms of 2 to 20.
    pairs = zip(found, dense(case, selected), strict=False)
    return max(float((f - w).norm() / w.norm().clamp_min(1.0)) for f, w in pairs)


def over_sizes():
    """Several tiles of rows and blocks of heads; no prefix; one query, and more asked for than there is."""
    sizes = (
        {"n_heads": 20, "dims": (32, 16), "n_local": 6, "n_prefix": 100, "top_k": 90, "page_tokens": 16},
        {"n_heads": 70, "n_queries": 2, "n_local": 2, "top_k": 3},
        {"n_prefix": 0},
        {"batch": 1, "n_queries": 1, "n_local": 1, "n_prefix": 3, "top_k": 70},
    )
    found = [error(case, draw_selection(case)) for case in (draw(**s) for s in sizes)]
    case = draw()
    return max(*found, error(case, draw_selection(case), accumulate=False))


def over_selections():
    """In any order, with gaps, shared by all queries, of one row alone."""
    found = []
    case = draw(n_local=5, n_queries=2, top_k=7)
    for rows in ([12, -1, 3, 0, -1, 7, 11], [-1, -1, -1, -1, -1, -1, 4], [-1] * 6 + [11]):
        case.pages.drop_accumulators()
        found.append(error(case, torch.tensor(rows).expand(2, 2, 7)))
    return max(found)


def over_tiles_of_queries():
    """Each query alone in a tile, and pages whose gradients visit one by one."""
    fused.MAX_KEPT_ELEMENTS, whole = 1, fused.MAX_KEPT_ELEMENTS
    joined, fetched_rows.joined = fetched_rows.joined, lambda view: view
    try:
        case = draw()
        return error(case, draw_selection(case))
    finally:
        fused.MAX_KEPT_ELEMENTS, fetched_rows.joined = whole, joined


def over_ranks():
    """A prefix whose rows were fetched, here by their own rank."""
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", f"file://{file.name}", rank=0, world_size=1)
        rows = RowMap(ContextGroup(dist.group.WORLD), 1)
        rows.append(11)
        case = draw()
        selected, view = draw_selection(case), PagedView(case.pages, 11, True, rows, True, 11)
        assert fits(view)
        found = run(case, selected, view) + accumulated(case)
        dist.destroy_process_group()
    return worst(found, dense(case, selected))


def far_away():
    """Scores of hundreds, of numbers on a grid whose products float32 holds: 1e-3 is the rounding of a score."""
    found = []
    for scale in (40.0, -40.0):
        case = draw()
        case.scale = scale
        for name in (*INPUTS, "page_latent", "page_rope"):
            setattr(case, name, (getattr(case, name) * 8).round() / 8)
        case.pages.pages[0].slab.tensors["latent"][:11] = case.page_latent
        case.pages.pages[0].slab.tensors["k_rope"][:11] = case.page_rope
        selected = draw_selection(case)
        found.append(worst(run(case, selected, view_of(case))[:1], dense(case, selected)[:1]))
    return max(found)


def small_gradients_in_float16():
    case = draw(dtype=torch.float16)
    case.d_out *= 1e-6  # below what float16 holds
    selected = draw_selection(case)
    case.query_latent, case.query_rope = case.query_latent.float(), case.query_rope.float()
    run(case, selected, view_of(case))
    wanted = dense(case, selected)[5:]
    return max(float((f - w).norm() / w.norm()) for f, w in zip(accumulated(case), wanted, strict=True))


def controls():
    """Another scale, another selection, and a gradient that was added twice."""
    case = draw()
    selected = draw_selection(case)
    wanted = dense(case, selected)
    twice = run(case, selected, view_of(case), n_backwards=2)
    assert worst(twice[1:] + accumulated(case), [2 * w for w in wanted[1:]]) < FLOAT32
    assert worst(accumulated(case), wanted[5:]) > 0.5
    first, again = (run(case, selected, view_of(case, accumulate=False)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True)), "the same bits"
    other = selected.clone()
    other[0, 0, -1] = NOT_SELECTED
    found = [run(case, other, view_of(case, accumulate=False))]
    case.scale *= 1.1
    found.append(run(case, selected, view_of(case, accumulate=False)))
    return min(worst(f[i : i + 1], wanted[i : i + 1]) for f in found for i in range(5))


def poisoned():
    """Rows that nobody selected are not a number (the pool's poison behind the 11 rows, and rows 5 and 13 here)."""
    case = draw()
    selected = draw_selection(case)
    selected = torch.where((selected == 5) | (selected == 13), NOT_SELECTED, selected)
    wanted = dense(case, selected)[:5]
    case.pages.pages[0].slab.tensors["latent"][5] = case.latent[:, 2] = float("nan")
    assert worst(run(case, selected, view_of(case)), wanted) < FLOAT32
    selected[1, 0, -1] = 5
    touched = run(case, selected, view_of(case))[0].isnan().flatten(2).any(-1)
    assert touched.tolist() == [[False] * 4, [True, False, False, False]]
    none = torch.empty(2, 0, 6, dtype=torch.long)
    empty = FusedSparseAttention.apply(
        case.query_latent[:, :0], case.query_rope[:, :0], case.latent, case.key_rope, none, view_of(case), 1.0, False
    )
    assert empty.shape == (2, 0, 3, 16)


def scattered_pages_do_not_fit():
    assert not fits(view_of(draw(scattered=True)))
    assert fits(view_of(draw())) and fits(view_of(draw(scattered=True), 0)) and fits(view_of(draw(scattered=True), 4))


if __name__ == "__main__":
    scattered_pages_do_not_fit()
    poisoned()
    assert far_away() < 1e-3
    assert small_gradients_in_float16() < FLOAT16
    print(max(over_sizes(), over_selections(), over_tiles_of_queries(), over_ranks()), controls())
