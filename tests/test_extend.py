"""A growing conversation: its state goes on from what is resident, and is what one capture of the whole would be."""

import logging

import pytest
import torch

from longstraw_sdk import InputError, LifecycleError, LongStrawSession, StaleStateError, UseAfterReleaseError
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model

GENERATOR = torch.Generator().manual_seed(0)
TEXT = torch.randint(2, 97, (90,), generator=GENERATOR)
ROWS = [torch.randint(2, 97, (n,), generator=GENERATOR) for n in (9, 4)]
SIZES = {"chunk_tokens": 16, "page_tokens": 8}


def replayed(prefix):
    outs = prefix.replay_packed(ROWS)
    torch.stack([(out.logps * out.logps).sum() for out in outs]).sum().backward()
    return torch.cat([out.logps.detach() for out in outs])


def gradient(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad and p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize("architecture", ["qwen36", "llama", "glm52"])
@pytest.mark.parametrize("scope", ["full", "response"])
def test_a_state_that_went_on_equals_one_capture(architecture, scope):
    """Turns of uneven length, with sampling and a whole update between them."""
    model = tiny_model(architecture).double()
    with float64_upcasts(), LongStrawSession(model, gradient_scope=scope, **SIZES) as session:
        with session.capture(TEXT[:37]) as prefix:
            prefix.sample(2, max_new_tokens=3, seed=0)
            replayed(prefix)
            prefix.sweep()
            before = session.stats.captured_tokens
            assert prefix.extend(TEXT[:60]) and prefix.extend(TEXT)
            assert session.stats.captured_tokens - before == 90 - 37, "only what is new was forwarded"
            assert prefix.n_tokens == 90
            session.finalize()
            model.zero_grad()
            scored = torch.cat(prefix.score(ROWS))
            logps = replayed(prefix)
        session.finalize()
        found = gradient(model)
        with session.capture(TEXT) as whole:
            wanted_logps = replayed(whole)
        session.finalize()
        wanted = gradient(model)
    assert torch.equal(scored, logps)
    assert float((logps - wanted_logps).abs().max()) < 1e-10
    assert relative_l2(found, wanted) < 1e-10
    assert wanted.norm() > 0


def test_control_other_texts_differ():
    model = tiny_model("qwen36").double()
    other = TEXT.clone()
    other[40] = 2 + (other[40] - 1) % 95
    with float64_upcasts(), LongStrawSession(model, **SIZES) as session:
        found = []
        for text in (TEXT, other):
            with session.capture(TEXT[:37]) as prefix:
                assert prefix.extend(text)
                found.append(torch.cat(prefix.score(ROWS)))
    assert float((found[0] - found[1]).abs().max()) > 1e-4


@pytest.fixture
def opened():
    model = tiny_model("qwen36")
    with LongStrawSession(model, **SIZES) as session:
        yield model, session, session.capture(TEXT[:37])


def score_of(session, text):
    with session.capture(text) as prefix:
        return torch.cat(prefix.score(ROWS))


def test_other_ids_are_captured_as_a_whole_which_is_said(opened, caplog):
    _, session, prefix = opened
    other = TEXT[:60].clone()
    other[20] = 2 + (other[20] - 1) % 95
    with caplog.at_level(logging.WARNING):
        assert not prefix.extend(other)
    assert "prompt of 60 tokens is captured as a whole: its ids are the same for 20 of 36 tokens only" in caplog.text
    torch.testing.assert_close(torch.cat(prefix.score(ROWS)), score_of(session, other))
    assert not prefix.extend(other[:30]), "a shorter one goes back"
    assert prefix.n_tokens == 30
    torch.testing.assert_close(torch.cat(prefix.score(ROWS)), score_of(session, other[:30]))


def test_the_last_token_was_not_resident_and_may_differ(opened):
    _, session, prefix = opened
    other = TEXT[:60].clone()
    other[36] = 2 + (other[36] - 1) % 95
    assert prefix.extend(other)
    torch.testing.assert_close(torch.cat(prefix.score(ROWS)), score_of(session, other))


def test_the_same_prompt_needs_nothing(opened):
    _, session, prefix = opened
    before = session.stats.captured_tokens
    assert prefix.extend(TEXT[:37])
    assert session.stats.captured_tokens == before


def test_new_weights_are_captured_as_a_whole(opened, caplog):
    model, _, prefix = opened
    replayed(prefix)
    prefix.sweep()
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(0.1)
    assert not prefix.extend(TEXT)
    assert "weights or positions changed" in caplog.text
    prefix.score(ROWS)


def test_too_few_tokens_for_a_recurrent_layer_are_said(opened, caplog):
    _, session, prefix = opened
    assert not prefix.extend(TEXT[:38])
    assert "1 new tokens are fewer than the 2" in caplog.text
    torch.testing.assert_close(torch.cat(prefix.score(ROWS)), score_of(session, TEXT[:38]))


def test_a_one_token_prompt_has_nothing_to_go_on_from(opened, caplog):
    _, session, _ = opened
    prefix = session.capture(TEXT[:1])
    assert not prefix.extend(TEXT)
    assert "nothing of it is resident" in caplog.text


def test_what_would_lose_a_gradient_is_refused(opened):
    _, session, prefix = opened
    replayed(prefix)
    with pytest.raises(LifecycleError, match="not swept"):
        prefix.extend(TEXT)
    prefix.sweep()
    out = prefix.replay(ROWS[0])
    with pytest.raises(InputError, match="vocabulary"):
        prefix.extend(torch.tensor([5, 1000]))
    assert prefix.n_tokens == 37, "bad input changes nothing"
    assert prefix.extend(TEXT)
    with pytest.raises(StaleStateError, match="extended or captured again"):
        out.logps.sum().backward()
    prefix.release()
    with pytest.raises(UseAfterReleaseError):
        prefix.extend(TEXT)
    session.finalize()


def test_a_refusal_changes_nothing(opened):
    model, _, prefix = opened
    before = torch.cat(prefix.score(ROWS))
    with model.disable_adapter(), pytest.raises(StaleStateError, match="was captured with adapters"):
        prefix.extend(TEXT)
    with torch.inference_mode(), pytest.raises(LifecycleError, match="inference_mode"):
        prefix.extend(TEXT)
    assert prefix.n_tokens == 37
    assert torch.equal(torch.cat(prefix.score(ROWS)), before)


def test_a_failure_gives_the_pages_back(opened, monkeypatch):
    _, session, prefix = opened
    stock = session.adapter.forward

    def fails(base, ids, view):
        if view.state.n_tokens > 60:
            raise MemoryError("no")
        return stock(base, ids, view)

    monkeypatch.setattr(session.adapter, "forward", fails)
    with pytest.raises(MemoryError):
        prefix.extend(TEXT)
    assert prefix.released
    assert session._core.pool.audit() == []
