"""The session's rules: bad input is refused with nothing changed, stale or released state is never read, and results do
not depend on chunks, pages, packing or order.
"""

import contextlib
import gc
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_sdk import (
    ConfigurationError,
    InputError,
    LifecycleError,
    LongStrawError,
    LongStrawSession,
    NumericsError,
    StaleStateError,
    UseAfterReleaseError,
)
from longstraw_sdk.capture import chunk_bounds
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.qwen36 import Qwen36Adapter

VOCAB = 97
MODES = [("full", "live"), ("response", "live"), ("full", "frozen"), ("response", "frozen")]


def tokens(n, seed=0):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


PROMPT, OTHER_PROMPT = tokens(21, 1), tokens(14, 2)
ROW, OTHER_ROW = tokens(6, 3), tokens(9, 4)


def open_session(model, **options):
    return LongStrawSession(model, **{"chunk_tokens": 8, "page_tokens": 4, "poison": True, **options})


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors.values()])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def train(session, prompt=PROMPT, row=ROW):
    """One prompt, one response, backward, sweep, finalize; the LoRA gradients."""
    with session.capture(prompt) as prefix:
        prefix.replay(row).logps.sum().backward()
    session.finalize()
    return gradients(session.bound.base)


@contextlib.contextmanager
def refused(session, error, match):
    """The block raises `error`; books, pages and gradients are afterwards what they were before."""
    before, live_bytes = gradients(session.bound.base), session.pool.live_bytes
    with pytest.raises(error, match=match) as caught:
        yield
    assert isinstance(caught.value, LongStrawError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert session.pool.audit() == []
    assert session.pool.live_bytes == live_bytes
    assert same(gradients(session.bound.base), before)


@pytest.fixture
def model():
    """One layer of each kind."""
    return tiny_model("qwen36", n_layers=2, layer_types=["linear_attention", "full_attention"])


@pytest.fixture
def session(model):
    with open_session(model) as opened:
        yield opened


# --- bad input ---


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.empty(0, dtype=torch.long), "prompt is empty"),
        (torch.stack([PROMPT, PROMPT]), r"1-D LongTensor.*torch.int64 \(2, 21\).*each prompt by itself"),
        (PROMPT.int(), "1-D LongTensor.*torch.int32"),
        (PROMPT.float(), "1-D LongTensor.*torch.float32"),
        (PROMPT.tolist(), "1-D LongTensor.*got list"),
        (torch.tensor([3, -100, 4]), "token id -100.*vocabulary 0..96"),
        (torch.tensor([3, VOCAB, 4]), f"token id {VOCAB}.*vocabulary 0..96"),
        (tokens(513), "513 tokens.*max_position_embeddings=512.*nothing is truncated"),
    ],
    ids=["empty", "2-D", "int32", "float", "list", "-100", "vocab", "too long"],
)
def test_bad_prompt_is_refused_and_nothing_changes(session, ids, match):
    clean = train(session)
    with refused(session, InputError, match):
        session.capture(ids)
    for p in session.bound.base.parameters():
        p.grad = None
    assert same(train(session), clean)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (torch.empty(0, dtype=torch.long), "response 1 is empty"),
        (ROW[None], r"response 1 must be a 1-D LongTensor.*\(1, 6\)"),
        (ROW.int(), "response 1 must be.*torch.int32"),
        (torch.tensor([3, -100]), "response 1 holds token id -100"),
        (torch.tensor([VOCAB]), f"response 1 holds token id {VOCAB}"),
        (tokens(512 - len(PROMPT) + 1), "response 1 of 492 tokens ends at position 513.*nothing is truncated"),
    ],
    ids=["empty", "2-D", "int32", "-100", "vocab", "too long"],
)
def test_bad_response_is_named_and_nothing_changes(session, row, match):
    with session.capture(PROMPT) as prefix:
        prefix.replay(ROW).logps.sum().backward()
        for call in (prefix.score, prefix.replay_packed):
            with refused(session, InputError, match):
                call([ROW, row])
        assert torch.equal(prefix.score([ROW])[0], prefix.replay(ROW).logps.detach())


def test_prompt_and_response_that_just_fit_are_accepted(session):
    with session.capture(tokens(500)) as prefix:
        assert len(prefix.score([tokens(12)])[0]) == 12


def test_model_without_lora_is_refused():
    base = base_model_of(tiny_model("llama", n_layers=2))
    model = type(base)(base.config)
    with pytest.raises(ConfigurationError, match="no LoRA adapter"):
        LongStrawSession(model)


def test_lora_without_a_trained_tensor_is_refused(model):
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="LoRA parameters are frozen"):
        LongStrawSession(model)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"gradient_scope": "prompt"}, "gradient_scope='prompt'.*'response', 'full'"),
        ({"prefix_adapter": "off"}, "prefix_adapter='off'.*'live', 'frozen'"),
        ({"state_device": "disk"}, "state_device='disk'.*allowed"),
        ({"state_device": "cuda"}, "state_device='cuda' cannot serve a model on cpu"),
        ({"chunk_tokens": 1}, "chunk_tokens.*at least 2"),
        ({"chunk_tokens": 8.0}, "chunk_tokens must be an integer"),
        ({"page_tokens": 0}, "page_tokens.*at least 1"),
        ({"page_tokens": True}, "page_tokens must be an integer"),
        ({"replay_tokens": 0}, "replay_tokens.*at least 1"),
        ({"temperature": 0.0}, "temperature must be a positive finite number"),
        ({"temperature": float("nan")}, "temperature must be a positive finite number"),
        ({"temperature": float("inf")}, "temperature must be a positive finite number"),
        ({"temperature": "1"}, "temperature must be a positive finite number, got '1'"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_and_leaves_the_model_unbound(model, option, match):
    with pytest.raises(ConfigurationError, match=match):
        open_session(model, **option)
    open_session(model).close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_rows": 0}, "n_rows must be at least 1"),
        ({"max_new_tokens": 492}, "max_new_tokens=492 pass.*max_position_embeddings=512"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
    ],
    ids=str,
)
def test_wrong_sampling_option_is_refused(session, options, match):
    with session.capture(PROMPT) as prefix, refused(session, LongStrawError, match):
        prefix.sample(**{"n_rows": 2, "max_new_tokens": 3, **options})


def test_reentrant_checkpointing_is_refused_at_start(model):
    base_model_of(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigurationError, match="reentrant"):
        open_session(model)
    base_model_of(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    open_session(model).close()


def test_reentrant_checkpointing_switched_on_later_is_refused_in_replay_and_sweep(session):
    base = session.bound.base
    with session.capture(PROMPT) as prefix:
        prefix.replay(ROW).logps.sum().backward()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        for call in (lambda: prefix.replay(ROW), prefix.sweep):
            with refused(session, ConfigurationError, "reentrant"):
                call()
        base.gradient_checkpointing_disable()


def test_weights_that_are_not_finite_are_refused_and_the_pages_come_back(session):
    weight = session.bound.base.model.norm.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[0] = float("nan")
    with refused(session, NumericsError, "not finite"):
        session.capture(PROMPT)
    assert session.pool.owners == ()
    with refused(session, LifecycleError, "nothing was captured"):
        session.finalize()
    with torch.no_grad():
        weight.copy_(good)
    train(session)


def test_capture_in_inference_mode_is_refused_without_a_leak(session):
    with refused(session, LifecycleError, "inference_mode"), torch.inference_mode():
        session.capture(PROMPT)
    assert session.pool.owners == ()
    with session.capture(PROMPT) as prefix:
        expected = prefix.score([ROW])[0]
        with torch.inference_mode():
            assert torch.equal(prefix.score([ROW])[0], expected)


# --- order of calls ---


def test_everything_after_release_is_refused(session):
    prefix = session.capture(PROMPT)
    prefix.replay(ROW).logps.sum().backward()
    prefix.release()
    prefix.release()
    for call in (
        lambda: prefix.replay(ROW),
        lambda: prefix.score([ROW]),
        lambda: prefix.sample(1, max_new_tokens=1),
    ):
        with refused(session, UseAfterReleaseError, "released"):
            call()
    assert prefix.sweep() == 0
    assert session.pool.owners == ()


@pytest.mark.parametrize("prompt_tokens", [1, 21])
@pytest.mark.parametrize("field", ["logps", "entropy"])
@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES[:3])
def test_backward_after_release_is_refused(model, prompt_tokens, field, scope, prefix_adapter):
    with open_session(model, gradient_scope=scope, prefix_adapter=prefix_adapter) as session:
        with session.capture(tokens(prompt_tokens)) as prefix:
            loss = getattr(prefix.replay(ROW), field).sum()
        with refused(session, UseAfterReleaseError, "released"):
            loss.backward()
        train(session)


def optimizers(parameters):
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.05, foreach=False),
        "adamw foreach": lambda: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
        "adamw fused": lambda: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    }


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw foreach", "adamw fused"])
def test_a_step_makes_the_prefix_stale_until_refresh(model, name):
    with open_session(model) as session:
        optimizer = optimizers([p for p in model.parameters() if p.requires_grad])[name]()
        prefix = session.capture(PROMPT)
        before = prefix.score([ROW])[0]
        prefix.replay(ROW).logps.sum().backward()
        session.finalize()
        assert not prefix.stale
        optimizer.step()
        assert prefix.stale
        for call in (
            lambda: prefix.replay(ROW),
            lambda: prefix.score([ROW]),
            lambda: prefix.sample(1, max_new_tokens=1),
        ):
            with refused(session, StaleStateError, "refresh"):
                call()
        prefix.refresh()
        with session.capture(PROMPT) as fresh:
            assert torch.equal(prefix.score([ROW])[0], fresh.score([ROW])[0])
        assert not torch.allclose(prefix.score([ROW])[0], before, atol=1e-4)
        prefix.release()
        assert session.pool.audit() == []


def test_refresh_refuses_to_lose_gradients(session):
    with session.capture(PROMPT) as prefix:
        prefix.replay(ROW).logps.sum().backward()
        with refused(session, LifecycleError, "not swept"):
            prefix.refresh()


def test_sweep_after_a_step_is_refused(model):
    """Gradients collected under the old weights cannot be propagated through the new ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with open_session(model) as session:
        prefix = session.capture(PROMPT)
        prefix.replay(ROW).logps.sum().backward()
        with torch.no_grad():
            trained[0].add_(1.0)  # an optimizer step is refused, a write by hand cannot be
        with pytest.raises(StaleStateError) as caught:
            session.finalize()
        assert "session.discard()" in caught.value.__notes__[0]
        session.discard()
        assert prefix.released and all(p.grad is None for p in trained)
        with session.capture(PROMPT) as again:
            again.replay(ROW).logps.sum().backward()
        assert session.finalize().n_sweeps == 1


def test_a_step_on_gradients_that_are_not_finalized_is_refused(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    with open_session(model) as session:
        with session.capture(PROMPT) as prefix:
            prefix.score([ROW])
            optimizer.step()  # nothing was replayed: no gradient of this session is in it
        with session.capture(PROMPT) as prefix:
            prefix.replay(ROW).logps.sum().backward()
        with pytest.raises(LifecycleError, match=r"not closed.*session\.finalize"):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(trained, before, strict=True))
        torch.optim.SGD([other], lr=0.5).step()  # of another model
        assert float(other) == 0.5
        session.finalize()
        optimizer.step()
        assert not torch.equal(trained[0], before[0])
    optimizer.step()  # after close the session has no say


def test_a_weight_update_that_version_counters_miss_can_be_declared(session):
    with session.capture(PROMPT) as prefix:
        weight = next(p for n, p in session.bound.base.named_parameters() if ".lora_B" in n)
        weight.detach().numpy()[...] += 1.0
        assert not prefix.stale
        session.mark_weights_updated()
        with refused(session, StaleStateError, "refresh"):
            prefix.replay(ROW)


def test_frozen_prefix_survives_a_step_and_equals_a_new_capture(model):
    with open_session(model, prefix_adapter="frozen") as session:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        with session.capture(PROMPT) as prefix:
            out = prefix.replay(ROW)
            out.logps.sum().backward()
            session.finalize()
            optimizer.step()
            session.mark_weights_updated()
            assert not prefix.stale
            after = prefix.replay(ROW).logps
            with session.capture(PROMPT) as fresh:
                assert torch.equal(after, fresh.replay(ROW).logps)
            assert not torch.allclose(after, out.logps, atol=1e-4)


def test_a_changed_base_weight_makes_even_a_frozen_prefix_stale(model):
    with open_session(model, prefix_adapter="frozen") as session, session.capture(PROMPT) as prefix:
        with torch.no_grad():
            session.bound.base.get_input_embeddings().weight[0] += 1
        with refused(session, StaleStateError, "weights changed"):
            prefix.replay(ROW)


def test_switched_adapter_is_refused_until_it_is_switched_back(model):
    model.add_adapter("other", model.peft_config["default"])
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        expected = prefix.score([ROW])[0]
        model.set_adapter("other")
        for call in (lambda: prefix.replay(ROW), lambda: prefix.score([ROW])):
            with refused(session, StaleStateError, "'default'.*'other'"):
                call()
        model.set_adapter("default")
        assert torch.equal(prefix.score([ROW])[0], expected)


def test_disabled_adapter_is_refused_until_it_is_back(model):
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        expected = prefix.score([ROW])[0]
        with model.disable_adapter():
            with refused(session, StaleStateError, "capture once per adapter"):
                prefix.score([ROW])
            with refused(session, ConfigurationError, "adapter is disabled"):
                prefix.replay(ROW)
        assert torch.equal(prefix.score([ROW])[0], expected)


def test_capture_without_adapters_scores_the_reference_model(model):
    """The reference of a KL penalty; it keeps no chunk boundaries, since it is never swept."""
    with model.disable_adapter():
        logits = model(input_ids=torch.cat([PROMPT, ROW])[None]).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(-1, ROW[:, None])[:, 0]
    with open_session(model) as session, model.disable_adapter(), session.capture(PROMPT) as prefix:
        torch.testing.assert_close(prefix.score([ROW])[0], expected, rtol=0, atol=1e-5)
        n_bytes = prefix.n_bytes
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        assert prefix.n_bytes > n_bytes


def test_replay_without_gradients_is_refused(session):
    with session.capture(PROMPT) as prefix, refused(session, LifecycleError, "score"), torch.no_grad():
        prefix.replay(ROW)


def test_second_session_on_a_bound_model_is_refused_and_the_first_goes_on(model):
    with open_session(model) as session:
        for same_model in (model, base_model_of(model)):
            with refused(session, LifecycleError, r"bound already.*session.close\(\)"):
                open_session(same_model)
        train(session)
    open_session(model).close()


def test_dropped_session_unbinds_its_model(model):
    stock = base_model_of(model).config._attn_implementation
    session = open_session(model)
    session.capture(PROMPT)
    assert base_model_of(model).config._attn_implementation != stock
    del session
    gc.collect()
    assert base_model_of(model).config._attn_implementation == stock
    open_session(model).close()


def test_a_prefix_keeps_working_when_its_session_object_is_dropped(model):
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        expected = prefix.score([ROW])[0]
    prefix = open_session(model).capture(PROMPT)
    gc.collect()
    assert torch.equal(prefix.score([ROW])[0], expected)


def test_closed_session_refuses_every_call(session):
    prefix = session.capture(PROMPT)
    session.close()
    session.close()
    assert session.pool.live_bytes == session.pool.free_bytes == 0
    for call in (lambda: session.capture(PROMPT), session.finalize):
        with refused(session, LifecycleError, "closed"):
            call()
    with refused(session, UseAfterReleaseError, "released"):
        prefix.refresh()


def test_finalize_needs_something_to_close(session):
    with refused(session, LifecycleError, "nothing was captured or replayed"):
        session.finalize()
    train(session)
    with refused(session, LifecycleError, "nothing was captured or replayed"):
        session.finalize()
    train(session)


def test_a_refused_capture_opens_no_update(session):
    with pytest.raises(InputError):
        session.capture(PROMPT[:0])
    with refused(session, LifecycleError, "nothing was captured"):
        session.finalize()


def test_finalize_reports_what_it_closed(session):
    with session.capture(PROMPT) as prefix:
        prefix.replay(ROW).logps.sum().backward()
    session.capture(OTHER_PROMPT).score([ROW])
    result = session.finalize()
    assert (result.n_prefixes, result.n_sweeps, result.n_swept_tokens) == (2, 1, len(PROMPT) - 1)
    assert result.reductions == ()


def test_exception_in_the_block_releases_without_sweeping(session):
    with contextlib.suppress(ZeroDivisionError), session.capture(PROMPT) as prefix:
        prefix.replay(ROW).logps.sum().backward()
        without_sweep = gradients(session.bound.base)
        assert prefix.needs_sweep
        raise ZeroDivisionError
    assert prefix.released
    assert session.pool.owners == ()
    assert session.pool.audit() == []
    assert same(gradients(session.bound.base), without_sweep)
    with refused(session, LifecycleError, "released before what its replays collected was swept"):
        session.finalize()
    session.discard()
    assert relative_l2(flat(train(session)), flat(without_sweep)) > 0.02, "control: the sweep does add a gradient"


def test_a_released_prefix_is_not_brought_back_behind_the_session(session):
    """`finalize` and `close` know the prefixes that are open; one they do not know would lose its sweep."""
    prefix = session.capture(PROMPT)
    prefix.release()
    with session.capture(OTHER_PROMPT), refused(session, UseAfterReleaseError, "capture the prompt again"):
        prefix.refresh()


# --- results ---


@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES)
def test_score_equals_replay_and_costs_no_accumulator(model, scope, prefix_adapter):
    rows = [ROW, OTHER_ROW, ROW[:1]]
    with open_session(model, gradient_scope=scope, prefix_adapter=prefix_adapter, replay_tokens=32) as session:
        with session.capture(PROMPT) as prefix:
            n_bytes = prefix.n_bytes
            scored = prefix.score(rows)
            assert prefix.n_bytes == n_bytes
            replayed = prefix.replay_packed(rows)
            for old, new in zip(scored, replayed, strict=True):
                assert not old.requires_grad
                assert new.logps.requires_grad
                assert old.dtype == new.logps.dtype == torch.float32
                assert torch.equal(torch.exp(new.logps - old), torch.ones(len(old))), "on-policy ratio is exactly 1"


def test_prefixes_before_one_finalize_add_their_gradients(model):
    separate = []
    for prompt, row in ((PROMPT, ROW), (OTHER_PROMPT, OTHER_ROW)):
        with open_session(model) as session:
            separate.append(flat(train(session, prompt, row)))
        model.zero_grad()
    with open_session(model) as session:
        prefixes = [session.capture(PROMPT), session.capture(OTHER_PROMPT)]
        for prefix, row in zip(reversed(prefixes), (OTHER_ROW, ROW), strict=True):
            prefix.replay(row).logps.sum().backward()
        assert session.finalize().n_sweeps == 2
        together = flat(gradients(session.bound.base))
    assert relative_l2(together, separate[0] + separate[1]) < 1e-5
    assert relative_l2(together, separate[0]) > 0.02, "control: both prompts count"


def test_order_of_leaving_blocks_does_not_matter(model):
    def run(order):
        model.zero_grad()
        with open_session(model) as session:
            prefixes = [session.capture(PROMPT), session.capture(OTHER_PROMPT)]
            losses = [p.replay(row).logps.sum() for p, row in zip(prefixes, (ROW, OTHER_ROW), strict=True)]
            sum(losses).backward()
            for i in order:
                prefixes[i].__exit__(None, None, None)
            session.finalize()
            return flat(gradients(session.bound.base))

    assert relative_l2(run([1, 0]), run([0, 1])) < 1e-5


@pytest.mark.parametrize("replay_tokens", [None, 64])
def test_one_sweep_after_several_backwards_equals_a_sweep_after_each(model, replay_tokens):
    with open_session(model, replay_tokens=replay_tokens) as session:
        for row in (ROW, OTHER_ROW):
            train(session, PROMPT, row)
        separate = flat(gradients(model))
        model.zero_grad()
        with session.capture(PROMPT) as prefix:
            for row in (ROW, OTHER_ROW):
                prefix.replay(row).logps.sum().backward()
        assert relative_l2(flat(gradients(model)), separate) < 1e-5
        model.zero_grad()
        with session.capture(PROMPT) as prefix:
            torch.cat([out.logps for out in prefix.replay_packed([ROW, OTHER_ROW])]).sum().backward()
        assert relative_l2(flat(gradients(model)), separate) < 1e-5


def test_stats_count_tokens_of_each_phase(session):
    with session.capture(PROMPT) as prefix:
        rows = prefix.sample(2, max_new_tokens=3)
        prefix.score([ROW])
        prefix.replay(OTHER_ROW).logps.sum().backward()
    stats = session.stats
    assert (stats.captured_tokens, stats.scored_tokens, stats.replayed_tokens, stats.swept_tokens) == (20, 6, 9, 20)
    assert stats.sampled_tokens == sum(len(r) for r in rows)
    assert stats.seconds.keys() == {"capture", "sample", "score", "replay", "sweep"}


_DOUBLES = {name: tiny_model(name, n_layers=n).double() for name, n in (("qwen36", 4), ("llama", 2))}


def double_run(name, prompt, rows, scope="full", prefix_adapter="live", **options):
    """Log-probs and LoRA gradients in float64."""
    model = _DOUBLES[name]
    model.zero_grad()
    scope_options = {"gradient_scope": scope, "prefix_adapter": prefix_adapter}
    with float64_upcasts(), open_session(model, probe=False, **scope_options, **options) as session:
        with session.capture(prompt) as prefix:
            logps = torch.cat([out.logps for out in prefix.replay_packed(rows)])
            (logps * torch.linspace(-1, 2, len(logps), dtype=torch.float64)).sum().backward()
        session.finalize()
        assert session.pool.audit() == []
    return logps.detach(), flat(gradients(model))


@pytest.mark.parametrize(("name", "mode"), [*(("qwen36", mode) for mode in MODES[:3]), ("llama", MODES[0])])
@settings(max_examples=7)
@given(
    prompt_tokens=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    chunk_tokens=st.integers(2, 16),
    page_tokens=st.integers(1, 48),
    replay_tokens=st.none() | st.integers(1, 60),
)
def test_results_do_not_depend_on_chunks_pages_or_packing(
    name, mode, prompt_tokens, lengths, chunk_tokens, page_tokens, replay_tokens
):
    prompt, rows = tokens(prompt_tokens, 5), [tokens(n, 6 + i) for i, n in enumerate(lengths)]
    options = {"chunk_tokens": chunk_tokens, "page_tokens": page_tokens, "replay_tokens": replay_tokens}
    logps, gradient = double_run(name, prompt, rows, *mode, **options)
    plain_logps, plain_gradient = double_run(name, prompt, rows, *mode, chunk_tokens=1000, page_tokens=1000)
    assert float((logps - plain_logps).abs().max()) < 1e-10
    assert relative_l2(gradient, plain_gradient) < 1e-10


@settings(max_examples=100)
@given(n_tokens=st.integers(0, 200), chunk_tokens=st.integers(2, 64), min_tokens=st.integers(1, 2))
def test_chunks_tile_the_prefix_and_none_is_too_short(n_tokens, chunk_tokens, min_tokens):
    bounds = chunk_bounds(n_tokens, chunk_tokens, min_tokens)
    widths = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, n_tokens)
    longest = chunk_tokens + min_tokens - 1
    assert all(min_tokens <= w <= longest for w in widths) or widths == [min(n_tokens, 1)]


def test_no_forward_over_a_resident_state_is_one_token_long(model):
    widths = []

    class Recording(Qwen36Adapter):
        def forward(self, model, input_ids, view):
            widths.append((view.n_tokens, input_ids.shape[1]))
            return super().forward(model, input_ids, view)

    with LongStrawSession(model, Recording(), chunk_tokens=4, probe=False) as session:
        for n_prompt in (1, 2, 6, 10):
            with session.capture(tokens(n_prompt)) as prefix:
                prefix.score([ROW[:1]])
                prefix.replay(ROW[:1]).logps.sum().backward()
    assert widths.count((0, 1)) == 2, "the prompt of two tokens: captured, and swept, from an empty state"
    assert all(width >= 2 for before, width in widths if before)


def test_control_another_first_token_moves_results_far_beyond_the_tolerance():
    prompt = tokens(20, 5)
    other = prompt.clone()
    other[0] = (other[0] + 1) % VOCAB
    for name in _DOUBLES:
        (logps, gradient), (moved_logps, moved) = (double_run(name, p, [ROW]) for p in (prompt, other))
        assert float((logps - moved_logps).abs().max()) > 1e-5
        assert relative_l2(moved, gradient) > 1e-5
