"""Replay against conventional autograd: every gradient mode, architecture, dtype, chunk, page and packing.

Tolerances are those of `longstraw_sdk.evidence.parity` (relative L2 over all LoRA gradients: 1e-10 in float64, 1e-4 in
float32; bfloat16 within 1.5 times conventional bfloat16's own error). Every group has a control that must fail.
"""

import dataclasses

import pytest
import torch

from longstraw_sdk import session as session_module
from longstraw_sdk.evidence.parity import ParityCase, check_parity, conventional_run, relative_l2, replay_run
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.session_core import SessionCore

MODES = [("full", "live"), ("response", "live"), ("full", "frozen"), ("response", "frozen")]
MODELS = [("qwen36", 4), ("qwen36", 8), ("llama", 3), ("qwen3", 3)]


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients.values()])


def sweep(cases, is_slow):
    """Parameters of a test, those of a long sweep under the marker that leaves them out by default."""
    return [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in cases]


@pytest.mark.parametrize(
    ("architecture", "n_layers", "scope", "prefix_adapter", "prompt_tokens"),
    sweep(
        ((*model, *mode, n) for model in MODELS for mode in MODES for n in (1, 2, 65, 100)),
        lambda architecture, n_layers, scope, prefix_adapter, n: n_layers == 8 and n < 100,
    ),
)
def test_float64(architecture, n_layers, scope, prefix_adapter, prompt_tokens):
    model = tiny_model(architecture, n_layers=n_layers)
    result = check_parity(model, ParityCase("float64", scope, prefix_adapter, prompt_tokens))
    assert result.passed, result


@pytest.mark.parametrize("architecture", ["qwen36", "llama"])
@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_tokens": 2, "page_tokens": 1},
        {"chunk_tokens": 7, "page_tokens": 3},
        {"chunk_tokens": 33, "page_tokens": 16},
        {"chunk_tokens": 14, "page_tokens": 100},
        {"chunk_tokens": 512, "page_tokens": 64},
        {"replay_tokens": 24},
        {"replay_tokens": 1000},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "chunk_tokens": 7, "replay_tokens": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES[:3])
def test_float64_does_not_depend_on_chunks_pages_packing_or_checkpointing(architecture, changes, scope, prefix_adapter):
    case = dataclasses.replace(ParityCase("float64", scope, prefix_adapter), **changes)
    result = check_parity(tiny_model(architecture), case)
    assert result.passed, result


@pytest.mark.parametrize(
    ("architecture", "n_layers", "scope", "prefix_adapter", "dtype"),
    sweep(
        ((*model, *mode, dtype) for model in MODELS for mode in MODES[:3] for dtype in ("float32", "bfloat16")),
        lambda architecture, n_layers, scope, prefix_adapter, dtype: (
            dtype == "bfloat16"
            and ((architecture, n_layers) != MODELS[0] and (architecture, scope) != ("llama", "full"))
        ),
    ),
)
def test_low_precision(architecture, n_layers, scope, prefix_adapter, dtype):
    result = check_parity(tiny_model(architecture, n_layers=n_layers), ParityCase(dtype, scope, prefix_adapter))
    assert result.passed, result


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_further_dense_models(architecture):
    result = check_parity(tiny_model(architecture), ParityCase("float64"))
    assert result.passed, result


def test_control_without_the_sweep_the_full_gradient_is_wrong(monkeypatch):
    monkeypatch.setattr(session_module.Prefix, "sweep", lambda self: 0)
    monkeypatch.setattr(SessionCore, "check_whole", lambda self: None)  # which would tell
    result = check_parity(tiny_model("qwen36"), ParityCase("float64"))
    assert not result.passed
    assert result.gradient_error > 1e-2


@pytest.mark.parametrize("architecture", ["qwen36", "llama"])
def test_control_the_modes_are_different_gradients(architecture):
    """A comparison that could not tell the modes apart would prove nothing."""
    runs = {}
    for scope, prefix_adapter in MODES[:3]:
        case = ParityCase("float32", scope, prefix_adapter)
        runs[scope, prefix_adapter] = flat(conventional_run(tiny_model(architecture), case).gradients)
    full, response, frozen = runs.values()
    assert relative_l2(response, full) > 0.02
    assert relative_l2(frozen, full) > 0.02
    assert relative_l2(frozen, response) > 1e-3


def test_order_of_members_does_not_matter():
    case = ParityCase("float64")
    forward = replay_run(tiny_model("qwen36").double(), case)
    backward = replay_run(tiny_model("qwen36").double(), case, order=lambda n: list(reversed(range(n))))
    assert relative_l2(flat(backward.gradients), flat(forward.gradients)) < 1e-12


def test_second_step_after_an_update():
    """Parity after one optimizer step, where a stale state or a wrong accumulator would show."""
    from longstraw_sdk import LongStrawSession

    ours, theirs = tiny_model("qwen36"), tiny_model("qwen36")
    case = ParityCase("float32")
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (ours, theirs)]
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 97, (40,), generator=generator)
    row = torch.randint(0, 97, (9,), generator=generator)
    start = flat({n: p.detach().clone() for n, p in theirs.named_parameters() if p.requires_grad})
    with LongStrawSession(ours, chunk_tokens=case.chunk_tokens, page_tokens=case.page_tokens) as session:
        for _ in range(2):
            with session.capture(prompt) as prefix:
                (-prefix.replay(row).logps.sum()).backward()
            session.finalize()
            logits = theirs(input_ids=torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 : -1]
            (-torch.log_softmax(logits, -1).gather(-1, row[:, None]).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    ends = [flat({n: p.detach() for n, p in m.named_parameters() if p.requires_grad}) for m in (ours, theirs)]
    assert relative_l2(ends[0] - start, ends[1] - start) < 1e-4
