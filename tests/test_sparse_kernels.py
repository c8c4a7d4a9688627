"""Sparse latent attention by kernels: Triton's interpreter beside a dense softmax in float64, the choice between them
and the reference, and the trial that makes it. What is left to a GPU is whether the compiled kernels compute the same.

The interpreter sums float32 in another order: 1e-5 relative leaves a digit above rounding.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_sparse_ops import INPUTS, draw_case, draw_selection, view_of

from longstraw_sdk.environment import KERNELS as VARIABLE
from longstraw_sdk.ops import sparse_latent_attention
from longstraw_sdk.ops.latent_pages import gradient_sums, joined, rows_in_one_piece
from longstraw_sdk.ops.sparse_attention_fused import knows_sizes

attention = importlib.import_module("longstraw_sdk.ops.sparse_attention")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only")
def test_kernels_equal_a_dense_softmax_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "interpreted_sparse.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worst, least = map(float, done.stdout.split())
    assert worst < 1e-5
    assert least > 0.01, "control: another scale and another selection are told apart"


# --- rows and gradients in one piece ---


@pytest.mark.parametrize("limit", [1, 4, 9, 11])
@pytest.mark.parametrize("scattered", [False, True])
def test_rows_in_one_piece(limit, scattered):
    case = draw_case(scattered=scattered)
    view = view_of(case, limit)
    found = rows_in_one_piece(view)
    assert (found is None) == (scattered and limit > 4)
    if found is not None:
        assert found["latent"].untyped_storage().data_ptr() == case.pages.pages[0].slab.tensors["latent"].data_ptr()
    for rows in (rows_in_one_piece(view, copy=True), found or {}, rows_in_one_piece(joined(view), copy=True)):
        for name, values in rows.items():
            assert torch.equal(values, {"latent": case.page_latent, "k_rope": case.page_rope}[name][:limit])


@pytest.mark.parametrize("page_by_page", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 4, 9, 11])
def test_sums_of_all_rows_are_added_to_what_was_collected(limit, page_by_page):
    case = draw_case(scattered=page_by_page)
    view = view_of(case, limit)
    for _ in range(2):
        with gradient_sums(view if page_by_page else joined(view)) as sums:
            assert (sums is None) == (limit == 0)
            if sums is not None:
                sums["latent"] += torch.arange(limit)[:, None]
                sums["k_rope"] += 1.0
    if limit:
        found = case.pages.cotangents(0, 11)
        assert found["latent"][0, :, 0].tolist() == [2.0 * i for i in range(limit)] + [0.0] * (11 - limit)
        assert found["k_rope"][0].sum(-1).tolist() == [4.0] * limit + [0.0] * (11 - limit)
    with gradient_sums(view_of(case, limit, accumulate=False)) as sums:
        assert sums is None


# --- the choice ---


def reason_of(case, **kinds):
    given = {name: getattr(case, name) for name in INPUTS} | kinds
    return attention.why_not_fused(*(given[name] for name in INPUTS), view_of(case))


def test_the_choice_is_logged_once_with_its_reason(caplog):
    attention._why.cache_clear()
    case = draw_case()
    with caplog.at_level("INFO", "longstraw_sdk.ops.sparse_attention"):
        for _ in range(2):
            leaves = (getattr(case, name) for name in INPUTS)
            sparse_latent_attention(*leaves, draw_selection(case), view_of(case), case.scale)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("3 heads over latents of 5 and 2: reference, because the kernels need CUDA, not cpu")


@pytest.mark.parametrize(
    ("dtype", "rank", "rope_dim", "reason"),
    [
        (torch.float32, 512, 64, "multiply bfloat16 or float16, not torch.float32"),
        (torch.bfloat16, 384, 64, "not 384 and 64"),
        (torch.bfloat16, 1024, 64, "not 1024 and 64"),
        (torch.bfloat16, 512, 8, "not 512 and 8"),
    ],
)
def test_inputs_they_cannot_serve_have_a_reason(dtype, rank, rope_dim, reason):
    assert reason in attention._why(None, CUDA, dtype, 64, rank, rope_dim)


def test_sizes_that_the_kernels_know():
    assert all(knows_sizes(rank, rope) for rank in (16, 256, 512) for rope in (16, 64, 128))
    assert not any(knows_sizes(rank, 64) for rank in (0, 8, 96, 1024))
    assert not any(knows_sizes(512, rope) for rope in (0, 8, 96, 256))


@pytest.mark.parametrize(
    ("rank", "rope_dim", "reason"),
    [(512, 32, "not 512 and 32"), (128, 64, "not 128 and 64"), (512, 64, "capability 9, not 10")],
)
def test_what_the_kernel_for_hopper_cannot_serve_has_a_reason(monkeypatch, rank, rope_dim, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert reason in attention._why_not_hopper(None, CUDA, torch.bfloat16, 64, rank, rope_dim)
    assert attention._why_not_hopper("off", CUDA, torch.bfloat16, 64, rank, rope_dim) == "off"


@pytest.fixture
def fused(monkeypatch):
    """Calls of the kernels, which here are the reference; nothing is against their kind of rows but the environment."""
    calls = []

    def apply(*given):
        calls.append(given)
        return attention.sparse_latent_attention_reference(*given[:-1])

    monkeypatch.setattr(attention, "_why", lambda off, *kind: off)
    monkeypatch.setattr(attention, "FusedSparseAttention", SimpleNamespace(apply=apply))
    return calls


def test_what_each_call_may_ask_of_them(fused, monkeypatch):
    case = draw_case(dtype=torch.bfloat16)
    assert reason_of(case) is None
    assert reason_of(case, query_latent=case.query_latent.float(), query_rope=case.query_rope.float()) is None
    assert "differ in dtype" in reason_of(case, query_latent=case.query_latent.half())
    assert "differ in dtype" in reason_of(case, key_rope=case.key_rope.half())
    assert "differ in dtype" in reason_of(case, latent=case.latent.half(), key_rope=case.key_rope.half()), (
        "of the pages"
    )
    assert "next to each other" in reason_of(draw_case(dtype=torch.bfloat16, scattered=True))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in reason_of(case)


def test_the_variable_turns_them_off(fused, monkeypatch):
    case = draw_case()
    selected = draw_selection(case)
    given = (*(getattr(case, name) for name in INPUTS), selected, view_of(case), case.scale)
    wanted = sparse_latent_attention(*given)
    assert [call[-1] for call in fused] == [False], "not the kernel for Hopper: it does not know latents of 5"
    monkeypatch.setattr(attention, "why_not_hopper", lambda *given: None)
    sparse_latent_attention(*given)
    assert [call[-1] for call in fused] == [False, True]
    monkeypatch.setenv(VARIABLE, "off")
    assert reason_of(case) == "LONGSTRAW_KERNELS is 'off'"
    assert torch.equal(sparse_latent_attention(*given), wanted)
    assert len(fused) == 2


# --- the trial ---


def sound(*given):
    return attention.sparse_latent_attention_reference(*given)


def reading(query_latent, query_rope, latent, key_rope, selected, view, scale):
    """Reads row 17, which nobody selected, with a weight of zero."""
    out = sound(query_latent, query_rope, latent, key_rope, selected, view, scale)
    return out + 0.0 * view.values(0)["latent"][17]


def half_gradient(x):
    return x.detach() + 0.5 * (x - x.detach())


def drifting():
    n_calls = 0

    def drift(*given):
        nonlocal n_calls
        n_calls += 1
        return sound(*given) * (1 + n_calls * 1e-6)

    return drift


def blind_to_the_prefix(*given):
    """Collects no gradient of it."""
    view = given[5]
    view.mark_gradient()
    return sound(*given[:5], view._replace(accumulate=False), given[6])


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (sound, None),
        (lambda *a: sound(*a[:6], a[6] * 1.2), "its output was off by"),
        (lambda *a: sound(a[0], half_gradient(a[1]), *a[2:]), "of rotary queries was off"),
        (lambda *a: sound(*a[:2], half_gradient(a[2]), *a[3:]), "of new latents was off"),
        (blind_to_the_prefix, "gradient of latents was off by 1.0e+00"),
        (lambda *a: sound(*a[:4], a[4].clamp_min(0), *a[5:]), "its output was off by"),
        (reading, "its output was off by nan"),
        (drifting(), "the last bits of its output changed"),
        (lambda *a: 1 / 0, "a trial failed: ZeroDivisionError"),
    ],
    ids=["sound", "scale", "rotary", "new rows", "prefix", "not selected", "unselected row", "drifts", "raises"],
)
def test_faulty_kernels_fail_their_trial(monkeypatch, kernels, reason):
    monkeypatch.setattr(attention, "FusedSparseAttention", SimpleNamespace(apply=lambda *a: kernels(*a[:-1])))
    with torch.no_grad():  # as a capture calls it
        found = attention.tried(lambda: attention._trial(CPU, torch.float32, 3, 16, 16), CPU)
    assert found is None if reason is None else reason in found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: compiled kernels run on a GPU only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_heads", "rank", "rope_dim"), [(64, 512, 64), (128, 512, 64), (20, 256, 64), (3, 16, 16)])
def test_kernels_pass_their_trial(dtype, n_heads, rank, rope_dim):
    assert attention._why(None, CUDA, dtype, n_heads, rank, rope_dim) is None
    if attention.hopper_knows(rank, rope_dim) and torch.cuda.get_device_capability()[0] == 9:
        assert attention._why_not_hopper(None, CUDA, dtype, n_heads, rank, rope_dim) is None
