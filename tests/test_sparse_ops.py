"""The two sparse operators: exact top-k against a sort of all scores, and attention to the selection against a dense
masked softmax in float64: output, all gradients, page accumulators.

Scores are drawn on a grid of which float32 holds every product and sum exactly, so selections are compared for equality
whatever the tiling and however the sums are ordered. Both attentions are float64 sums of the same terms in another
order, so 1e-10 relative leaves four digits above rounding.
"""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_sdk import LifecycleError, NumericsError, UseAfterReleaseError
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.ops import select_top_k, sparse_latent_attention
from longstraw_sdk.ops.latent_pages import joined
from longstraw_sdk.ops.sparse_selection import NOT_SELECTED, merge_top_k, pack_keys, unpack_positions
from longstraw_sdk.state import MLALatentSpec, PagedLayerState, PagedView, PagePool

selection = importlib.import_module("longstraw_sdk.ops.sparse_selection")
attention = importlib.import_module("longstraw_sdk.ops.sparse_attention")
TOLERANCE = 1e-10
CPU = torch.device("cpu")


# --- selection ---


def draw_index(batch=1, n_queries=5, n_heads=3, dim=4, n_keys=40, first=17, grid=8.0, seed=0, shared_keys=True):
    """Inputs of `select_top_k` on multiples of 1/`grid`; `grid` 1 makes many ties."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(shape, generator=generator).clamp(-3, 3) * grid).round() / grid

    return SimpleNamespace(
        query=draw(batch, n_queries, n_heads, dim),
        weights=draw(batch, n_queries, n_heads),
        keys=draw(n_keys, dim) if shared_keys else draw(batch, n_keys, dim),
        positions=torch.arange(first, first + n_queries),
        scale=0.25,
    )


def scores_of(case):
    """[B, S, T] in float64: the score of every query and key, as the docstring defines it."""
    keys = case.keys.double() if case.keys.ndim == 3 else case.keys.double()[None]
    per_head = torch.einsum("bshd,btd->bsht", case.query.double(), keys.expand(len(case.query), -1, -1)) * case.scale
    return torch.einsum("bsh,bsht->bst", case.weights.double(), per_head.relu())


def sorted_reference(case, top_k):
    """[B, S, K] by sorting all visible keys of a query by (score descending, position ascending)."""
    scores = scores_of(case)
    n_batch, n_queries, n_keys = scores.shape
    found = torch.full((n_batch, n_queries, min(top_k, n_keys)), NOT_SELECTED)
    for b, s in itertools.product(range(n_batch), range(n_queries)):
        row = scores[b, s].tolist()
        visible = range(min(n_keys, int(case.positions[s]) + 1))
        best = sorted(sorted(visible, key=lambda t: (-row[t], t))[:top_k])
        found[b, s, found.shape[2] - len(best) :] = torch.tensor(best)
    return found


def tiles_of(keys, sizes):
    """Keys cut into tiles of `sizes`, over and over."""
    start, tiles = 0, []
    for size in itertools.cycle(sizes):
        if start >= keys.shape[-2]:
            return tiles
        tiles.append((start, keys[..., start : start + size, :]))
        start += size


def select(case, tiles, top_k):
    return select_top_k(case.query, case.weights, case.positions, tiles, top_k, case.scale)


@settings(max_examples=120)
@given(
    batch=st.integers(1, 3),
    n_queries=st.integers(1, 7),
    n_heads=st.integers(1, 4),
    dim=st.integers(1, 6),
    n_keys=st.integers(1, 50),
    first=st.integers(0, 60),
    top_k=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    grid=st.sampled_from([1.0, 16.0]),
    tile_elements=st.sampled_from([1, 60, 500, 2**22]),
    picked=st.sampled_from([None, 1, 3]),
    shared_keys=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_tiling_selects_what_a_full_sort_selects(
    batch, n_queries, n_heads, dim, n_keys, first, top_k, sizes, grid, tile_elements, picked, shared_keys, seed
):
    case = draw_index(batch, n_queries, n_heads, dim, n_keys, first, grid, seed, shared_keys)
    wanted = sorted_reference(case, top_k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "MAX_TILE_ELEMENTS", tile_elements)
        if picked is not None:
            patch.setattr(selection, "FEW_SCORES", 1)
            patch.setattr(selection, "FEW_CANDIDATES", picked)
        tiles = tiles_of(case.keys, sizes)
        assert torch.equal(select(case, tiles, top_k), wanted)
        assert torch.equal(select(case, tiles[::-1], top_k), wanted), "the order of tiles does not matter either"


@pytest.fixture
def widths(monkeypatch):
    """How many candidates each tile had to be merged; they are picked out of tiles of any size."""
    found, candidates = [], selection._candidates

    def noted(scores, *args):
        packed = candidates(scores, *args)
        found.append((packed.shape[-1], scores.shape[-1]))
        return packed

    monkeypatch.setattr(selection, "_candidates", noted)
    monkeypatch.setattr(selection, "FEW_SCORES", 1)
    return found


def one_dimensional(values):
    """A case whose score of each key is `values` [T], for 2 queries that see all of them."""
    case = draw_index(n_queries=2, n_heads=1, dim=1, first=len(values))
    case.query, case.weights = torch.ones_like(case.query), torch.ones_like(case.weights)
    case.keys, case.scale = values.float()[:, None], 1.0
    return case


def test_few_candidates_are_picked_out_of_a_tile_and_many_are_not(widths):
    generator = torch.Generator().manual_seed(0)
    case = one_dimensional(torch.randperm(800, generator=generator))
    assert torch.equal(select(case, tiles_of(case.keys, [100]), 10), sorted_reference(case, 10))
    assert widths[0] == (100, 100)
    assert all(0 < width <= 15 for width, _ in widths[1:]), "a tenth at first, then fewer"
    widths.clear()
    case = one_dimensional(torch.arange(800))
    assert torch.equal(select(case, tiles_of(case.keys, [100]), 10), sorted_reference(case, 10))
    assert widths == [(100, 100)] * 8, "every tile is better than those before it"
    widths.clear()
    assert torch.equal(select(case, tiles_of(case.keys, [100])[::-1], 10), sorted_reference(case, 10))
    assert widths == [(100, 100)] + [(0, 100)] * 7


def test_a_tile_of_equal_scores_has_candidates_only_before_the_last_of_the_best(widths):
    case = one_dimensional(torch.ones(400))
    tiles = tiles_of(case.keys, [100])
    assert torch.equal(select(case, tiles, 10), sorted_reference(case, 10))
    assert widths == [(100, 100)] + [(0, 100)] * 3
    widths.clear()
    assert torch.equal(select(case, tiles[::-1], 10), sorted_reference(case, 10))
    assert widths == [(100, 100)] * 4, "control: lower positions win"


def test_candidates_are_compared_in_float32_as_they_are_packed():
    least = pack_keys(torch.ones(1, 1), torch.tensor(5))
    scores = torch.tensor([[[1.0 - 1e-12, 1.0 - 1e-5]]], dtype=torch.float64)
    found = selection._candidates(scores, torch.tensor([3, 4]), torch.tensor([9]), least)
    assert unpack_positions(found).tolist() == [[[3]]]
    found = selection._candidates(scores, torch.tensor([6, 7]), torch.tensor([9]), least)
    assert found.shape == (1, 1, 0), "the same score behind the last of the best"


@settings(max_examples=100)
@given(score=st.floats(width=32, allow_nan=False, allow_infinity=False), position=st.integers(0, 2**32 - 1))
def test_packed_keys_give_their_scores_back(score, position):
    packed = pack_keys(torch.tensor(score), torch.tensor(position))
    assert selection.unpack_scores(packed) == torch.tensor(score)
    assert selection.unpack_scores(torch.tensor(selection._LEAST)) == float("-inf")


def test_control_the_reference_tells_a_shifted_selection_apart():
    case = draw_index()
    wanted = sorted_reference(case, 8)
    case.query = case.query.roll(1, 1)
    assert not torch.equal(select(case, tiles_of(case.keys, [7]), 8), wanted)


@pytest.mark.parametrize("sizes", [[1], [3], [5, 2], [16], [100]], ids=str)
def test_equal_scores_go_to_the_lower_positions(sizes):
    case = draw_index(n_keys=40, first=30)
    case.keys = case.keys[:1].expand(40, -1)
    found = select(case, tiles_of(case.keys, sizes), 6)
    assert torch.equal(found, torch.arange(6).expand_as(found))
    better = case.keys.clone()
    better[[9, 25]] *= 2
    case.query, case.weights = case.keys[:1].expand_as(case.query), torch.ones_like(case.weights)
    found = select(case, tiles_of(better, sizes), 6)
    assert torch.equal(found, torch.tensor([0, 1, 2, 3, 9, 25]).expand_as(found)), "control: a better score goes first"


def test_keys_behind_a_query_are_never_selected():
    """They have the highest scores here, and the same call with later queries selects them."""
    case = draw_index(n_queries=4, first=10, n_keys=40)
    case.query, case.weights = case.query.abs(), torch.ones_like(case.weights)
    case.keys = torch.arange(40.0)[:, None].expand(-1, 4)
    found = select(case, tiles_of(case.keys, [8]), 3)
    assert found[0].tolist() == [[8, 9, 10], [9, 10, 11], [10, 11, 12], [11, 12, 13]]
    case.positions = case.positions + 100
    assert select(case, tiles_of(case.keys, [8]), 3)[0].tolist() == [[37, 38, 39]] * 4


def test_where_fewer_keys_are_visible_the_front_is_not_selected():
    case = draw_index(n_queries=3, first=0, n_keys=16)
    found = select(case, tiles_of(case.keys, [8]), 4)
    assert found[0].tolist() == [[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, 0, 1, 2]]
    assert select(case, tiles_of(case.keys[:2], [8]), 4)[0].tolist() == [[-1, 0], [0, 1], [0, 1]], "two keys in all"


@pytest.mark.parametrize("grid", [1.0, 16.0])
def test_keys_of_one_batch_entry_serve_all_rows(grid):
    case = draw_index(batch=3, grid=grid)
    per_row = case.keys.expand(3, -1, -1).contiguous()
    wanted = select(case, tiles_of(case.keys, [16]), 8)
    assert torch.equal(select(case, tiles_of(case.keys[None], [16]), 8), wanted)
    assert torch.equal(select(case, tiles_of(per_row, [16]), 8), wanted)
    mixed = [tile if i % 2 else (tile[0], tile[1].expand(3, -1, -1)) for i, tile in enumerate(tiles_of(case.keys, [9]))]
    assert torch.equal(select(case, mixed, 8), wanted), "pages and decoded rows together"
    assert not torch.equal(wanted[0], wanted[1]), "control: rows differ"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["query", "weights", "keys"])
def test_a_score_that_is_not_finite_raises(where, value):
    case = draw_index(batch=2, n_keys=20)
    case.query, case.keys = case.query.abs() + 1, case.keys.abs() + 1
    getattr(case, where)[-1, -1] = value
    with pytest.raises(NumericsError, match="not finite"):
        select(case, tiles_of(case.keys, [7]), 4)
    getattr(case, where)[-1, -1] = 1.0
    select(case, tiles_of(case.keys, [7]), 4)


@pytest.mark.parametrize("shared_keys", [True, False])
def test_no_product_is_larger_than_its_bound(monkeypatch, shared_keys):
    sizes, matmul = [], torch.matmul
    case = draw_index(batch=2, n_queries=30, n_keys=64, first=40, shared_keys=shared_keys)
    wanted = sorted_reference(case, 8)
    monkeypatch.setattr(selection, "MAX_TILE_ELEMENTS", 400)

    def record(a, b):
        sizes.append(matmul(a, b).numel())
        return matmul(a, b)

    monkeypatch.setattr(torch, "matmul", record)
    found = select(case, tiles_of(case.keys, [16]), 8)
    monkeypatch.undo()
    assert max(sizes) <= 400
    assert torch.equal(found, wanted)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200)
@given(rows=st.lists(st.tuples(FINITE, st.integers(0, 2**32 - 1)), min_size=1, max_size=12, unique_by=lambda r: r[1]))
def test_packed_keys_are_unique_and_in_order_of_score_and_position(rows):
    scores, positions = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    packed = pack_keys(scores, positions)
    assert len(set(packed.tolist())) == len(rows)
    assert torch.equal(unpack_positions(packed), positions)
    by_rule = sorted(range(len(rows)), key=lambda i: (-scores[i].item(), rows[i][1]))
    assert packed.argsort(descending=True).tolist() == by_rule


def test_minus_zero_equals_zero_and_the_extremes_are_in_order():
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    scores = torch.tensor([-huge, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, huge])
    packed = pack_keys(scores, torch.tensor(3))
    assert packed[3] == packed[4]
    assert (packed.diff() >= 0).all() and (packed.diff() > 0).sum() == 6
    assert (packed > torch.iinfo(torch.int64).min).all(), "which stands for no key at all"
    assert pack_keys(torch.tensor(-0.0), torch.tensor(1)) > pack_keys(torch.tensor(0.0), torch.tensor(2))


def test_a_float64_run_selects_by_float32_scores_too():
    """A parity run redirects casts that name float32; a key packed from 64 bits would order nothing."""
    scores = torch.tensor([1.0, 1.0 + 1e-12, 2.0, -3.0, 0.1], dtype=torch.float64)
    with float64_upcasts():
        packed = pack_keys(scores, torch.arange(5))
    assert packed.argsort(descending=True).tolist() == [2, 0, 1, 4, 3]
    assert torch.equal(packed, pack_keys(scores.float(), torch.arange(5)))


@settings(max_examples=80)
@given(
    values=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=30, unique=True),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    top_k=st.integers(1, 12),
)
def test_merging_is_associative_and_commutative(values, cuts, top_k):
    low, high = sorted(cuts)
    a, b, c = (torch.tensor(part, dtype=torch.long) for part in (values[:low], values[low:high], values[high:]))
    left = merge_top_k(merge_top_k(a, b, top_k), c, top_k)
    right = merge_top_k(a, merge_top_k(b, c, top_k), top_k)
    swapped = merge_top_k(merge_top_k(c, a, top_k), merge_top_k(None, b, top_k), top_k)
    wanted = sorted(values, reverse=True)[:top_k]
    assert [sorted(x.tolist(), reverse=True) for x in (left, right, swapped)] == [wanted] * 3


# --- attention ---


def draw_case(
    batch=2,
    n_queries=4,
    n_heads=3,
    dims=(5, 2),
    n_local=4,
    n_prefix=11,
    page_tokens=4,
    top_k=6,
    dtype=torch.float64,
    scattered=False,
):
    """Random inputs of one call over poisoned pages; `selected` are distinct visible positions, padded in front.

    Query i is the (n_local - n_queries + i)-th row behind the prefix. Pages lie next to each other unless `scattered`.
    """
    rank, rope = dims
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    case = SimpleNamespace(
        query_latent=draw(batch, n_queries, n_heads, rank),
        query_rope=draw(batch, n_queries, n_heads, rope),
        latent=draw(batch, n_local, rank),
        key_rope=draw(batch, n_local, rope),
        page_latent=draw(n_prefix, rank),
        page_rope=draw(n_prefix, rope),
        d_out=draw(batch, n_queries, n_heads, rank).double(),
        top_k=top_k,
        scale=(rank + rope) ** -0.5,
        pool=PagePool(page_tokens, poison=True),
    )
    case.pool.open("prompt")
    spec = MLALatentSpec(layer=0, latent_dim=rank, rope_dim=rope, dtype=dtype)
    case.pages = PagedLayerState(spec, case.pool, "prompt", CPU)
    half = n_prefix // 2 if scattered else 0
    for part in (slice(0, half), slice(half, n_prefix)):
        rows = {"latent": case.page_latent[None, part], "k_rope": case.page_rope[None, part]}
        if rows["latent"].shape[1]:
            case.pages.append(rows)
    return case


def view_of(case, limit=None, *, accumulate=True):
    return PagedView(case.pages, len(case.page_latent) if limit is None else limit, accumulate)


def draw_selection(case, limit=None, seed=1):
    limit = len(case.page_latent) if limit is None else limit
    batch, n_queries = case.query_latent.shape[:2]
    generator = torch.Generator().manual_seed(seed)
    selected = torch.full((batch, n_queries, case.top_k), NOT_SELECTED)
    for b, s in itertools.product(range(batch), range(n_queries)):
        n_visible = limit + case.latent.shape[1] - n_queries + s + 1
        chosen = torch.randperm(n_visible, generator=generator)[: case.top_k].sort().values
        selected[b, s, case.top_k - len(chosen) :] = chosen
    return selected


INPUTS = ("query_latent", "query_rope", "latent", "key_rope")


def run(case, selected, view, n_backwards=1):
    """Output and gradients of the four inputs."""
    leaves = [getattr(case, name).clone().requires_grad_() for name in INPUTS]
    out = sparse_latent_attention(*leaves, selected, view, case.scale)
    for _ in range(n_backwards):
        out.backward(case.d_out.to(out.dtype), retain_graph=True)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def accumulated(case):
    cotangents = case.pages.cotangents(0, len(case.page_latent))
    return [cotangents["latent"][0], cotangents["k_rope"][0]]


def dense(case, selected, limit=None):
    """The same by softmax over all rows under the selection as a mask, with autograd; page gradients come last."""
    limit = len(case.page_latent) if limit is None else limit
    names = (*INPUTS, "page_latent", "page_rope")
    leaves = [getattr(case, name).to(torch.float64, copy=True).requires_grad_() for name in names]
    query_latent, query_rope, latent, key_rope, page_latent, page_rope = leaves
    latents = torch.cat([page_latent[:limit].expand(len(latent), -1, -1), latent], 1)
    ropes = torch.cat([page_rope[:limit].expand(len(latent), -1, -1), key_rope], 1)
    scores = torch.einsum("bshr,btr->bsht", query_latent, latents) + torch.einsum("bshr,btr->bsht", query_rope, ropes)
    seen = torch.zeros(*selected.shape[:2], latents.shape[1] + 1, dtype=torch.bool)
    seen = seen.scatter(-1, selected + 1, True)[..., 1:]  # entry 0 takes what selects nothing
    weights = (scores * case.scale).masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
    out = torch.einsum("bsht,btr->bshr", weights, latents)
    out.backward(case.d_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def worst(found, wanted):
    """Largest relative L2. The floor is for gradients that are 0 on paper: the weight of a single key is always 1."""
    assert all(bool(f.isfinite().all()) for f in found)
    return max(float((f.double() - w).norm() / w.norm().clamp_min(1e-3)) for f, w in zip(found, wanted, strict=True))


@settings(max_examples=80)
@given(
    batch=st.integers(1, 3),
    n_queries=st.integers(1, 6),
    decoded=st.integers(0, 5),
    n_heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    n_prefix=st.integers(0, 20),
    beyond=st.integers(0, 20),
    page_tokens=st.integers(1, 24),
    top_k=st.integers(1, 30),
    gathered_elements=st.sampled_from([1, 40, 300, 2**22]),
    scattered=st.booleans(),
)
def test_output_and_all_gradients_equal_dense_softmax(
    batch, n_queries, decoded, n_heads, dims, n_prefix, beyond, page_tokens, top_k, gathered_elements, scattered
):
    n_local = n_queries + decoded
    case = draw_case(batch, n_queries, n_heads, dims, n_local, n_prefix, page_tokens, top_k, scattered=scattered)
    limit = max(0, n_prefix - beyond)
    selected = draw_selection(case, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_GATHERED_ELEMENTS", gathered_elements)
        found = run(case, selected, view_of(case, limit))
    wanted = dense(case, selected, limit)
    if case.pages.has_gradient:
        found += accumulated(case)
    else:
        assert not (selected[selected != NOT_SELECTED] < limit).any(), "nothing on a page was selected"
        wanted = wanted[:5]
    assert worst(found, wanted) < TOLERANCE


@pytest.mark.parametrize("scattered", [False, True])
def test_pages_that_lie_together_are_read_as_one(scattered):
    view = view_of(draw_case(scattered=scattered))
    pages = joined(view)
    assert (pages is view) == scattered
    assert len(pages.values(0)["latent"]) == (4 if scattered else 11)
    alone = view_of(draw_case(scattered=scattered), accumulate=False)
    with joined(alone).accumulators() as of_page:
        assert of_page is None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("page_tokens", [1, 4, 11, 64])
@pytest.mark.parametrize("limit", [0, 3, 4, 8, 11])
def test_pages_and_limits(batch, page_tokens, limit):
    case = draw_case(batch=batch, page_tokens=page_tokens)
    selected = draw_selection(case, limit)
    found = run(case, selected, view_of(case, limit))
    wanted = dense(case, selected, limit)
    assert worst(found, wanted[:5]) < TOLERANCE
    assert case.pages.has_gradient == (limit > 0)
    if limit:
        assert worst(accumulated(case), wanted[5:]) < TOLERANCE
        assert not accumulated(case)[0][limit:].any()


def test_control_another_selection_is_another_output_and_another_gradient():
    case = draw_case()
    selected = draw_selection(case)
    found = run(case, selected, view_of(case)) + accumulated(case)
    assert worst(found, dense(case, selected)) < TOLERANCE
    other = selected.clone()
    kept = set(other[0, 0].tolist())
    other[0, 0, -1] = next(t for t in range(11) if t not in kept)
    for f, w in zip(found, dense(case, other), strict=True):
        assert float((f - w).norm() / w.norm()) > 1e-3, "one position of one query"


def test_more_keys_asked_for_than_there_are():
    case = draw_case(n_queries=3, n_local=3, n_prefix=5, page_tokens=4, top_k=20)
    selected = draw_selection(case)
    assert (selected == NOT_SELECTED).sum(-1)[0].tolist() == [14, 13, 12]
    found = run(case, selected, view_of(case)) + accumulated(case)
    assert worst(found, dense(case, selected)) < TOLERANCE
    fewer = run(case, selected[..., 12:], view_of(case))
    assert worst(fewer, dense(case, selected)[:5]) < TOLERANCE, "entries that select nothing do not matter"


def test_order_of_a_selection_does_not_matter():
    case = draw_case(top_k=18)
    selected = draw_selection(case)
    order = torch.rand(selected.shape, generator=torch.Generator().manual_seed(2)).argsort(-1)
    assert worst(run(case, selected.gather(-1, order), view_of(case)), dense(case, selected)[:5]) < TOLERANCE


def test_a_row_of_a_batch_does_not_depend_on_the_others():
    case = draw_case(batch=3)
    selected = draw_selection(case)
    whole = run(case, selected, view_of(case, accumulate=False))
    for name in INPUTS:
        setattr(case, name, getattr(case, name)[1:2])
    case.d_out = case.d_out[1:2]
    alone = run(case, selected[1:2], view_of(case, accumulate=False))
    assert worst(alone, [t[1:2] for t in whole]) < TOLERANCE


def test_rows_beyond_the_view_and_rows_that_nobody_selected_are_never_read():
    case = draw_case(n_queries=2, n_local=2, top_k=3)
    assert case.pages.pages[-1].tensor("latent")[3:].isnan().all(), "11 rows on pages of 4"
    selected = torch.tensor([[[0, 1, 6], [1, 2, 7]], [[-1, 2, 6], [0, 6, 7]]])  # 6 and 7 lie behind the prefix
    wanted = dense(case, selected, 6)[:5]
    for name in ("latent", "k_rope"):
        case.pages.pages[0].tensor(name)[3:] = float("nan")
        case.pages.pages[1].tensor(name)[:] = float("nan")
        case.pages.pages[2].tensor(name)[:] = float("nan")
    assert worst(run(case, selected, view_of(case, 6)), wanted) < TOLERANCE
    out = sparse_latent_attention(*(getattr(case, n) for n in INPUTS), selected, view_of(case, 7), case.scale)
    assert out.isnan().any(), "control: one row more and position 6 is a poisoned one"


def test_repeated_backward_adds_to_the_accumulators():
    case = draw_case()
    selected = draw_selection(case)
    wanted = dense(case, selected)
    found = run(case, selected, view_of(case), n_backwards=3)
    assert worst(found[1:] + accumulated(case), [3 * w for w in wanted[1:]]) < TOLERANCE
    other = draw_selection(case, seed=5)
    run(case, other, view_of(case))
    both = [3 * w + o for w, o in zip(wanted[5:], dense(case, other)[5:], strict=True)]
    assert worst(accumulated(case), both) < TOLERANCE
    case.pages.drop_accumulators()
    run(case, selected, view_of(case))
    assert worst(accumulated(case), wanted[5:]) < TOLERANCE, "dropping starts anew"


def test_without_accumulate_no_accumulator_is_allocated():
    case = draw_case()
    selected = draw_selection(case)
    live_bytes = case.pool.live_bytes
    found = run(case, selected, view_of(case, accumulate=False))
    assert case.pool.live_bytes == live_bytes
    assert not case.pages.has_gradient
    assert case.pages.cotangents(0, 11) == {}
    assert worst(found, dense(case, selected)[:5]) < TOLERANCE
    run(case, selected, view_of(case))
    assert case.pool.live_bytes == 2 * live_bytes, "control: float64 accumulators are as large as the pages"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_keeps_its_dtype_and_accumulates_in_float32(dtype, tolerance):
    """float32 rounds at 6e-8 and sums tens of terms; bfloat16 rounds its gradients at 4e-3."""
    case = draw_case(dtype=dtype)
    selected = draw_selection(case)
    found = run(case, selected, view_of(case)) + accumulated(case)
    assert [t.dtype for t in found] == [torch.float32, *[dtype] * 4, torch.float32, torch.float32]
    assert worst(found, dense(case, selected)) < tolerance


def test_a_float32_query_over_bfloat16_rows():
    """As in the model: queries reach latent space in float32, pages and new rows are in the dtype of the weights."""
    case = draw_case(dtype=torch.bfloat16)
    selected = draw_selection(case)
    case.query_latent = case.query_latent.float() + 1e-3
    found = run(case, selected, view_of(case))
    assert [t.dtype for t in found] == [torch.float32, torch.float32, *[torch.bfloat16] * 3]
    assert worst([found[0], found[1], *accumulated(case)], [dense(case, selected)[i] for i in (0, 1, 5, 6)]) < 1e-5


@pytest.mark.parametrize("scale", [300.0, -300.0])
def test_large_scores_overflow_nowhere(scale):
    case = draw_case()
    case.scale = scale
    selected = draw_selection(case)
    found = run(case, selected, view_of(case))
    assert all(bool(t.isfinite().all()) for t in (*found, *accumulated(case)))
    assert worst(found[:1], dense(case, selected)[:1]) < 1e-8


@pytest.mark.parametrize("accumulate", [False, True])
def test_released_pages_raise_in_forward_and_backward(accumulate):
    case = draw_case()
    selected, view = draw_selection(case), view_of(case, accumulate=accumulate)
    leaves = [getattr(case, name).clone().requires_grad_() for name in INPUTS]
    out = sparse_latent_attention(*leaves, selected, view, case.scale)
    case.pool.release("prompt")
    with pytest.raises(LifecycleError, match="released"):
        out.backward(case.d_out)
    assert all(leaf.grad is None for leaf in leaves)
    with pytest.raises(UseAfterReleaseError, match="was released"):
        sparse_latent_attention(*leaves, selected, view, case.scale)


def test_gradcheck():
    case = draw_case(batch=2, n_queries=2, n_heads=2, dims=(2, 2), n_local=3, n_prefix=5, page_tokens=2, top_k=4)
    selected, view = draw_selection(case), view_of(case, accumulate=False)
    leaves = [getattr(case, name).requires_grad_() for name in INPUTS]
    assert torch.autograd.gradcheck(lambda *xs: sparse_latent_attention(*xs, selected, view, case.scale), leaves)


def test_no_gathered_tile_is_larger_than_its_bound(monkeypatch):
    """Peak memory must grow neither with the prefix nor with the number of queries."""
    sizes, gather = [], attention._gather
    case = draw_case(batch=3, n_queries=16, n_local=16, n_prefix=200, page_tokens=50, top_k=8)
    monkeypatch.setattr(attention, "MAX_GATHERED_ELEMENTS", 600)

    def record(*args):
        rows = gather(*args)
        sizes.append(rows.numel())
        return rows

    monkeypatch.setattr(attention, "_gather", record)
    selected = draw_selection(case)
    found = run(case, selected, view_of(case)) + accumulated(case)
    assert max(sizes) <= 600
    assert len(sizes) > 2, "control: there was something to tile"
    assert worst(found, dense(case, selected)) < TOLERANCE
