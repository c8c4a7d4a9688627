"""Scores of the indexer: the kernel in Triton's interpreter beside the reference, the choice between both, and that
joined tiles select what single ones do. What is left to a GPU is whether the compiled kernel computes the same, which a
trial decides there.

The interpreter computes float32 sums of 128 products in another order: 1e-5 relative leaves a digit above rounding.
"""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from longstraw_sdk import ConfigurationError, NumericsError
from longstraw_sdk.environment import KERNELS as VARIABLE
from longstraw_sdk.environment import kernels_off
from longstraw_sdk.ops import index_scores, select_top_k
from longstraw_sdk.ops.index_scores import index_scores_reference, knows_heads, why_no_index_kernel
from longstraw_sdk.ops.sparse_selection import merge_top_k, pack_keys, unpack_positions

module = importlib.import_module("longstraw_sdk.ops.index_scores")
selection = importlib.import_module("longstraw_sdk.ops.sparse_selection")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def draw_scored(batch=2, n_queries=5, n_heads=8, dim=16, n_keys=40, shared=True, grid=8.0, seed=0):
    """Query, weights and keys on multiples of 1/`grid`, of which float32 holds every score exactly."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(shape, generator=generator).clamp(-3, 3) * grid).round() / grid

    keys = draw(1 if shared else batch, n_keys, dim)
    return draw(batch, n_queries, n_heads, dim), draw(batch, n_queries, n_heads), keys


# --- the kernel ---


INTERPRETED = """
import torch
from longstraw_sdk.ops.index_scores import index_scores_fused, index_scores_reference

def off(a, b):
    return float((a - b).norm() / b.norm())

worst, least = 0.0, 9.0
for batch, n_queries, n_keys, heads, dim, shared, dtype in (
    (1, 19, 1100, 32, 128, True, torch.float32),
    (2, 9, 70, 32, 16, True, torch.float32),
    (2, 33, 130, 8, 32, False, torch.float32),
    (3, 1, 64, 64, 16, False, torch.float32),
    (1, 8, 1, 32, 16, True, torch.float32),
    (1, 1, 1, 128, 16, True, torch.float32),
    (2, 5, 65, 16, 32, False, torch.float16),  # bfloat16 the interpreter multiplies as if its bits were integers
):
    generator = torch.Generator().manual_seed(0)
    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)
    query = draw(batch, n_queries + 7, heads, dim)[:, 3 : 3 + n_queries]  # as spans of queries are
    weights = draw(batch, n_queries + 7, heads).float()[:, 3 : 3 + n_queries]
    keys = draw(1 if shared else batch, n_keys, dim + 5)[..., :dim]  # beside other numbers, as on pages
    for scale in (dim**-0.5, -0.3):
        found = index_scores_fused(query, weights, keys, scale)
        assert found.dtype == torch.float32 and found.is_contiguous()
        worst = max(worst, off(found, index_scores_reference(query.float(), weights, keys.float(), scale)))
    controls = [index_scores_reference(query.float(), weights.roll(1, 2), keys.float(), scale)]
    per_head = torch.einsum("bshd,btd->bsht", query.float(), keys.float().expand(batch, -1, -1)) * scale
    controls.append((per_head * weights[..., None]).sum(2))  # without relu
    least = min(least, *(off(found, control) for control in controls))

query[0, 1, 2, 3] = keys[-1, 7, 0] = float("nan")
found = index_scores_fused(query, weights, keys, 0.3).isnan()
wanted = torch.zeros_like(found)
wanted[0, 1] = wanted[-1, :, 7] = True
assert torch.equal(found, wanted), "every score of a NaN, and no other, is one"
assert index_scores_fused(query, weights, keys[:, :0], 0.3).shape == (2, 5, 0)
print(worst, least)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only")
def test_kernel_equals_its_reference_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    worst, least = map(float, done.stdout.split())
    assert worst < 1e-5
    assert least > 0.1, "control: other weights and a missing relu are told apart"


# --- the choice ---


def test_the_choice_is_logged_once_with_its_reason(caplog):
    module._why.cache_clear()
    query, weights, keys = draw_scored()
    with caplog.at_level("INFO", "longstraw_sdk.ops.index_scores"):
        for _ in range(2):
            found = index_scores(query, weights, keys, 0.25)
    assert torch.equal(found, index_scores_reference(query, weights, keys, 0.25))
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("8 heads of 16: reference, because the kernel needs CUDA, not cpu")


@pytest.mark.parametrize(
    ("dtype", "n_heads", "dim", "reason"),
    [
        (torch.float32, 32, 128, "multiplies bfloat16 or float16, not torch.float32"),
        (torch.bfloat16, 24, 128, "not 24 of 128"),
        (torch.bfloat16, 4, 128, "not 4 of 128"),
        (torch.bfloat16, 32, 96, "not 32 of 96"),
    ],
)
def test_inputs_it_cannot_serve_have_a_reason(dtype, n_heads, dim, reason):
    assert reason in module._why(None, CUDA, dtype, n_heads, dim)


def test_heads_that_the_kernel_knows():
    assert all(knows_heads(n, d) for n in (8, 32, 64, 128) for d in (16, 128, 256))
    assert not any(knows_heads(n, d) for n, d in ((0, 16), (256, 16), (32, 8), (32, 512), (32, 0)))


def test_the_variable_turns_it_off_and_an_unknown_value_is_refused(monkeypatch):
    query, weights, keys = draw_scored()
    monkeypatch.setenv(VARIABLE, "off")
    assert why_no_index_kernel(query) == kernels_off() == "LONGSTRAW_KERNELS is 'off'"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigurationError, match="LONGSTRAW_KERNELS='fast' is not known; allowed: auto, off"):
        index_scores(query, weights, keys, 0.25)
    monkeypatch.delenv(VARIABLE)
    assert kernels_off() is None


def sound(query, weights, keys, scale):
    """In float64, so that rounding to float32 hides in which order a product was summed."""
    per_head = torch.einsum("bshd,btd->bsht", query.double(), keys.double().expand(len(query), -1, -1)) * scale
    return torch.einsum("bsh,bsht->bst", weights.double(), per_head.relu()).float()


def drifting(*args):
    found = sound(*args)
    return found + 1e-7 * torch.arange(found.shape[-1])


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (sound, None),
        (lambda q, w, k, scale: sound(q, w, k, scale * 1.1), "its scores by shared keys was off by"),
        (lambda q, w, k, scale: sound(q, w, k[:1], scale), "its scores by keys of each row was off"),
        (lambda q, w, k, scale: sound(q, w, k, scale).nan_to_num(), "a key that is not a number did not give"),
        (drifting, "changed with its place"),
        (lambda *args: 1 / 0, "a trial failed: ZeroDivisionError"),
    ],
    ids=["sound", "wrong", "wrong rows", "hides NaN", "drifts", "raises"],
)
def test_a_faulty_kernel_fails_its_trial(monkeypatch, kernel, reason):
    monkeypatch.setattr(module, "index_scores_fused", kernel)
    found = module.tried(lambda: module._trial(CPU, torch.float32, 8, 16), CPU)
    assert found is None if reason is None else reason in found


@pytest.fixture
def fused(monkeypatch):
    """Calls of the kernel, which here is the reference: shapes of its queries and keys."""
    calls = []

    def noted(query, weights, keys, scale):
        calls.append((tuple(query.shape[:2]), tuple(keys.shape[:2])))
        return index_scores_reference(query, weights, keys, scale)

    monkeypatch.setattr(module, "why_no_index_kernel", lambda query: None)
    monkeypatch.setattr(module, "index_scores_fused", noted)
    return calls


def test_calls_with_a_gradient_or_mixed_dtypes_go_to_the_reference(fused):
    query, weights, keys = draw_scored()
    wanted = index_scores(query, weights, keys, 0.25)
    assert len(fused) == 1
    for i in range(3):
        inputs = [query, weights, keys]
        inputs[i] = inputs[i].clone().requires_grad_()
        index_scores(*inputs, 0.25).sum().backward()
        assert inputs[i].grad.norm() > 0
    assert torch.equal(index_scores(query, weights, keys.bfloat16(), 0.25), wanted)
    assert len(fused) == 1
    with torch.no_grad():
        index_scores(*inputs, 0.25)
    assert len(fused) == 2


# --- selection by the kernel ---


def tiles_of(keys, size):
    return [(i, keys[:, i : i + size]) for i in range(0, keys.shape[1], size)]


def by_all_scores(query, weights, keys, positions, top_k):
    """What one packed key per query and key selects, without tiles."""
    scores = index_scores_reference(query, weights, keys, 0.25)
    where = torch.arange(keys.shape[1])
    packed = pack_keys(scores, where).masked_fill(where > positions[:, None], selection._LEAST)
    return unpack_positions(merge_top_k(None, packed, top_k)).sort(-1).values


@pytest.mark.parametrize("grid", [1.0, 8.0], ids=["ties", "few ties"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bound", [1, 200, 700, 2**27])
def test_joined_tiles_select_what_single_ones_do(fused, monkeypatch, grid, shared, bound):
    query, weights, keys = draw_scored(n_keys=90, shared=shared, grid=grid)
    if grid == 1.0:
        keys = keys[:, torch.arange(90) % 7]  # every key thirteen times
    positions = torch.arange(60, 65)
    wanted = by_all_scores(query, weights, keys, positions, 12)
    monkeypatch.setattr(selection, "MAX_CUDA_ELEMENTS", bound)
    found = select_top_k(query, weights, positions, tiles_of(keys, 8), 12, 0.25)
    n_joined, n_tiles = len(fused), 12
    assert torch.equal(found, wanted)
    assert all(n_keys <= 8 or n_keys * max(2 * 5, 16 * rows) <= bound for _, (rows, n_keys) in fused)
    assert n_joined == {1: n_tiles, 2**27: 1}.get(bound, n_joined)
    monkeypatch.setattr(module, "why_no_index_kernel", lambda query: "not here")
    assert torch.equal(select_top_k(query, weights, positions, tiles_of(keys, 8), 12, 0.25), wanted)
    assert len(fused) == n_joined, "control: the second selection was not by the kernel"


def test_only_tiles_of_one_kind_are_joined(fused):
    """Shared pages, rows of their own behind them, keys of another dtype, positions that are no range."""
    query, weights, keys = draw_scored(n_keys=64, grid=2.0)
    each, positions = keys.expand(2, -1, -1), torch.arange(60, 65)
    where = torch.arange(64)
    tiles = [
        (0, keys[0, :8]),
        (8, keys[:, 8:16]),
        (where[16:24], keys[0, 16:24].double()),
        (where[24:32], keys[0, 24:32].double()),
        (32, keys[:, 32:40]),
        (where[[47, 46, 45, 44, 43, 42, 41, 40]], keys[0, 40:48].flip(0)),
        (48, each[:, 48:56]),
        (56, each[:, 56:]),
    ]
    found = select_top_k(query, weights, positions, iter(tiles), 12, 0.25)
    assert torch.equal(found, by_all_scores(query, weights, keys, positions, 12))
    assert [keys for _, keys in fused] == [(1, 16), (1, 16), (2, 16)]


def test_queries_are_tiled_by_scores_with_the_kernel_and_by_products_without(fused, monkeypatch):
    query, weights, keys = draw_scored(batch=1, n_queries=20)
    monkeypatch.setattr(selection, "MAX_TILE_ELEMENTS", 8 * 40 * 2)
    assert [s.stop - s.start for s in selection._spans(query, keys)] == [16, 4]
    assert [s.stop - s.start for s in selection._spans(query, keys.double())] == [2] * 10
    found = select_top_k(query, weights, torch.arange(20, 40), [(0, keys)], 6, 0.25)
    assert [queries for queries, _ in fused] == [(1, 16), (1, 4)]
    assert torch.equal(found, by_all_scores(query, weights, keys, torch.arange(20, 40), 6))


def test_a_selection_collects_no_gradient_and_uses_the_kernel(fused):
    query, weights, keys = draw_scored()
    select_top_k(query.requires_grad_(), weights, torch.arange(30, 35), [(0, keys)], 6, 0.25)
    assert fused


def test_a_poisoned_key_in_a_joined_tile_raises(fused):
    query, weights, keys = draw_scored()
    keys[0, 11] = float("nan")
    with pytest.raises(NumericsError, match="not finite"):
        select_top_k(query, weights, torch.arange(30, 35), tiles_of(keys, 8), 6, 0.25)


def test_no_queries_select_nothing(fused):
    query, weights, keys = draw_scored(n_queries=0)
    assert select_top_k(query, weights, torch.arange(0), tiles_of(keys, 8), 6, 0.25).shape[:2] == (2, 0)
