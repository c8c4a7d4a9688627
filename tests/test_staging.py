"""Pages in host memory: the same bits as beside the model, copied while the layer before computes."""

import threading
import time

import pytest
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.state import Placement

CPU = torch.device("cpu")
SECONDS_PER_COPY = 0.1


class SimulatedLink:
    """Copies in a thread that takes its time, and writes down when each layer's copies began and were waited for."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.events = []
        self.n_copied = 0

    def start(self, layer, pages):
        self.events.append(("start", layer))
        copies = {}

        def copy():
            time.sleep(self.seconds)
            copies.update({name: torch.cat([page[name] for page in pages]) for name in pages[0]})

        thread = threading.Thread(target=copy)
        thread.start()

        def wait():
            thread.join()
            self.events.append(("wait", layer))
            self.n_copied += len(pages)
            return copies

        return wait


def run(model, link, checkpointing=False):
    """Log-probs and LoRA gradients of two packed responses, with pages behind `link` if there is one."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 97, (70,), generator=generator)
    rows = [torch.randint(2, 97, (n,), generator=generator) for n in (5, 1, 9)]
    with LongStrawSession(model, chunk_tokens=32, page_tokens=8, replay_tokens=16, poison=True) as session:
        if link is not None:
            session._core.placement = Placement(CPU, link)
        with session.capture(prompt) as prefix:
            sampled = prefix.sample(2, max_new_tokens=4, seed=0)
            outs = prefix.replay_packed(rows)
            torch.stack([(out.logps * torch.arange(1, len(out.logps) + 1)).sum() for out in outs]).sum().backward()
        session.finalize()
        assert session.pool.audit() == [] and session.pool.live_bytes == 0
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return sampled, [out.logps.detach() for out in outs], gradients


@pytest.mark.parametrize("architecture", ["glm52", "qwen36", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_staged_pages_give_the_bits_of_resident_pages(architecture, checkpointing):
    model = tiny_model(architecture, n_layers=4)
    link = SimulatedLink()
    wanted, found = run(model, None, checkpointing), run(model, link, checkpointing)
    assert link.n_copied > 0
    for a, b in zip(wanted[0] + wanted[1], found[0] + found[1], strict=True):
        assert torch.equal(a, b)
    assert wanted[2].keys() == found[2].keys() and len(found[2]) > 8
    for name, gradient in wanted[2].items():
        assert torch.equal(gradient, found[2][name]), name


def test_wrong_copies_are_seen():
    class Corrupting(SimulatedLink):
        def start(self, layer, pages):
            return super().start(layer, [{n: t + (layer == 2) for n, t in page.items()} for page in pages])

    model = tiny_model("llama", n_layers=4)
    wanted, found = run(model, None), run(model, Corrupting())
    assert not torch.equal(wanted[1][0], found[1][0])


def test_the_next_layer_is_copied_while_this_one_computes():
    model = tiny_model("glm52", n_layers=4)
    layers = model.get_base_model().model.layers
    link = SimulatedLink(SECONDS_PER_COPY)

    def computes(layer):
        def hook(module, args, output):
            time.sleep(SECONDS_PER_COPY)
            link.events.append(("computed", layer))

        return hook

    handles = [layer.register_forward_hook(computes(i)) for i, layer in enumerate(layers)]
    with LongStrawSession(model, chunk_tokens=64, page_tokens=8, probe=False) as session:
        session._core.placement = Placement(CPU, link)
        seconds = []
        for _ in range(3):  # other processes may disturb one
            with session.capture(torch.arange(2, 70)) as prefix:
                link.events.clear()
                began = time.perf_counter()
                prefix.score([torch.tensor([5, 6, 7])])
                seconds.append(time.perf_counter() - began)
    for handle in handles:
        handle.remove()
    for layer in range(len(layers) - 1):
        assert link.events.index(("start", layer + 1)) < link.events.index(("computed", layer))
    # A link that copies a layer only when it is asked for would take both times for every layer.
    assert min(seconds) < 2 * len(layers) * SECONDS_PER_COPY


def test_appending_a_chunk_discards_copies_of_the_pages_before_it():
    model = tiny_model("llama", n_layers=2)
    link = SimulatedLink()
    with LongStrawSession(model, chunk_tokens=8, page_tokens=32, probe=False) as session:
        reference = session.capture(torch.arange(2, 30)).score([torch.tensor([4, 5])])[0]
        session._core.placement = Placement(CPU, link)
        assert torch.equal(session.capture(torch.arange(2, 30)).score([torch.tensor([4, 5])])[0], reference)
