"""Decoding in memory of a fixed size gives the tokens of the growing one. Recording a step as a graph needs CUDA; what
runs here is the step that would be recorded.
"""

from contextlib import nullcontext

import pytest
import torch
from test_sampling import MODELS, N_NEW, make, open_session, stock_rows, tokens
from transformers import GenerationConfig

from longstraw_sdk import ConfigurationError
from longstraw_sdk.adapter import StateView
from longstraw_sdk.hf import decode
from longstraw_sdk.hf.cache import KVLayer, RecurrentLayer
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.ops import decode_attention


@pytest.fixture
def fixed(monkeypatch):
    """Sessions decode in fixed memory; the list gets the `Steps` of each generation."""
    steps = []

    class Noted(decode.Steps):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            steps.append(self)

    monkeypatch.setattr(decode, "Steps", Noted)
    monkeypatch.setattr(
        decode, "recorded_steps", lambda model, cache, n_new: decode.fixed_steps(model, cache, n_new, record=False)
    )
    return steps


@pytest.mark.parametrize(("architecture", "n_layers"), MODELS)
@pytest.mark.parametrize("n_prompt", [1, 2, 30])
def test_rows_equal_what_generate_draws(fixed, architecture, n_layers, n_prompt):
    model, prompt = make(architecture, n_layers), tokens(n_prompt)
    torch.manual_seed(5)
    expected = stock_rows(model, prompt, 4, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    assert len({tuple(row.tolist()) for row in expected}) == 4, "control: rows differ from each other"
    with open_session(model, verify_content=True) as session, session.capture(prompt) as prefix:
        for _ in range(2):  # the witness would find a write into the prompt's own state
            rows = prefix.sample(4, max_new_tokens=N_NEW, seed=5)
            assert torch.equal(torch.stack(rows), expected)
        alone = prefix.sample(1, max_new_tokens=N_NEW, temperature=0)
        prefix.score(alone)
    assert torch.equal(alone[0], stock_rows(model, prompt, 1, do_sample=False)[0])
    assert len(fixed) == 3 and "forward" not in vars(base_model_of(model).base_model)


def wrong_row(self, rows, key_states, value_states):
    return WRITE(self, rows._replace(done=rows.done * 0), key_states, value_states)


def wrong_mask(query, key, value, view, scale, last):
    return decode_attention(query, key, value, view, scale, last * 0)


def wrong_state(self, states, *args, **options):
    return states if self.in_place else UPDATE(self, states, *args, **options)


WRITE, UPDATE = KVLayer._write, RecurrentLayer.update_recurrent_state


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("longstraw_sdk.hf.cache.KVLayer._write", wrong_row),
        ("longstraw_sdk.hf.attention.decode_attention", wrong_mask),
        ("longstraw_sdk.hf.cache.RecurrentLayer.update_recurrent_state", wrong_state),
    ],
)
def test_controls_a_wrong_step_draws_other_tokens(fixed, monkeypatch, place, wrong):
    model, prompt = make("qwen36", 4), tokens(1)
    torch.manual_seed(5)
    expected = stock_rows(model, prompt, 4, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    monkeypatch.setattr(place, wrong)
    with open_session(model) as session, session.capture(prompt) as prefix:
        rows = prefix.sample(4, max_new_tokens=N_NEW, seed=5)
    assert not torch.equal(torch.stack(rows), expected)


def test_memory_and_places_stay_from_the_second_step_on(fixed):
    model, prompt = make("qwen36", 4), tokens(30)
    places = []
    with open_session(model) as session, session.capture(prompt) as prefix:

        def note(module, args, kwargs, output):
            layers = kwargs["cache"].layers
            kept = [t for layer in layers for t in tensors_of(layer)]
            places.append([(t.data_ptr(), t.shape) for t in kept])

        hook = base_model_of(model).base_model.register_forward_hook(note, with_kwargs=True)
        prefix.sample(2, max_new_tokens=N_NEW, temperature=0)
        hook.remove()
    assert len(places) == N_NEW and len(places[0]) == 2 + 3 * 2
    assert all(later == places[0] for later in places[1:])


def tensors_of(layer):
    if isinstance(layer, KVLayer):
        assert layer.keys.shape[2] == N_NEW
        return [layer.keys, layer.values]
    return [layer.conv_states[0], layer.recurrent_states[0]]


def test_reasons(monkeypatch):
    model, prompt = make("llama", 2), tokens(9)
    base = base_model_of(model)
    monkeypatch.setenv(decode.VARIABLE, "fast")
    with pytest.raises(ConfigurationError, match="LONGSTRAW_DECODE='fast' is not known; allowed: eager, graph"):
        open_session(model)
    monkeypatch.delenv(decode.VARIABLE)
    assert decode.why_no_graph(base, None, 100) == "graphs need CUDA, not cpu"
    with open_session(model) as session, session.capture(prompt) as prefix:
        cache = session.adapter.generation_cache(base, StateView(prefix._state, prefix._state.last_boundary, n_rows=2))
        assert decode.why_not_fixed(base, cache) is None
        assert "only layers of keys and values" in decode.why_not_fixed(base, object())
        monkeypatch.setattr(base.base_model, "forward", base.base_model.forward)
        assert "replaced the decoder's forward" in decode.why_not_fixed(base, cache)


def test_sparse_latent_layers_decode_step_by_step():
    model = make("glm52", 2)
    with open_session(model) as session, session.capture(tokens(9)) as prefix:
        view = StateView(prefix._state, prefix._state.last_boundary, n_rows=2)
        cache = session.adapter.generation_cache(base_model_of(model), view)
        assert "only layers of keys and values" in decode.why_not_fixed(base_model_of(model), cache)


def test_a_graph_that_was_asked_for_and_cannot_be_is_said(monkeypatch, caplog):
    monkeypatch.setenv(decode.VARIABLE, "graph")
    with open_session(make("llama", 2)) as session, session.capture(tokens(9)) as prefix:
        prefix.sample(1, max_new_tokens=2)
    assert "LONGSTRAW_DECODE='graph', but decoding step by step, because graphs need CUDA, not cpu" in caplog.text


def test_another_cache_of_the_same_generation_goes_past_the_steps(fixed):
    """Classifier-free guidance runs the model a second time with a cache of its own."""
    model, prompt = make("llama", 2), tokens(9)
    config = GenerationConfig(max_new_tokens=N_NEW, do_sample=False, guidance_scale=3.0, pad_token_id=0)
    expected = model.generate(input_ids=prompt[None], generation_config=config)[0, len(prompt) :]
    with open_session(model) as session, session.capture(prompt) as prefix:
        [row] = prefix.generate(1, config)
    assert torch.equal(row, expected)
    assert not torch.equal(expected, stock_rows(model, prompt, 1, do_sample=False)[0]), "control: guidance matters"


def test_a_step_that_cannot_be_recorded_runs_by_itself(fixed, monkeypatch, caplog):
    model, prompt = make("qwen36", 4), tokens(30)
    expected = stock_rows(model, prompt, 1, do_sample=False)[0]
    monkeypatch.setattr(
        decode, "recorded_steps", lambda model, cache, n_new: decode.fixed_steps(model, cache, n_new, record=True)
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def refuse(*args, **options):
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    with open_session(model) as session, session.capture(prompt) as prefix:
        [row] = prefix.sample(1, max_new_tokens=N_NEW, temperature=0)
    assert torch.equal(row, expected)
    assert caplog.text.count("a step could not be recorded") == 1
