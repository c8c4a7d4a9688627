"""LoRA linears of a bfloat16 model: no float32 activation, and no more error than PEFT's own forward has."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from longstraw_sdk import LongStrawSession
from longstraw_sdk.evidence.memory import trace_memory
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.hf.lora import swap_lora_linears
from longstraw_sdk.ops import add_lora, lora_linear

IN, OUT, RANK, SCALE = 96, 64, 8, 0.7
NAMES = ("output", "x", "lora_a", "lora_b")


def draw(seed=0, dtype=torch.bfloat16):
    """Values that bfloat16 holds exactly, float32 LoRA weights that it does not."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, bias, d_out = some(3, 40, IN), some(OUT, IN) * IN**-0.5, some(OUT), some(3, 40, OUT)
    return x, weight, bias, some(RANK, IN).float() * 0.1001, some(OUT, RANK).float() * 0.0997, d_out


def peft_like(x, weight, bias, a, b, scale):
    """What PEFT 0.21 does for one adapter."""
    base = nn.functional.linear(x, weight, bias)
    return (base + nn.functional.linear(nn.functional.linear(x.to(a.dtype), a), b) * scale).to(base.dtype)


def added(x, weight, bias, a, b, scale):
    return add_lora(nn.functional.linear(x, weight, bias), x, a, b, scale)


def both_ways(function, dtype, seed=0):
    x, weight, bias, a, b, d_out = draw(seed)
    if dtype == torch.float64:
        x, weight, bias, a, b, d_out = (t.double() for t in (x, weight, bias, a, b, d_out))
    leaves = [t.requires_grad_() for t in (x, a, b)]
    out = function(x, weight, bias, a, b, SCALE)
    out.backward(d_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def errors(function):
    """Relative L2 to float64 of each result, averaged over eight draws."""
    sums = torch.zeros(len(NAMES))
    for seed in range(8):
        truth = both_ways(peft_like, torch.float64, seed)
        found = both_ways(function, torch.bfloat16, seed)
        sums += torch.tensor([relative_l2(f.double(), t) for f, t in zip(found, truth, strict=True)])
    return sums / 8


@pytest.mark.parametrize("function", [lora_linear, added])
def test_errors_are_those_of_bfloat16(function):
    ours, stock = errors(function), errors(peft_like)
    # Output and d_x are rounded to bfloat16 by both. PEFT sums LoRA gradients of exact products; ours are of factors
    # that were rounded once, 2**-9 relative at most, so half a bfloat16 step in the mean is what they may add.
    assert (ours[:2] <= 1.5 * stock[:2]).all(), (ours, stock)
    assert (ours[2:] <= 2**-8).all(), (ours, stock)


@pytest.mark.parametrize("function", [lora_linear, added])
def test_dtypes_are_those_of_peft(function):
    found = both_ways(function, torch.bfloat16)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize(
    "broken",
    [
        lambda x, w, bias, a, b, s: lora_linear(x, w, bias, a, b, s * 1.1),
        lambda x, w, bias, a, b, s: lora_linear(x, w, None, a, b, s),
        lambda x, w, bias, a, b, s: lora_linear(x, w, bias, a, b.detach(), s) + 0 * b.sum().to(x.dtype),
    ],
    ids=["scale", "bias", "no gradient of B"],
)
def test_controls_a_wrong_product_is_told_apart(broken):
    stock = errors(peft_like)
    assert (errors(broken) > 10 * stock.clamp_min(1e-3)).any()


@pytest.mark.parametrize("function", [lora_linear, added])
def test_only_what_is_asked_for_gets_a_gradient(function):
    x, weight, bias, a, b, d_out = draw()
    a.requires_grad_()
    function(x, weight, bias, a, b, SCALE).backward(d_out)
    assert a.grad is not None and x.grad is None and b.grad is None


def test_no_float32_activation_is_made():
    """Of PEFT's own forward the largest float32 tensor is an activation."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        n_elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.n_elements = max(self.n_elements, out.numel())
            return out

    sizes = []
    for function in (peft_like, lora_linear, added):
        x, weight, bias, a, b, _ = draw()
        with Largest() as largest:
            function(x, weight, bias, a, b, SCALE)
        sizes.append(largest.n_elements)
    assert sizes == [3 * 40 * IN, 0, 0], "input in float32; nothing"


def test_a_checkpointed_linear_keeps_nothing_but_its_input():
    x, weight, bias, a, b, _ = draw()
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    with trace_memory() as trace:
        out = checkpoint(lambda y: lora_linear(y, weight, bias, a, b, SCALE), x, use_reentrant=False)
    assert trace.live_bytes <= out.nbytes + 5056, "the random state of the checkpoint; no cast of A or B"
    with trace_memory() as trace:
        kept = lora_linear(x, weight, bias, a, b, SCALE)
    assert trace.live_bytes > kept.nbytes + 2 * RANK * (IN + OUT), "control"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(IN, OUT, bias=False)

    def forward(self, x):
        return self.proj(x)


def adapted(dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = get_peft_model(Block().to(dtype), LoraConfig(r=4, target_modules=["proj"], **options))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def used(model, x, monkeypatch):
    """Whether a forward of the swapped model goes through `lora_linear`; its output must be PEFT's to rounding."""
    calls = []
    monkeypatch.setattr("longstraw_sdk.hf.lora.lora_linear", lambda *a: calls.append(1) or lora_linear(*a))
    stock = type(model.base_model.model.proj)
    wanted = model(x)
    undo = swap_lora_linears(model)
    found = model(x)
    undo()
    assert type(model.base_model.model.proj) is stock
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    return bool(calls)


X = torch.randn(2, 7, IN, generator=torch.Generator().manual_seed(1))


def with_hook(model):
    model.base_model.model.proj.base_layer.register_forward_hook(lambda module, args, out: out + 1)


def with_second_adapter(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["proj"]))
    model.base_model.set_adapter(["default", "other"])


def merged(model):
    model.merge_adapter()


def disabled(model):
    model.base_model.disable_adapter_layers()


def trained_base(model):
    model.base_model.model.proj.base_layer.weight.requires_grad_()


def dropping(model):
    model.base_model.model.proj.lora_dropout["default"] = nn.Dropout(0.5)
    model.eval()


@pytest.mark.parametrize(
    "change", [with_hook, with_second_adapter, merged, disabled, trained_base], ids=lambda f: f.__name__
)
def test_whatever_is_not_one_plain_adapter_goes_to_peft(monkeypatch, change):
    model = adapted()
    change(model)
    assert not used(model, X.bfloat16(), monkeypatch)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, True), ({"use_dora": True}, False), ({"lora_bias": True}, False)]
)
def test_variants_of_lora_go_to_peft(monkeypatch, options, expected):
    assert used(adapted(**options), X.bfloat16(), monkeypatch) is expected


def test_dropout_that_does_not_drop_is_plain(monkeypatch):
    model = adapted()
    dropping(model)
    assert used(model, X.bfloat16(), monkeypatch)
    model.base_model.model.proj.lora_dropout["default"].train()
    undo = swap_lora_linears(model)
    torch.manual_seed(0)
    a = model(X.bfloat16())
    torch.manual_seed(1)
    assert not torch.equal(a, model(X.bfloat16())), "PEFT drops"
    undo()


def test_wide_models_and_autocast_to_another_dtype_go_to_peft(monkeypatch):
    assert not used(adapted(torch.float32), X, monkeypatch)
    with torch.autocast("cpu", torch.float16):
        assert not used(adapted(), X.bfloat16(), monkeypatch)


def test_autocast_to_the_dtype_that_the_model_has_changes_nothing(monkeypatch):
    """TRL switches bf16 autocast on by default."""
    with torch.autocast("cpu", torch.bfloat16):
        assert used(adapted(), X.bfloat16(), monkeypatch)
        assert not used(adapted(), X, monkeypatch), "float32 activations"


@pytest.mark.parametrize("function", [lora_linear, added])
def test_outputs_may_be_written_in_place(function):
    x, weight, bias, a, b, d_out = draw()
    leaves = [t.requires_grad_() for t in (x, a, b)]
    function(x, weight, bias, a, b, SCALE).mul_(2).backward(d_out)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    (function(x, weight, bias, a, b, SCALE) * 2).backward(d_out)
    for leaf, gradient in zip(leaves, found, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("architecture", ["llama", "qwen36", "glm52"])
def test_a_bound_model_uses_it_and_a_closed_session_leaves_peft(monkeypatch, architecture):
    model = tiny_model(architecture, n_layers=4).bfloat16()
    calls = []
    monkeypatch.setattr("longstraw_sdk.hf.lora.lora_linear", lambda *a: calls.append(1) or lora_linear(*a))
    classes = [type(module) for module in model.modules()]
    with LongStrawSession(model, chunk_tokens=32, page_tokens=8) as session:
        with session.capture(torch.arange(2, 40)) as prefix:
            prefix.replay(torch.tensor([4, 5, 6])).logps.sum().backward()
        session.finalize()
    assert calls
    assert [type(module) for module in model.modules()] == classes
