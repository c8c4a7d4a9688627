"""Qwen3.6's fused kernels. Without a GPU what runs is the layer around them, and calls to stand-ins of them in plain
PyTorch with the same contract; whether kernels compute what they should is tried on the device before they are used.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from longstraw_sdk import LongStrawSession, UnsupportedModelError
from longstraw_sdk.environment import without_kernels
from longstraw_sdk.evidence.parity import ParityCase, check_parity
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.qwen36 import gated_delta_net, kernels
from longstraw_sdk.ops.trial import tried

CPU = torch.device("cpu")


@pytest.fixture
def own_layer(monkeypatch):
    """Resident passes take our Gated DeltaNet layer, around the stock operators."""
    monkeypatch.setattr(gated_delta_net, "why_no_kernels", lambda x: None)


@pytest.mark.parametrize(("scope", "adapter"), [("full", "live"), ("response", "live"), ("full", "frozen")])
def test_the_layer_is_exact(own_layer, scope, adapter):
    result = check_parity(tiny_model("qwen36"), ParityCase("float64", scope, adapter))
    assert result.passed, result


def test_the_layer_is_exact_with_checkpointing_and_packed_rows(own_layer):
    model = tiny_model("qwen36")
    base_model_of(model).activation_checkpointing_enable({"use_reentrant": False})
    result = check_parity(model.train(), ParityCase("float32", replay_tokens=64))
    assert result.passed, result


@pytest.mark.parametrize("wrong", ["tail", "order"])
def test_controls_a_wrong_layer_is_told_apart(own_layer, monkeypatch, wrong):
    def convolve(columns, tail, *rest):
        if wrong == "tail":
            return kernels.convolve_reference(columns, tail * 0, *rest)
        return kernels.convolve_reference(columns.flip(1), tail, *rest).flip(1)

    monkeypatch.setattr(gated_delta_net, "convolve", convolve)
    with pytest.raises(UnsupportedModelError, match="differ from the stock forward"):
        check_parity(tiny_model("qwen36"), ParityCase("float64"))


def test_what_is_swapped_and_that_it_comes_back():
    model = tiny_model("qwen36")
    base = base_model_of(model)

    def classes():
        return [type(module) for module in base.modules()]

    before = classes()
    with LongStrawSession(model, probe=False):
        bound = classes()
    assert classes() == before
    for plain, fused in (
        (stock.Qwen3_5RMSNorm, kernels.FusedRMSNorm),
        (stock.Qwen3_5RMSNormGated, kernels.FusedRMSNormGated),
        (stock.Qwen3_5MLP, kernels.FusedMLP),
        (stock.Qwen3_5GatedDeltaNet, gated_delta_net.ResidentGatedDeltaNet),
    ):
        assert before.count(plain) == bound.count(fused) > 0 and not bound.count(plain)


def rms_norm(x, weight, bias, eps):
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight).to(x.dtype)


def rms_norm_gated(x, g, weight, bias, activation, eps):
    assert activation == "swish"
    return (rms_norm(x, weight, bias, eps).float() * F.silu(g.float())).to(x.dtype)


def causal_conv1d(x, weight, bias, initial_state, activation):
    """Its state has as many columns as the kernel; all but the first are what came before."""
    assert activation == "silu" and initial_state.shape == (len(x), x.shape[2], weight.shape[1])
    joined = torch.cat([initial_state[..., 1:], x.transpose(1, 2)], -1)
    return F.silu(F.conv1d(joined, weight[:, None], bias, groups=len(weight))).transpose(1, 2), None


@pytest.fixture
def fla(monkeypatch):
    """The parts of flash-linear-attention that are called."""
    parts = {
        "norm.layernorm": {"rms_norm": rms_norm},
        "norm.fused_norm_gate": {"rms_norm_gated": rms_norm_gated},
        "activations": {"swiglu": lambda gate, up: F.silu(gate) * up},
        "causal_conv1d": {"causal_conv1d": causal_conv1d},
    }
    for name in ("fla", "fla.modules", "fla.modules.norm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, functions in parts.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"fla.modules.{name}", module)
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_called_for_what_the_stock_code_computes(fla, dtype):
    assert kernels._trial(CPU, dtype) is None


@pytest.mark.parametrize(
    ("module", "name", "wrong", "told"),
    [
        ("norm.layernorm", "rms_norm", lambda x, w, b, eps: rms_norm(x, w - 1, b, eps), "its norm was off"),
        (
            "norm.layernorm",
            "rms_norm",
            lambda x, w, b, eps: rms_norm(x, w - int(len(w) <= 512), b, eps),
            "its norm of heads was off",
        ),
        ("activations", "swiglu", lambda gate, up: (F.silu(gate) * up).bfloat16().float(), "its SwiGLU was off"),
        ("norm.fused_norm_gate", "rms_norm_gated", lambda x, g, w, b, **o: x * g, "its gated norm was off"),
        ("activations", "swiglu", lambda gate, up: F.silu(gate) * up.detach(), "trial failed"),
        (
            "causal_conv1d",
            "causal_conv1d",
            lambda x, w, b, initial_state, activation: causal_conv1d(x, w, b, initial_state.roll(1, -1), activation),
            "its convolution was off",
        ),
    ],
)
def test_a_wrong_kernel_fails_its_trial(fla, monkeypatch, module, name, wrong, told):
    monkeypatch.setattr(sys.modules[f"fla.modules.{module}"], name, wrong)
    assert told in tried(lambda: kernels._trial(CPU, torch.float32), CPU)


def test_modules_compute_the_same_through_the_kernels(fla, monkeypatch):
    """A whole pass: the layer, its norms, its convolution and the MLP, all through the stand-ins."""
    for place in (kernels, gated_delta_net):
        monkeypatch.setattr(place, "why_no_kernels", lambda x: None)
    result = check_parity(tiny_model("qwen36"), ParityCase("float32"))
    assert result.passed, result


def test_a_reference_says_that_it_is_one():
    with without_kernels():
        assert kernels.why_no_kernels(torch.zeros(1)) == "a reference is computed without them"
    assert kernels.why_no_kernels(torch.zeros(1)) == "they need CUDA, not cpu"


def test_float64_and_other_devices_have_a_reason():
    assert kernels.why_no_kernels(torch.zeros(1)) == "they need CUDA, not cpu"
    assert "not enough for torch.float64" in kernels._why(None, torch.device("cuda"), torch.float64)


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None, reason="needs CUDA and flash-linear-attention"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_the_device(dtype):
    assert kernels.why_no_kernels(torch.zeros(1, device="cuda", dtype=dtype)) is None


def test_a_model_with_another_activation_keeps_its_mlp(fla, monkeypatch):
    monkeypatch.setattr(kernels, "why_no_kernels", lambda x: None)
    mlp = stock.Qwen3_5MLP(tiny_model("qwen36", hidden_act="gelu").config, 48)
    x = torch.randn(3, 32)
    wanted = mlp(x)
    mlp.__class__ = kernels.FusedMLP
    assert torch.equal(mlp(x), wanted)
    assert isinstance(mlp.act_fn, nn.Module)


def test_the_probe_does_not_share_a_fault_of_a_kernel(fla, monkeypatch):
    """It compares with the model's own modules, which are swapped by then."""
    monkeypatch.setattr(sys.modules["fla.modules.activations"], "swiglu", lambda gate, up: F.silu(gate) * up * 3)
    monkeypatch.setattr(kernels, "_why", lambda off, device, dtype: off)
    model = tiny_model("qwen36")
    with pytest.raises(UnsupportedModelError, match="differ from the stock forward"):
        LongStrawSession(model)
    monkeypatch.setenv("LONGSTRAW_KERNELS", "off")
    LongStrawSession(model).close()


@pytest.mark.parametrize("mode", ["inference", "autocast", "checkpoint"])
def test_a_trial_is_that_of_nobody_elses_mode(fla, mode):
    found = []

    def trial(x):
        found.append(tried(lambda: kernels._trial(CPU, torch.float32), CPU))
        return x * 2

    if mode == "inference":
        with torch.inference_mode():
            trial(torch.zeros(1))
    elif mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            trial(torch.zeros(1))
    else:
        x = torch.ones(1, requires_grad=True)
        out = checkpoint(lambda y: trial(y) * y, x, use_reentrant=False)
        out.backward()
        assert x.grad == 4
    assert found and set(found) == {None}
