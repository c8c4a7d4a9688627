"""Sampling from resident state gives the tokens that `model.generate` gives, without a copy of the prompt per row."""

import pytest
import torch
from tensor_sizes import LargestOutput
from transformers import GenerationConfig

from longstraw_sdk import ConfigurationError, LongStrawSession, StaleStateError
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of

VOCAB = 97
N_NEW = 12
MODELS = [("qwen36", 4), ("llama", 2)]


def tokens(n, seed=0):
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def make(architecture, n_layers, eos=None):
    """A tiny model whose next token depends on what came before: tiny weights alone would nearly repeat one token."""
    model = tiny_model(architecture, n_layers=n_layers)
    with torch.no_grad():
        base_model_of(model).get_output_embeddings().weight.mul_(20)
    base_model_of(model).generation_config.eos_token_id = eos
    return model


def open_session(model, **options):
    return LongStrawSession(model, **{"chunk_tokens": 8, "page_tokens": 4, "poison": True, **options})


def stock_rows(model, prompt, n_rows, **options):
    """Rows [n_rows, R] of `model.generate` for a batch of the repeated prompt."""
    config = GenerationConfig(max_new_tokens=N_NEW, pad_token_id=0, **options)
    batch = prompt.expand(n_rows, -1)
    out = model.generate(input_ids=batch, attention_mask=torch.ones_like(batch), generation_config=config)
    return out[:, len(prompt) :]


def cut(row, eos):
    """`row` up to and including its first end token."""
    ends = [i for i, token in enumerate(row.tolist()) if token in eos]
    return row[: ends[0] + 1] if ends else row


@pytest.mark.parametrize(("architecture", "n_layers"), MODELS)
@pytest.mark.parametrize("n_prompt", [1, 2, 30])
def test_greedy_rows_equal_generate(architecture, n_layers, n_prompt):
    model, prompt = make(architecture, n_layers), tokens(n_prompt)
    expected = stock_rows(model, prompt, 1, do_sample=False)[0]
    assert len(set(expected.tolist())) > 2, "control: the continuation is no constant"
    with open_session(model) as session, session.capture(prompt) as prefix:
        rows = prefix.sample(3, max_new_tokens=N_NEW, temperature=0)
    assert [row.tolist() for row in rows] == [expected.tolist()] * 3
    assert all(row.dtype == torch.long and row.dim() == 1 for row in rows)


@pytest.mark.parametrize(("architecture", "n_layers"), MODELS)
def test_greedy_rows_equal_generate_in_training_with_checkpointing(architecture, n_layers):
    model, prompt = make(architecture, n_layers), tokens(30)
    expected = stock_rows(model, prompt, 1, do_sample=False)[0]
    base_model_of(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with open_session(model) as session, session.capture(prompt) as prefix:
        rows = prefix.sample(2, max_new_tokens=N_NEW, temperature=0)
        assert [row.tolist() for row in rows] == [expected.tolist()] * 2
        assert model.training


@pytest.mark.parametrize(("architecture", "n_layers"), MODELS)
@pytest.mark.parametrize("n_prompt", [1, 2, 30])
def test_seeded_rows_equal_what_generate_draws_for_the_repeated_prompt(architecture, n_layers, n_prompt):
    model, prompt = make(architecture, n_layers), tokens(n_prompt)
    torch.manual_seed(5)
    expected = stock_rows(model, prompt, 4, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    assert len({tuple(row.tolist()) for row in expected}) == 4, "control: rows differ from each other"
    with open_session(model) as session, session.capture(prompt) as prefix:
        rows = prefix.sample(4, max_new_tokens=N_NEW, seed=5)
        assert torch.equal(torch.stack(rows), expected)
        torch.manual_seed(5)
        assert torch.equal(torch.stack(prefix.sample(4, max_new_tokens=N_NEW)), expected)
        assert not torch.equal(torch.stack(prefix.sample(4, max_new_tokens=N_NEW, seed=6)), expected)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}], ids=str)
def test_restricted_draws_equal_generate(options):
    model, prompt = make("llama", 2), tokens(20)
    torch.manual_seed(5)
    whole = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    expected = stock_rows(model, prompt, 4, do_sample=True, **(whole | options))
    with open_session(model) as session, session.capture(prompt) as prefix:
        assert torch.equal(torch.stack(prefix.sample(4, max_new_tokens=N_NEW, seed=5, **options)), expected)
        assert not torch.equal(torch.stack(prefix.sample(4, max_new_tokens=N_NEW, seed=5)), expected), "control"


def test_session_temperature_is_the_default():
    model, prompt = make("llama", 2), tokens(20)
    with open_session(model, temperature=0.5) as session, session.capture(prompt) as prefix:
        rows = torch.stack(prefix.sample(4, max_new_tokens=N_NEW, seed=5))
        assert torch.equal(rows, torch.stack(prefix.sample(4, max_new_tokens=N_NEW, seed=5, temperature=0.5)))
        assert not torch.equal(rows, torch.stack(prefix.sample(4, max_new_tokens=N_NEW, seed=5, temperature=1.0)))


@pytest.mark.parametrize("eos", [list(range(20)), 7], ids=["list", "int"])
def test_rows_end_with_their_first_end_token(eos):
    ids = eos if isinstance(eos, list) else [eos]
    model, prompt = make("qwen36", 4, eos), tokens(9)
    torch.manual_seed(5)
    stock = stock_rows(model, prompt, 8, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=eos)
    with open_session(model) as session, session.capture(prompt) as prefix:
        rows = prefix.sample(8, max_new_tokens=N_NEW, seed=5)
    assert [row.tolist() for row in rows] == [cut(row, ids).tolist() for row in stock]
    for row in rows:
        assert not set(row[:-1].tolist()) & set(ids)
        assert len(row) == N_NEW or row[-1] in ids
    if isinstance(eos, list):
        assert len({len(row) for row in rows}) > 1, "control: rows end at different places"


def test_a_seed_leaves_the_global_random_state_alone():
    with open_session(make("llama", 2)) as session, session.capture(tokens(9)) as prefix:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        prefix.sample(2, max_new_tokens=3, seed=5)
        assert torch.equal(torch.get_rng_state(), before)
        prefix.sample(2, max_new_tokens=3)
        assert not torch.equal(torch.get_rng_state(), before), "control: without a seed it is drawn from"


@pytest.mark.parametrize(("architecture", "n_layers"), MODELS)
def test_the_resident_pages_are_not_copied_per_row(architecture, n_layers):
    model, prompt = make(architecture, n_layers), tokens(400)
    prompt_keys = 2 * 400 * 16  # of one row in one layer
    with LargestOutput() as stock:
        stock_rows(model, prompt, 8, do_sample=False)
    with open_session(model, chunk_tokens=64, page_tokens=32) as session, session.capture(prompt) as prefix:
        live_bytes, n_bytes, seen = session.pool.live_bytes, prefix.n_bytes, set()
        hook = session.bound.base.register_forward_hook(
            lambda *_: seen.add((session.pool.live_bytes, prefix.n_bytes)) or None
        )
        with LargestOutput() as ours:
            prefix.sample(8, max_new_tokens=N_NEW, temperature=0)
        hook.remove()
        assert seen == {(live_bytes, n_bytes)}
        assert session.pool.peak_bytes == live_bytes
        assert session.pool.audit() == []
    assert ours.n_elements < prompt_keys, "not even one row's keys are materialised"
    assert stock.n_elements >= 8 * prompt_keys, "control: generate repeats them"


def test_sampling_leaves_the_state_as_it_was():
    with open_session(make("qwen36", 4), verify_content=True) as session, session.capture(tokens(20)) as prefix:
        before = prefix.score([tokens(5, 1)])[0]
        first = prefix.sample(3, max_new_tokens=N_NEW, seed=5)
        assert torch.equal(prefix.score([tokens(5, 1)])[0], before)
        assert torch.equal(torch.stack(prefix.sample(3, max_new_tokens=N_NEW, seed=5)), torch.stack(first))


def test_sampled_log_probs_are_those_that_score_returns():
    """What decoding drew from is what training scores: same state, same temperature."""
    with open_session(make("qwen36", 4), temperature=0.7) as session, session.capture(tokens(20)) as prefix:
        config = GenerationConfig(
            max_new_tokens=N_NEW,
            do_sample=True,
            temperature=0.7,
            top_k=0,
            pad_token_id=0,
        )
        drawn = []

        def record(module, args, output):
            drawn.append(torch.log_softmax(output.logits[:, -1].float() / 0.7, -1))

        hook = session.bound.base.register_forward_hook(record)
        rows = prefix.generate(2, config)
        hook.remove()
        for i, row in enumerate(rows):
            expected = torch.stack([step[i, token] for step, token in zip(drawn, row, strict=True)])
            torch.testing.assert_close(prefix.score([row])[0], expected, rtol=0, atol=1e-4)


def test_sampling_after_a_step_is_refused_until_refresh():
    model = make("llama", 2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with open_session(model) as session, session.capture(tokens(20)) as prefix:
        prefix.replay(tokens(5, 1)).logps.sum().backward()
        session.finalize()
        optimizer.step()
        with pytest.raises(StaleStateError, match="refresh"):
            prefix.sample(2, max_new_tokens=3)
        prefix.refresh()
        rows = prefix.sample(1, max_new_tokens=N_NEW, temperature=0)
    assert torch.equal(rows[0], stock_rows(model, tokens(20), 1, do_sample=False)[0])


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_a_cache_switched_off_in_the_model_does_not_reach_sampling(where):
    """transformers' Trainer sets `model.config.use_cache = False`; without a cache no row would see its own tokens."""
    model, prompt = make("qwen36", 4), tokens(20)
    expected = stock_rows(model, prompt, 1, do_sample=False)[0]
    getattr(base_model_of(model), where).use_cache = False
    with open_session(model) as session, session.capture(prompt) as prefix:
        assert torch.equal(prefix.sample(1, max_new_tokens=N_NEW, temperature=0)[0], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"num_return_sequences": 2, "do_sample": True},
        {"return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_options_that_need_another_cache_rows_or_result_are_refused(options):
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, **options)
    with open_session(make("llama", 2)) as session, session.capture(tokens(9)) as prefix:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            prefix.generate(2, config)
        assert session.pool.audit() == []
