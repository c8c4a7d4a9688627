"""Memory: what a replay holds does not grow with the prompt or the group; conventional training's does."""

import pytest
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.bench.sparse_memory import one_sparse_layer, resident_layer, stock_layer
from longstraw_sdk.evidence.memory import trace_memory
from longstraw_sdk.evidence.tiny import tiny_model

CHUNK = 64


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen36", max_position_embeddings=8192)


def draw(n):
    return torch.randint(0, 97, (n,))


def group(model, n_prompt, n_rows, scope, n_response=16):
    """(bytes a live replay holds, peak bytes of the group, bytes resident after capture)."""
    rows = [draw(n_response) for _ in range(n_rows)]
    with LongStrawSession(model, chunk_tokens=CHUNK, page_tokens=CHUNK, gradient_scope=scope) as session:
        prompt = draw(n_prompt)
        for parameter in model.parameters():  # their allocation must not depend on the order of runs
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        with trace_memory() as trace, session.capture(prompt) as prefix:
            resident = trace.live_bytes
            held = []
            for row in rows:
                before = trace.live_bytes
                out = prefix.replay(row)
                held.append(trace.live_bytes - before)
                out.logps.sum().backward()
                del out
        return max(held), trace.peak_bytes, resident


@pytest.mark.parametrize("scope", ["response", pytest.param("full", marks=pytest.mark.slow)])
def test_live_bytes_of_a_replay_are_flat_in_prompt_and_group(model, scope):
    held = {(p, g): group(model, p, g, scope)[0] for p, g in [(101, 2), (801, 2), (3201, 2), (801, 8)]}
    assert max(held.values()) <= 1.01 * min(held.values()), held


@pytest.mark.parametrize("scope", ["response", "full"])
def test_peak_of_eight_members_is_within_one_percent_of_two(model, scope):
    two, eight = (group(model, 801, n, scope)[1] for n in (2, 8))
    assert eight <= 1.01 * two


def test_peak_grows_with_the_prompt_only_by_the_resident_state(model):
    """Response scope: beyond the state itself (and one chunk's score tile), nothing is kept."""
    short, long = group(model, 641, 2, "response"), group(model, 5121, 2, "response")
    assert long[2] > 4 * short[2]
    assert long[1] - short[1] <= 1.1 * (long[2] - short[2])


def test_control_conventional_training_grows_with_the_prompt(model):
    held = {}
    for n_prompt in (101, 801):
        ids = torch.cat([draw(n_prompt), draw(16)])[None]
        with trace_memory() as trace:
            loss = model(input_ids=ids, use_cache=False).logits[0, -17:-1].float().sum()
            held[n_prompt] = trace.live_bytes
            del loss
    assert held[801] > 4 * held[101]


def test_trace_counts_what_lives_and_forgets_what_died():
    with trace_memory() as trace:
        kept = torch.zeros(1000)
        with trace.phase("work"):
            temporary = kept + 1
            view = temporary.view(10, 100)
            assert trace.live_bytes == 8000
            del temporary, view
        assert trace.live_bytes == 4000
    assert trace.peak_bytes == trace.peak_by_phase["work"] == 8000
    del kept


def sweep_peak(n_layers, *, checkpointing):
    deep = tiny_model("qwen36", n_layers=n_layers, max_position_embeddings=1024).train()
    if checkpointing:
        deep.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    for parameter in deep.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with LongStrawSession(deep, chunk_tokens=256, page_tokens=256) as session, session.capture(draw(513)) as prefix:
        prefix.replay(draw(8)).logps.sum().backward()
        with trace_memory() as trace:
            prefix.sweep()
    return trace.peak_bytes


@pytest.mark.slow
def test_sweep_of_a_checkpointed_model_keeps_no_recomputed_layer():
    """Twelve more layers add their inputs and the chunk's own state, not their activations (0.03 of them measured)."""
    added = {on: sweep_peak(28, checkpointing=on) - sweep_peak(16, checkpointing=on) for on in (False, True)}
    assert added[True] <= 0.05 * added[False], added


# --- One sparse layer behind ever longer prompts ---


@pytest.fixture(scope="module")
def sparse_model():
    return one_sparse_layer()


def test_a_sparse_layer_needs_as_much_behind_256k_tokens_as_behind_16k(sparse_model):
    short, long = (resident_layer(sparse_model, n).peak_bytes for n in (2**14, 2**18))
    assert long <= 1.2 * short, (short, long)
    stock_short, stock_long = (stock_layer(sparse_model, n).peak_bytes for n in (2**12, 2**14))
    assert stock_long > 3 * stock_short, "control: the stock layer grows with the prompt"
    assert stock_long > 3 * short
