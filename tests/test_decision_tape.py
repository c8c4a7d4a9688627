"""The decision tape: passes over the same tokens choose the same experts and the same selected tokens."""

import pytest
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.evidence.parity import ParityCase, check_parity
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.models.glm52 import GLM52Adapter
from longstraw_sdk.models.glm52.tape import DecisionTape, chain_keys


@pytest.fixture(scope="module")
def model():
    return tiny_model("glm52", n_layers=6)


def prompt_and_rows():
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randint(2, 97, (60,), generator=generator),
        [torch.randint(2, 97, (n,), generator=generator) for n in (9, 1, 5)],
    )


@pytest.mark.parametrize(
    "mode",
    [
        {},
        pytest.param({"gradient_scope": "response"}, marks=pytest.mark.slow),
        pytest.param({"prefix_adapter": "frozen"}, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_with_the_tape_is_as_exact_as_conventional_bfloat16(model, mode):
    adapter = GLM52Adapter(tape="replay")
    result = check_parity(model, ParityCase("bfloat16", **mode), adapter)
    assert result.passed and result.cosine > 0.999, result
    assert 0 < adapter.metrics()["flip_rate_selection"] < 0.3
    assert 0 < adapter.metrics()["flip_rate_experts"] < 0.3


@pytest.mark.slow
def test_bfloat16_without_the_tape_flips_choices_and_loses_the_gradient(model):
    adapter = GLM52Adapter(tape="record")
    result = check_parity(model, ParityCase("bfloat16"), adapter)
    assert result.cosine < 0.99
    assert adapter.metrics()["flip_rate_experts"] > 0.01


def test_float32_parity_holds_with_checkpointing_and_packing_on_the_tape(model):
    case = ParityCase(replay_tokens=64, chunk_tokens=13, gradient_checkpointing=True)
    adapter = GLM52Adapter(tape="replay")
    assert check_parity(model, case, adapter).passed
    assert adapter.metrics() == {"flip_rate_selection": 0.0, "flip_rate_experts": 0.0}


def test_every_pass_finds_the_entries_of_the_passes_before_it(model):
    prompt, _ = prompt_and_rows()
    adapter = GLM52Adapter(tape="replay")
    with LongStrawSession(model, adapter, chunk_tokens=13, page_tokens=16, probe=False) as session:
        with session.capture(prompt) as prefix:
            assert adapter.tape.n_tokens == 59
            rows = prefix.sample(3, max_new_tokens=6, seed=0)
            n_tokens, n_bytes = adapter.tape.n_tokens, adapter.tape.n_bytes
            assert 59 < n_tokens <= 59 + 1 + 3 * 5 and n_bytes > 0
            prefix.score(rows)
            torch.stack([out.logps.sum() for out in prefix.replay_packed(rows)]).sum().backward()
        session.finalize()
        with session.capture(prompt):
            pass
    assert adapter.tape.n_tokens == n_tokens
    adapter.forget()
    assert (adapter.tape.n_tokens, adapter.tape.n_bytes, adapter.metrics()) == (0, 0, {})


def test_replay_takes_what_is_on_the_tape_and_record_does_not(model):
    prompt, rows = prompt_and_rows()
    scores = {}
    for mode in ("off", "record", "replay"):
        adapter = GLM52Adapter(tape=mode)
        with LongStrawSession(model, adapter, probe=False) as session, session.capture(prompt) as prefix:
            scores[mode] = [prefix.score(rows)[0]]
            for name, table in adapter.tape._tables.items():
                if name.startswith("experts"):
                    table[table >= 0] = (table[table >= 0] + 1) % 8
            scores[mode].append(prefix.score(rows)[0])
            rates = adapter.metrics()
    assert torch.equal(*scores["off"]) and torch.equal(*scores["record"])
    assert (scores["replay"][0] - scores["replay"][1]).abs().max() > 1e-3
    assert rates["flip_rate_experts"] > 0.0


def test_a_stock_forward_takes_the_choices_only_inside_of_reference(model):
    prompt, rows = prompt_and_rows()
    ids = torch.cat([prompt, rows[0]])
    adapter = GLM52Adapter(tape="replay")
    with LongStrawSession(model, adapter, probe=False) as session, session.capture(prompt) as prefix, torch.no_grad():
        prefix.score(rows)
        base = model.get_base_model()
        stock = base(input_ids=ids[None], use_cache=False).logits
        with adapter.reference(base, ids):
            agreed = base(input_ids=ids[None], use_cache=False).logits
        torch.testing.assert_close(agreed, stock, rtol=0, atol=1e-5)
        for name, table in adapter.tape._tables.items():
            if name.startswith("selection"):
                table[:, -8:] = 0
        with adapter.reference(base, ids):
            assert (base(input_ids=ids[None], use_cache=False).logits - stock).abs().max() > 1e-3
        assert torch.equal(base(input_ids=ids[None], use_cache=False).logits, stock)


def test_keys_depend_on_all_tokens_before_and_continue():
    whole = chain_keys(0, [4, 5, 6])
    assert chain_keys(whole[0], [5, 6]) == whole[1:]
    assert chain_keys(0, [9, 5, 6])[-1] != whole[-1] and len({*whole}) == 3


def test_tables_grow_in_rows_and_in_width():
    tape = DecisionTape("replay")
    first = tape.open_pass([0], torch.tensor([[1, 2]]))
    own = torch.tensor([[[0], [1]]])
    assert torch.equal(first.decide("selection", 0, own), own)
    longer = tape.open_pass([0], torch.tensor([[1, 2, 3]]))
    wider = torch.tensor([[[0, 7], [1, 7], [1, 2]]])
    taken = longer.decide("selection", 0, wider)
    assert taken.tolist() == [[[-1, 0], [-1, 1], [1, 2]]]
    assert tape.flip_rates() == {"selection": 1.0}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigurationError, match=r"tape='on'.*'replay'"):
        GLM52Adapter(tape="on")
