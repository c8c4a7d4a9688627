"""Pages in host memory: the same bits as beside the model, copied while the layer before computes."""

import threading
import time

import pytest
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk import session as session_module
from longstraw_sdk.capture import _bytes_of
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.state import Placement, cuda_room
from longstraw_sdk.state.staging import spread_over_host

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


def run(model, link, checkpointing=False, room=None):
    """Log-probs and LoRA gradients of packed responses; pages for which there is no `room` are behind `link`."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 97, (70,), generator=generator)
    rows = [torch.randint(2, 97, (n,), generator=generator) for n in (5, 1, 9)]
    with LongStrawSession(model, chunk_tokens=32, page_tokens=8, replay_tokens=16, poison=True) as session:
        if link is not None:
            session._core.placement = Placement(CPU, link, room)
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


SIZES = dict.fromkeys(range(8), (100, 50))


@pytest.mark.parametrize(
    ("room", "away"),
    [
        (1200, set()),
        (1199, {0, 4}),  # one away: 1,050 and its visits 250; two: 900 and 250
        (1000, {0, 2, 5}),
        (400, {0, 1, 2, 3, 4, 5, 6}),
        (399, set(range(8))),
        (-5, set(range(8))),
    ],
)
def test_no_more_layers_leave_the_device_than_must(room, away):
    assert spread_over_host(SIZES, room) == away


def test_layers_that_leave_are_evenly_spread():
    for room in range(400, 1200, 7):
        away = sorted(spread_over_host(SIZES, room))
        steps = [b - a for a, b in zip(away, [*away[1:], away[0] + len(SIZES)], strict=True)]
        assert max(steps) - min(steps) <= 1
        kept = sum(sum(n) for layer, n in SIZES.items() if layer not in away)
        assert kept + 2 * 100 + 50 <= room


def test_without_a_bound_all_layers_are_away_and_without_a_link_none():
    assert Placement(CPU).host_layers(SIZES, 0) == set()
    assert Placement(CPU, SimulatedLink()).host_layers(SIZES, 0) == set(SIZES)
    bounded = Placement(CPU, SimulatedLink(), lambda: 1300)
    assert bounded.host_layers(SIZES, 100) == set()
    assert bounded.host_layers(SIZES, 101) == {0, 4}, "recurrent states take room too"


@pytest.mark.parametrize("architecture", ["glm52", "qwen36", "llama"])
def test_a_prompt_of_which_a_part_is_away_gives_the_same_bits(architecture, caplog):
    model = tiny_model(architecture, n_layers=16 if architecture == "qwen36" else 4)  # four that attend
    with LongStrawSession(model, chunk_tokens=32, page_tokens=8, probe=False) as session:
        sizes, others = _bytes_of(session.bound.specs, 69, 8, 3)
    link = SimulatedLink()
    with caplog.at_level("INFO", "longstraw_sdk.capture"):
        found = run(model, link, room=lambda: sum(map(sum, sizes.values())) + others - 1)
    visited = {layer for _, layer in link.events}
    assert 0 < len(visited) < len(sizes)
    assert f"pages of {len(visited)} of {len(sizes)} layers live in host memory" in caplog.text
    for a, b in zip(run(model, None)[:2], found[:2], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for name, gradient in run(model, None)[2].items():
        assert torch.equal(gradient, found[2][name]), name


def test_bytes_are_those_that_a_state_takes():
    model = tiny_model("qwen36", n_layers=4)
    with LongStrawSession(model, chunk_tokens=32, page_tokens=8, probe=False) as session:
        prefix = session.capture(torch.arange(2, 72) % 90)
        sizes, others = _bytes_of(session.bound.specs, prefix.n_tokens - 1, 8, 3)
        assert prefix.n_bytes == sum(pages for pages, _ in sizes.values()) + others
        prefix.replay(torch.tensor([5, 6, 7])).logps.sum().backward()
        paged = prefix._state.paged[3, "kv"]
        assert paged.n_bytes == sum(sizes[3])
        session._core.needs_finalize = False
        prefix.release()


def test_auto_asks_the_device_for_its_room(monkeypatch):
    monkeypatch.setattr(session_module, "CudaLink", lambda device: SimulatedLink())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60 * 2**30)
    gpu = torch.device("cuda")
    for scope, left in (("response", 44), ("full", 40)):
        auto = session_module._placement("auto", gpu, scope)
        assert auto.device == CPU and auto.link is not None and auto.room() == left * 2**30
    assert cuda_room(gpu, 0) == 50 * 2**30, "what the device has free and what PyTorch holds unused"
    assert session_module._placement("cpu", gpu, "full").room is None
    assert session_module._placement("cuda", gpu, "full").link is None
    assert session_module._placement("auto", CPU, "full").link is None
