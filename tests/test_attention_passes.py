"""How often attention runs: once per layer though checkpointed layers run twice, and not where a state is filled."""

import gc
import weakref

import pytest
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.hf import cache as cache_module
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.glm52 import GLM52Adapter
from longstraw_sdk.models.glm52 import attention as glm52_attention
from longstraw_sdk.models.glm52.cache import LatentLayer
from longstraw_sdk.ops import Recall
from longstraw_sdk.ops.attention_reference import ReferenceAttention

PROMPT = torch.arange(3, 44)
ROW = torch.arange(5, 14)
N_CHUNKS = 3  # of 16 tokens
N_SELECTING = 2  # of four layers
NOTHING = property(lambda self: None, lambda self, value: None)


@pytest.fixture
def calls(monkeypatch):
    """Grows by the number of new tokens with every call of causal attention."""
    found = []
    stock = ReferenceAttention.attend_causally

    def counted(self, q, k, v, scale):
        found.append(q.shape[3])
        return stock(self, q, k, v, scale)

    monkeypatch.setattr(ReferenceAttention, "attend_causally", counted)
    return found


def open_session(architecture, *, checkpointing=True, **options):
    model = tiny_model(architecture).train()
    if checkpointing:
        base_model_of(model).activation_checkpointing_enable({"use_reentrant": False})
    return model, LongStrawSession(model, chunk_tokens=16, page_tokens=8, probe=False, **options)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


ATTENDING = {"llama": 4, "qwen36": 1}


@pytest.mark.parametrize("architecture", ATTENDING)
def test_a_checkpointed_layer_attends_once(calls, monkeypatch, architecture):
    gradients = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(Recall, "take", lambda self: None)
        model, session = open_session(architecture)
        with session, session.capture(PROMPT) as prefix:
            calls.clear()
            prefix.replay(ROW).logps.sum().backward()
            assert calls == [len(ROW)] * ATTENDING[architecture] * (1 if known else 2), "control: without it, twice"
            calls.clear()
            prefix.sweep()
            last_skipped = ATTENDING[architecture] - 1
            assert len(calls) == last_skipped * N_CHUNKS * (1 if known else 2)
        gradients.append(gradient(model))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("architecture", ATTENDING)
def test_the_last_attention_of_a_filled_state_is_skipped(calls, architecture):
    _, session = open_session(architecture, checkpointing=False)
    with session:
        prefix = session.capture(PROMPT)
        assert calls == [n for n in (16, 16, 8) for _ in range(ATTENDING[architecture] - 1)]
        calls.clear()
        prefix.score([ROW])
        assert calls == [len(ROW)] * ATTENDING[architecture]
        prefix.release()


def test_a_second_backward_attends_again(calls):
    model, session = open_session("llama", gradient_scope="response")
    with session, session.capture(PROMPT) as prefix:
        loss = prefix.replay(ROW).logps.sum()
        loss.backward(retain_graph=True)
        once = gradient(model)
        calls.clear()
        loss.backward()
        assert len(calls) == ATTENDING["llama"]
        assert relative_l2(gradient(model), 2 * once) < 1e-6


def test_what_is_kept_dies_with_the_graph(monkeypatch):
    kept = []

    class Watched(Recall):
        def __init__(self):
            super().__init__()
            kept.append(weakref.ref(self))

    monkeypatch.setattr(cache_module, "Recall", Watched)
    _, session = open_session("llama")
    with session, session.capture(PROMPT) as prefix:
        kept.clear()
        gc.collect()
        gc.disable()  # a cycle would live until the next collection
        try:
            loss = prefix.replay(ROW).logps.sum()
            assert all(ref() is not None and ref()._found is not None for ref in kept)
            loss.backward()
            assert all(ref() is None or ref()._found is None for ref in kept)
            del loss
            assert [ref() for ref in kept] == [None] * ATTENDING["llama"]
        finally:
            gc.enable()


@pytest.mark.parametrize("tape", ["off", "replay"])
def test_a_checkpointed_layer_selects_once(monkeypatch, tape):
    selected = []
    select = glm52_attention.select_top_k
    monkeypatch.setattr(glm52_attention, "select_top_k", lambda *a: selected.append(1) or select(*a))
    gradients = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(LatentLayer, "selected", NOTHING, raising=False)
        model, session = open_session("glm52", adapter=GLM52Adapter(tape=tape))
        with session, session.capture(PROMPT) as prefix:
            selected.clear()
            prefix.replay(ROW).logps.sum().backward()
            assert len(selected) == N_SELECTING * (1 if known else 2), "control: without it, twice"
            selected.clear()
            prefix.sweep()
            assert len(selected) == N_SELECTING * N_CHUNKS * (1 if known else 2)
        gradients.append(gradient(model))
    assert torch.equal(*gradients)
