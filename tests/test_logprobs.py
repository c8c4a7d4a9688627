"""Log-probs and entropies in tiles against plain log-softmax, in float64 unless a test says otherwise."""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw_sdk.evidence.memory import trace_memory
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.ops import selective_log_probs

operator = importlib.import_module("longstraw_sdk.ops.logprobs")
N, WIDTH, VOCAB = 23, 5, 11


class Inputs:
    def __init__(self, n=N, vocab=VOCAB, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        self.weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        self.targets = torch.randint(0, vocab, (n,), generator=generator)
        self.d_logps = torch.randn(n, generator=generator, dtype=torch.float64)
        self.d_entropy = torch.randn(n, generator=generator, dtype=torch.float64)

    def head(self, hidden):
        return hidden @ self.weight.T

    def tiled(self, temperature=1.0):
        return selective_log_probs(self.hidden, self.targets, self.head, len(self.weight), temperature)

    def plain(self, temperature=1.0):
        log_probs = torch.log_softmax(self.head(self.hidden) / temperature, -1)
        return log_probs.gather(-1, self.targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    def gradients(self, logps, entropy):
        """Of hidden and head weight, under a loss of both outputs."""
        loss = (logps * self.d_logps.to(logps.dtype)).sum() + (entropy * self.d_entropy.to(logps.dtype)).sum()
        return torch.autograd.grad(loss, [self.hidden, self.weight])


@pytest.fixture(params=[1, 3 * VOCAB, 22 * VOCAB, 10**6], ids=["1 row", "3 rows", "22 rows", "whole"])
def tile(request, monkeypatch):
    monkeypatch.setattr(operator, "MAX_TILE_ELEMENTS", request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_values_and_gradients_equal_plain_log_softmax_for_every_tile(tile, temperature):
    inputs = Inputs()
    found, wanted = inputs.tiled(temperature), inputs.plain(temperature)
    for a, b in zip((*found, *inputs.gradients(*found)), (*wanted, *inputs.gradients(*wanted)), strict=True):
        assert relative_l2(a.detach(), b.detach()) < 1e-12


def test_control_another_temperature_is_told_apart():
    inputs = Inputs()
    found, wanted = inputs.tiled(1.0), inputs.plain(1.01)
    for a, b in zip((*found, *inputs.gradients(*found)), (*wanted, *inputs.gradients(*wanted)), strict=True):
        assert relative_l2(a.detach(), b.detach()) > 1e-4


def test_each_output_alone_has_its_gradient(tile):
    inputs = Inputs()
    for i in range(2):
        found, wanted = (torch.autograd.grad(f()[i].sum(), inputs.hidden)[0] for f in (inputs.tiled, inputs.plain))
        assert relative_l2(found, wanted) < 1e-12


def test_uniform_logits_have_the_entropy_of_the_vocabulary():
    _, entropy = selective_log_probs(
        torch.zeros(2, WIDTH), torch.tensor([0, 1]), Inputs(dtype=torch.float32).head, VOCAB
    )
    torch.testing.assert_close(entropy, torch.full((2,), VOCAB).log())


def test_without_gradients_there_is_no_graph_and_the_same_numbers(tile):
    inputs = Inputs()
    with torch.no_grad():
        silent = inputs.tiled()
    for a, b in zip(silent, inputs.tiled(), strict=True):
        assert not a.requires_grad
        assert torch.equal(a, b)


def test_bfloat16_head_is_scored_in_float32():
    """The logits are bfloat16; the softmax over them is not, so a probability sums to one within float32 rounding."""
    inputs = Inputs(dtype=torch.bfloat16)
    logps, entropy = inputs.tiled()
    assert logps.dtype == entropy.dtype == torch.float32
    expected = torch.log_softmax(inputs.head(inputs.hidden).float(), -1).gather(-1, inputs.targets[:, None])[:, 0]
    torch.testing.assert_close(logps, expected)
    gradient, _ = inputs.gradients(logps, entropy)
    assert gradient.dtype == torch.bfloat16


class LargestOutput(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.n_elements = max(self.n_elements, tensor.numel())
        return out


def test_logits_of_all_positions_never_exist_together(monkeypatch):
    n, vocab, rows = 400, 300, 7
    monkeypatch.setattr(operator, "MAX_TILE_ELEMENTS", rows * vocab + 5)
    inputs = Inputs(n, vocab, torch.float32)
    for run, largest in ((inputs.tiled, rows * vocab), (inputs.plain, n * vocab)):
        with LargestOutput() as mode:
            inputs.gradients(*run())
        assert mode.n_elements == largest


def test_autograd_keeps_no_logits_between_forward_and_backward(monkeypatch):
    monkeypatch.setattr(operator, "MAX_TILE_ELEMENTS", 7 * VOCAB)
    inputs = Inputs()
    kept = {}
    for run in (inputs.tiled, inputs.plain):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            run()
        kept[run.__name__] = sum(sizes)
    assert kept["tiled"] == N * (WIDTH + 1), "hidden states and targets"
    assert kept["plain"] > N * VOCAB, "control"


def test_backward_holds_one_tile_at_a_time_though_no_loss_uses_the_entropy(monkeypatch):
    n, vocab, tiles = 320, 640, 16
    inputs = Inputs(n, vocab, torch.float32)
    peaks = []
    for n_tiles in (tiles, 1):
        monkeypatch.setattr(operator, "MAX_TILE_ELEMENTS", n * vocab // n_tiles)
        logps, _ = inputs.tiled()
        with trace_memory() as trace:
            logps.sum().backward()
        peaks.append(trace.peak_bytes / (4 * n * vocab))
    assert peaks[0] < 6 / tiles, "0.31 was measured; with a node for each output the tiles kept 2.2"
    assert peaks[1] > 3, "control"


def test_the_default_tile_holds_no_long_response_over_a_large_vocabulary():
    assert operator.MAX_TILE_ELEMENTS // 248_320 == 135
    assert operator.MAX_TILE_ELEMENTS * 4 == 128 * 2**20
