"""The CUDA operator without CUDA: cuDNN's two calls are replaced by plain PyTorch with the same contract, and Triton
interprets the kernel. What is left to a GPU is whether cuDNN and the compiled kernel compute what they should, which a
trial checks there before the operator is chosen.
"""

import importlib
import math
import os
import subprocess
import sys

import pytest
import torch

from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.ops import attention_choice, attention_cudnn, prefix_attention
from longstraw_sdk.ops.attention_cudnn import CudnnAttention, why_not_cudnn, why_not_kernel
from longstraw_sdk.ops.attention_reference import ReferenceAttention
from longstraw_sdk.ops.fused_attention import is_planned
from longstraw_sdk.ops.query_gradient import query_gradient_reference
from longstraw_sdk.state import AttentionKVSpec, PagedLayerState, PagedView, PagePool

attention = importlib.import_module("longstraw_sdk.ops.prefix_attention")  # the package has the function of this name
CPU = torch.device("cpu")
TOLERANCE = 2e-6
"""The operator's sums are float32 whatever comes in; 4e-7 was measured."""


def scores_of(q, k, causal, scale):
    """[B, Hq, T, S]; the causal mask begins at the first key, as cuDNN's does."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores


def forward(q, k, v, causal, scale):
    scores = scores_of(q, k, causal, scale)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), scores.logsumexp(-1)


def backward(d_out, q, k, v, out, lse, causal, scale):
    n = q.shape[1] // k.shape[1]
    weights = torch.exp(scores_of(q, k, causal, scale) - lse)
    d_weights = d_out @ v.repeat_interleave(n, 1).transpose(-1, -2)
    d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True)) * scale
    d_k, d_v = d_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ d_out
    d_k, d_v = (x.unflatten(1, (-1, n)).sum(2) for x in (d_k, d_v))
    return d_scores @ k.repeat_interleave(n, 1), d_k, d_v


@pytest.fixture
def cudnn(monkeypatch):
    """The operator, chosen for everything."""
    monkeypatch.setattr(attention_cudnn, "_forward", forward)
    monkeypatch.setattr(attention_cudnn, "_backward", backward)
    monkeypatch.setattr(attention_cudnn, "query_gradient", query_gradient_reference)
    monkeypatch.setattr(attention_cudnn, "FEW_NEW_TOKENS", 0)
    monkeypatch.setattr(attention_cudnn, "KEYS_PER_CALL", 13)
    monkeypatch.setattr(attention_cudnn, "KEYS_PER_SPLIT", 5)
    return CudnnAttention(with_kernel=True)


def run(operator, monkeypatch, *, batch=2, n_new=6, n_local=6, n_prefix=29, accumulate=True, expected=0):
    monkeypatch.setattr(attention, "choose_attention", lambda query, value: operator)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    leaves = [draw(batch, 4, n_new, 8), draw(batch, 2, n_local, 8), draw(batch, 2, n_local, 8)]
    leaves = [x.requires_grad_() for x in leaves]
    spec = AttentionKVSpec(layer=0, n_kv_heads=2, key_dim=8, value_dim=8, dtype=torch.float32)
    pool = PagePool(4, poison=True)
    pool.open("prompt")
    pages = PagedLayerState(spec, pool, "prompt", CPU, expected)
    for n in (n_prefix // 2, n_prefix - n_prefix // 2):
        if n:
            pages.append({"k": draw(1, 2, n, 8), "v": draw(1, 2, n, 8)})
    out = prefix_attention(*leaves, PagedView(pages, n_prefix, accumulate), 8**-0.5)
    for _ in range(2):
        out.backward(draw(batch, 4, n_new, 8), retain_graph=True)
    found = [out.detach(), *(x.grad for x in leaves)]
    if accumulate and n_prefix:
        found += [x[0] for x in pages.cotangents(0, n_prefix).values()]
    return found


@pytest.mark.parametrize("few_queries", [0, 1000], ids=["whole", "split keys"])
@pytest.mark.parametrize("expected", [0, 40], ids=["runs", "one tensor"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"accumulate": False},
        {"n_local": 9},
        {"n_new": 1, "n_local": 1},
        {"n_new": 1, "n_local": 5, "accumulate": False},
        {"n_prefix": 0},
        {"n_prefix": 1},
        {"n_prefix": 26, "batch": 1},
    ],
    ids=str,
)
def test_output_gradients_and_accumulators_are_those_of_the_reference(cudnn, monkeypatch, case, expected, few_queries):
    monkeypatch.setattr(attention_cudnn, "FEW_QUERIES", few_queries)
    wanted = run(ReferenceAttention(), monkeypatch, expected=expected, **case)
    found = run(cudnn, monkeypatch, expected=expected, **case)
    assert len(found) == len(wanted)
    for f, w in zip(found, wanted, strict=True):
        # A single visible key has weight 1 whatever its score: its gradients are 0 but for rounding.
        assert float((f - w).norm()) <= TOLERANCE * max(1.0, float(w.norm()))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_forward", lambda q, k, v, causal, scale: forward(q, k, v, False, scale)),
        ("_backward", lambda *a: backward(*a[:5], a[5] + 0.1, *a[6:])),
        ("_causal_parts", lambda q, k: iter([(slice(None), True)])),
    ],
)
def test_controls_a_wrong_part_is_told_apart(cudnn, monkeypatch, name, broken):
    wanted = run(ReferenceAttention(), monkeypatch, n_local=9)
    monkeypatch.setattr(attention_cudnn, name, broken)
    found = run(cudnn, monkeypatch, n_local=9)
    assert max(relative_l2(f, w) for f, w in zip(found, wanted, strict=True)) > 1e-2


def test_gradients_of_the_prefix_are_computed_only_where_they_are_collected(cudnn, monkeypatch):
    widths = []

    def counted(d_out, q, k, *rest):
        widths.append(k.shape[2])
        return backward(d_out, q, k, *rest)

    monkeypatch.setattr(attention_cudnn, "_backward", counted)
    run(cudnn, monkeypatch, accumulate=False)
    assert widths == [6, 6], "the new keys, in two backwards"
    widths.clear()
    run(cudnn, monkeypatch, accumulate=True, expected=40)
    assert widths == [6, 10, 10, 5, 4] * 2, "the new keys, then the prefix"


@pytest.mark.parametrize("dim", [8, 96])
def test_heads_that_the_kernel_does_not_know(dim):
    assert "no power of two" in why_not_kernel(CPU, torch.float32, dim)


def test_without_the_kernel_queries_go_through_cudnns_backward(cudnn, monkeypatch):
    monkeypatch.setattr(attention_cudnn, "query_gradient", None)
    wanted = run(ReferenceAttention(), monkeypatch, accumulate=False)
    found = run(CudnnAttention(with_kernel=False), monkeypatch, accumulate=False)
    for f, w in zip(found, wanted, strict=True):
        assert relative_l2(f, w) < TOLERANCE


@pytest.mark.parametrize(
    ("with_kernel", "accumulate", "needed"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_the_output_travels_only_where_a_kernel_reads_it(with_kernel, accumulate, needed):
    view = PagedView(None, 0, accumulate)
    assert CudnnAttention(with_kernel=with_kernel).pages_need_out(view) is needed
    assert not ReferenceAttention().pages_need_out(view)


def test_few_new_tokens_need_no_plan_of_cudnn(cudnn, monkeypatch):
    """While rows decode, the number of new keys grows with every token."""
    monkeypatch.setattr(attention_cudnn, "FEW_NEW_TOKENS", 16)
    monkeypatch.setattr(attention_cudnn, "FEW_QUERIES", 0)
    shapes = set()

    def noted(q, k, *rest):
        shapes.add((q.shape, k.shape))
        return forward(q, k, *rest)

    monkeypatch.setattr(attention_cudnn, "_forward", noted)
    for n_local in range(1, 6):
        found = run(cudnn, monkeypatch, n_new=1, n_local=n_local, expected=40)
        wanted = run(ReferenceAttention(), monkeypatch, n_new=1, n_local=n_local, expected=40)
        for f, w in zip(found, wanted, strict=True):
            assert float((f - w).norm()) <= TOLERANCE * max(1.0, float(w.norm()))
    assert {keys[2] for _, keys in shapes} == {10, 5, 4}, "pages alone"


def test_a_run_on_memory_in_one_piece_is_one_call_and_its_rest(cudnn, monkeypatch):
    monkeypatch.setattr(attention_cudnn, "KEYS_PER_CALL", 1000)
    monkeypatch.setattr(attention_cudnn, "FEW_QUERIES", 0)
    calls = []

    def counted(q, k, *rest):
        calls.append(k.shape[2])
        return forward(q, k, *rest)

    monkeypatch.setattr(attention_cudnn, "_forward", counted)
    run(cudnn, monkeypatch, expected=29)
    assert sorted(calls) == [4, 6, 25], "the new tokens, and the pages"


def test_lengths_that_vary_share_a_few_planned_sizes(cudnn, monkeypatch):
    """cuDNN makes a plan for every combination of sizes, and keeps it for ever."""
    for name, value in (("KEYS_PER_CALL", 20), ("QUERY_MULTIPLE", 32), ("FEW_QUERIES", 3), ("FEW_MULTIPLE", 2)):
        monkeypatch.setattr(attention_cudnn, name, value)
    asked = {"forward": set(), "backward": set()}

    def noted(q, k, v, causal, scale):
        asked["forward"].add((q.shape[2], k.shape[2], causal))
        return forward(q, k, v, causal, scale)

    def noted_back(d_out, q, k, v, out, lse, causal, scale):
        asked["backward"].add((q.shape[2], k.shape[2], causal))
        return backward(d_out, q, k, v, out, lse, causal, scale)

    monkeypatch.setattr(attention_cudnn, "_forward", noted)
    monkeypatch.setattr(attention_cudnn, "_backward", noted_back)
    for n_prefix in range(21, 40):
        for n_new in (4, 5, 6, 7):
            run(cudnn, monkeypatch, n_prefix=n_prefix, n_new=n_new, n_local=n_new, expected=40)
    for sizes in asked.values():
        prefix = {(n, keys) for n, keys, causal in sizes if not causal and keys % 5 == 0}
        assert prefix == {(32, 20), (32, 5), (32, 10), (32, 15)}


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "planned"),
    [(24_576, 4096, True), (64, 4096, True), (24_576, 4095, False), (1024, 1024, True), (1000, 1000, False)],
)
def test_which_sizes_cudnn_gets(n_queries, n_keys, planned):
    q, k = (torch.empty(1, 1, n, 8, device="meta") for n in (n_queries, n_keys))
    assert is_planned(q, k) is planned


def test_the_choice_is_logged_once_with_its_reason(caplog):
    attention_choice._choose.cache_clear()
    with caplog.at_level("INFO", "longstraw_sdk.ops.attention_choice"):
        for _ in range(2):
            chosen = attention_choice.choose_attention(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
    assert chosen.name == "reference"
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("heads of 8 and 8: reference, because cuDNN needs CUDA, not cpu")


def test_an_operator_that_cannot_work_is_refused_by_name(monkeypatch):
    x = torch.zeros(1, 1, 1, 8)
    monkeypatch.setenv(attention_choice.VARIABLE, "flash3")
    with pytest.raises(ConfigurationError, match="'flash3' is not known; allowed: auto, reference, cudnn"):
        attention_choice.choose_attention(x, x)
    monkeypatch.setenv(attention_choice.VARIABLE, "cudnn")
    with pytest.raises(ConfigurationError, match="'cudnn' cannot be used: cuDNN needs CUDA, not cpu"):
        attention_choice.choose_attention(x, x)


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "reason"),
    [
        (torch.float32, 64, 64, "not torch.float32"),
        (torch.bfloat16, 64, 32, "heads of 64 and 32"),
        (torch.bfloat16, 36, 36, "multiples of 8"),
        (torch.bfloat16, 512, 512, "up to 256"),
    ],
)
def test_inputs_it_cannot_serve_have_a_reason(dtype, dim, value_dim, reason):
    assert reason in why_not_cudnn(torch.device("cuda"), dtype, dim, value_dim)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (query_gradient_reference, None),
        (lambda *a: query_gradient_reference(*a[:6], a[6] * 1.1, a[7]), "gradient of queries was off by"),
        (lambda *a: 1 / 0, "a trial failed: ZeroDivisionError"),
    ],
    ids=["sound", "wrong", "raises"],
)
def test_a_faulty_kernel_fails_its_trial(monkeypatch, kernel, reason):
    monkeypatch.setattr(attention_cudnn, "has_kernel", lambda dim: True)
    monkeypatch.setattr(attention_cudnn, "query_gradient", kernel)
    found = why_not_kernel(CPU, torch.float32, 16)
    assert found is None if reason is None else reason in found


def test_a_trial_without_memory_is_no_verdict(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(attention_cudnn, "_trial", full)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    with pytest.raises(torch.OutOfMemoryError):
        why_not_cudnn(torch.device("cuda"), torch.bfloat16, 64, 64)


def test_a_faulty_library_fails_the_trial(cudnn, monkeypatch):
    assert attention_cudnn._trial(CPU, torch.float32, 16) is None
    monkeypatch.setattr(attention_cudnn, "_backward", lambda *a: [x * 1.1 for x in backward(*a)])
    assert "its gradient of queries was off by 1.0e-01" in attention_cudnn._trial(CPU, torch.float32, 16)


INTERPRETED = """
import torch
from longstraw_sdk.ops.query_gradient import query_gradient, query_gradient_reference

worst = 0.0
for n_heads, n_queries, n_keys, dim in ((2, 70, 150, 16), (1, 64, 64, 32), (3, 1, 5, 16)):
    generator = torch.Generator().manual_seed(0)
    def draw(*shape):
        return torch.randn(shape, generator=generator)
    q, d_out = draw(n_heads, n_queries, dim), draw(n_heads, n_queries, dim)
    k, v = (draw(n_keys, n_heads, dim).transpose(0, 1) for _ in range(2))  # token after token, as on pages
    scores = q @ k.transpose(1, 2) * 0.2
    lse = torch.logaddexp(scores.logsumexp(-1), draw(n_heads, n_queries))  # other keys have a part in it
    delta, d_q = draw(n_heads, n_queries), draw(n_heads, n_queries, dim)
    wanted, found = d_q.clone(), d_q.clone()
    query_gradient_reference(q, k, v, d_out, lse, delta, 0.2, wanted)
    query_gradient(q, k, v, d_out, lse, delta, 0.2, found)
    assert not torch.equal(found, d_q)
    worst = max(worst, float((found - wanted).norm() / wanted.norm()))
print(worst)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only")
def test_kernel_equals_its_reference_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
