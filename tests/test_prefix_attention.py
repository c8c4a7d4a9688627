"""The attention operator against a dense masked softmax in float64: output, all gradients, page accumulators.

Both sides are float64 sums of the same terms in another order, so 1e-10 relative leaves four digits above rounding.
"""

import importlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_sdk import LifecycleError, UseAfterReleaseError
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.ops import prefix_attention
from longstraw_sdk.state import AttentionKVSpec, PagedLayerState, PagedView, PagePool

operator = importlib.import_module("longstraw_sdk.ops.attention_reference")
TOLERANCE = 1e-10
CPU = torch.device("cpu")


class Case:
    """Random inputs of one call; `n_local` rows L are new, `n_prefix` rows lie on pages."""

    def __init__(
        self,
        batch=2,
        kv_heads=2,
        groups=2,
        n_new=5,
        n_local=5,
        n_prefix=11,
        page_tokens=4,
        dims=(3, 5),
        dtype=torch.float64,
    ):
        key_dim, value_dim = dims
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.scale = key_dim**-0.5
        self.query = draw(batch, kv_heads * groups, n_new, key_dim)
        self.key, self.value = draw(batch, kv_heads, n_local, key_dim), draw(batch, kv_heads, n_local, value_dim)
        self.page_k, self.page_v = draw(kv_heads, n_prefix, key_dim), draw(kv_heads, n_prefix, value_dim)
        self.d_out = draw(batch, kv_heads * groups, n_new, value_dim)
        spec = AttentionKVSpec(layer=0, n_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
        self.pool = PagePool(page_tokens, poison=True)
        self.pool.open("prompt")
        self.pages = PagedLayerState(spec, self.pool, "prompt", CPU)
        if n_prefix:
            self.pages.append({"k": self.page_k[None], "v": self.page_v[None]})

    def view(self, limit=None, *, accumulate=True):
        return PagedView(self.pages, self.page_k.shape[1] if limit is None else limit, accumulate)

    def run(self, view, n_backwards=1):
        """Output and gradients of query, key, value."""
        leaves = [t.clone().requires_grad_() for t in (self.query, self.key, self.value)]
        out = prefix_attention(*leaves, view, self.scale)
        for _ in range(n_backwards):
            out.backward(self.d_out, retain_graph=True)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def accumulated(self):
        cotangents = self.pages.cotangents(0, self.page_k.shape[1])
        return [cotangents["k"][0], cotangents["v"][0]]

    def dense(self, limit=None):
        """The same by softmax over prefix and new rows together, with autograd; page gradients come last."""
        limit = self.page_k.shape[1] if limit is None else limit
        inputs = (self.query, self.key, self.value, self.page_k, self.page_v)
        leaves = [t.to(torch.float64, copy=True).requires_grad_() for t in inputs]
        query, key, value, page_k, page_v = leaves
        groups = query.shape[1] // key.shape[1]
        batch, n_new, n_local = query.shape[0], query.shape[2], key.shape[2]
        keys = torch.cat([page_k[:, :limit].expand(batch, -1, -1, -1), key], 2).repeat_interleave(groups, 1)
        values = torch.cat([page_v[:, :limit].expand(batch, -1, -1, -1), value], 2).repeat_interleave(groups, 1)
        causal = torch.ones(n_new, n_local, dtype=torch.bool).tril(n_local - n_new)
        seen = torch.cat([torch.ones(n_new, limit, dtype=torch.bool), causal], 1)
        scores = (query @ keys.transpose(-1, -2) * self.scale).masked_fill(~seen, float("-inf"))
        out = scores.softmax(-1) @ values
        out.backward(self.d_out.double())
        return [out.detach(), *(leaf.grad for leaf in leaves)]


def worst(found, wanted):
    assert all(bool(f.isfinite().all()) for f in found)
    return max(relative_l2(f.double(), w) if w.norm() else float(f.norm()) for f, w in zip(found, wanted, strict=True))


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    n_new=st.integers(1, 9),
    decoded=st.integers(0, 6),
    n_prefix=st.integers(0, 20),
    page_tokens=st.integers(1, 24),
    dims=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    tile_elements=st.integers(1, 400),
)
def test_output_and_all_gradients_equal_dense_softmax(
    batch, kv_heads, groups, n_new, decoded, n_prefix, page_tokens, dims, tile_elements
):
    case = Case(batch, kv_heads, groups, n_new, n_new + decoded, n_prefix, page_tokens, dims)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "MAX_TILE_ELEMENTS", tile_elements)
        found = case.run(case.view())
    wanted = case.dense()
    if n_prefix:
        found += case.accumulated()
    else:
        wanted = wanted[:4]
    # A single visible key has weight 1 whatever its score: its gradients are 0, and rounding is all there is to see.
    found = [
        torch.where(w.abs() < 1e-14, torch.where(f.abs() < 1e-14, 0, f), f) for f, w in zip(found, wanted, strict=True)
    ]
    wanted = [torch.where(w.abs() < 1e-14, 0, w) for w in wanted]
    assert worst(found, wanted) < TOLERANCE


@pytest.mark.parametrize("limit", [0, 3, 4, 10])
def test_control_a_view_one_row_shorter_is_told_apart(limit):
    case = Case()
    assert worst(case.run(case.view(limit)), case.dense(limit)[:4]) < TOLERANCE
    assert worst(case.run(case.view(limit)), case.dense(limit + 1)[:4]) > 1e-4


def test_no_view_is_plain_causal_attention():
    case = Case(n_prefix=0)
    assert worst(case.run(None), case.dense()[:4]) < TOLERANCE
    wrong = Case(n_prefix=0, n_local=6)
    assert worst(wrong.run(None), wrong.dense()[:4]) < TOLERANCE, "one row before the first query"


def test_the_first_rows_of_a_longer_call_equal_a_shorter_call():
    """Causality: what comes later cannot be seen."""
    case = Case()
    whole = prefix_attention(case.query, case.key, case.value, case.view(), case.scale)
    first = [t[:, :, :2] for t in (case.query, case.key, case.value)]
    torch.testing.assert_close(prefix_attention(*first, case.view(), case.scale), whole[:, :, :2], rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [300.0, -300.0])
def test_large_scores_overflow_nowhere(scale):
    """The largest score comes in another block under the other sign. Gradients vanish here; they must be finite."""
    case = Case()
    case.scale = scale
    found = case.run(case.view())
    assert all(bool(t.isfinite().all()) for t in (*found, *case.accumulated()))
    assert worst(found[:1], case.dense()[:1]) < 1e-8


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_keeps_its_dtype_and_accumulates_in_float32(dtype, tolerance):
    """float32 rounds at 6e-8 and sums tens of terms; bfloat16 rounds its output at 4e-3."""
    case = Case(dtype=dtype)
    found = case.run(case.view())
    assert {t.dtype for t in found} == {dtype}
    assert {t.dtype for t in case.accumulated()} == {torch.float32}
    assert worst(found + case.accumulated(), case.dense()) < tolerance


def test_repeated_backward_adds_to_the_accumulators():
    case = Case()
    found = case.run(case.view(), n_backwards=3)
    wanted = case.dense()
    assert worst(found[1:] + case.accumulated(), [3 * w for w in wanted[1:]]) < TOLERANCE
    case.run(case.view())
    assert worst(case.accumulated(), [4 * w for w in wanted[4:]]) < TOLERANCE
    case.pages.drop_accumulators()
    case.run(case.view())
    assert worst(case.accumulated(), wanted[4:]) < TOLERANCE, "dropping starts anew"


def test_a_shorter_view_adds_nothing_to_later_rows():
    case = Case()
    case.run(case.view(6))
    for found, wanted in zip(case.accumulated(), case.dense(6)[4:], strict=True):
        assert relative_l2(found[:, :6], wanted[:, :6]) < TOLERANCE
        assert not found[:, 6:].any()


def test_without_accumulate_no_accumulator_is_allocated():
    case = Case()
    live_bytes = case.pool.live_bytes
    found = case.run(case.view(accumulate=False))
    assert case.pool.live_bytes == live_bytes
    assert not case.pages.has_gradient
    assert case.pages.cotangents(0, 11) == {}
    assert worst(found, case.dense()[:4]) < TOLERANCE
    case.run(case.view())
    assert case.pool.live_bytes == 2 * live_bytes, "control: float64 accumulators are as large as the pages"


def test_rows_beyond_the_view_are_never_read():
    """`worst` requires finite results, so no other test reads the poison in the last page's tail either."""
    case = Case()
    assert case.pages.pages[-1].tensor("k")[:, 3:].isnan().all(), "11 rows on pages of 4"
    case.pages.pages[1].tensor("k")[:, 2:] = float("nan")
    case.pages.pages[1].tensor("v")[:, 2:] = float("nan")
    case.pages.pages[2].fill_(float("nan"))
    assert worst(case.run(case.view(6)), case.dense(6)[:4]) < TOLERANCE
    out = prefix_attention(case.query, case.key, case.value, case.view(7), case.scale)
    assert out.isnan().all(), "control: one row more and the poison shows"


@pytest.mark.parametrize("accumulate", [False, True])
def test_released_pages_raise_in_forward_and_backward(accumulate):
    case = Case()
    query, view = case.query.clone().requires_grad_(), case.view(accumulate=accumulate)
    out = prefix_attention(query, case.key, case.value, view, case.scale)
    case.pool.release("prompt")
    with pytest.raises(LifecycleError, match="released"):
        out.backward(case.d_out)
    assert query.grad is None
    with pytest.raises(UseAfterReleaseError, match=re.escape("page 0 (k) was released")):
        prefix_attention(case.query, case.key, case.value, view, case.scale)


@pytest.mark.parametrize("n_local", [3, 5])
def test_gradcheck(n_local):
    case = Case(batch=1, groups=2, n_new=3, n_local=n_local, n_prefix=5, page_tokens=2, dims=(2, 2))
    leaves = [t.requires_grad_() for t in (case.query, case.key, case.value)]
    view = case.view(accumulate=False)
    assert torch.autograd.gradcheck(lambda q, k, v: prefix_attention(q, k, v, view, case.scale), leaves)


def test_no_score_tile_is_larger_than_its_bound(monkeypatch):
    """Peak scores, and with them memory, must not grow with the prefix."""
    sizes = []
    matmul = torch.Tensor.__matmul__
    case = Case(batch=3, n_new=16, n_local=16, n_prefix=200, page_tokens=50)
    monkeypatch.setattr(operator, "MAX_TILE_ELEMENTS", 600)

    def record(a, b):
        out = matmul(a, b)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", record)
    found = case.run(case.view())
    monkeypatch.undo()
    assert max(sizes) <= 600
    assert worst(found + case.accumulated(), case.dense()) < TOLERANCE
