"""Memory that runs out in any phase: what is safe goes on in smaller pieces, and the rest leaves nothing half-added.

A hook on one layer stands for the allocator: it raises what PyTorch raises, in a forward of too many tokens or in a
backward.
"""

import logging

import pytest
import torch
from failing import SAID, memory_for, no_memory_in_backward

from longstraw_sdk import InputError, LifecycleError, LongStrawSession, NumericsError
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.out_of_memory import is_out_of_memory
from longstraw_sdk.session_core import SessionCore

VOCAB = 97


def tokens(n, seed=0):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


PROMPT = tokens(33, 1)
ROWS = [tokens(n, n) for n in (9, 6, 1, 8)]


@pytest.fixture(params=["llama", "qwen36"])
def model(request):
    """In float64, whose rounding hides no gradient that is missing."""
    with float64_upcasts():
        yield tiny_model(request.param).double()


def open_session(model, **options):
    return LongStrawSession(model, **{"chunk_tokens": 16, "page_tokens": 4, "poison": True, **options})


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def has_no_gradient(model):
    return all(p.grad is None for p in model.parameters())


def update(session):
    """Capture, one replay per row, sweep, finalize; the LoRA gradient."""
    session.bound.base.zero_grad()
    with session.capture(PROMPT) as prefix:
        for row in ROWS:
            prefix.replay(row).logps.sum().backward()
    session.finalize()
    return gradient(session.bound.base)


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError(SAID))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert not is_out_of_memory(RuntimeError("size mismatch")) and not is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value), "what this PyTorch raises on a CPU"


def test_a_capture_goes_on_with_smaller_chunks(model, caplog):
    with open_session(model, chunk_tokens=4) as session:
        wanted = update(session)
    model.zero_grad()
    with open_session(model, chunk_tokens=16) as session, caplog.at_level(logging.WARNING, "longstraw_sdk"):
        with memory_for(model, 9):  # the longest row
            found = update(session)
        assert "chunks are of 8 tokens from now on, not 16" in caplog.text
        assert session.pool.audit() == [] and session.pool.owners == ()
        assert relative_l2(found, wanted) < 1e-12
        caplog.clear()
        with memory_for(model, 9):
            update(session)
        assert not caplog.text, "the next prompt is captured with them at once"


def test_a_capture_that_fits_in_no_chunk_fails_with_advice_and_leaves_nothing(model):
    with open_session(model, chunk_tokens=16) as session:
        with memory_for(model, 3), pytest.raises(torch.OutOfMemoryError) as caught:
            session.capture(PROMPT)
        (advice,) = caught.value.__notes__
        assert "out of memory in capture behind a prompt of 33 tokens" in advice and "chunk_tokens=4" in advice
        assert "By the planner it needs" in advice
        assert session.pool.audit() == [] and session.pool.live_bytes == 0
        assert relative_l2(update(session), update(session)) == 0, "and the session goes on"


def test_ranks_that_run_the_same_passes_do_not_part(model, monkeypatch):
    """One that halved alone would leave the others waiting for passes that it does not run."""
    monkeypatch.setattr(SessionCore, "is_alone", False)
    with open_session(model, chunk_tokens=16, replay_tokens=64) as session:
        with memory_for(model, 9):
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
                session.capture(PROMPT)
        assert "chunk_tokens=16" in caught.value.__notes__[0]
        with session.capture(PROMPT) as prefix, memory_for(model, 20):
            with pytest.raises(torch.OutOfMemoryError):
                prefix.score(ROWS)
            with pytest.raises(torch.OutOfMemoryError):
                list(prefix.replay_in_packs(ROWS))


def test_scoring_goes_on_with_smaller_packs(model, caplog):
    with open_session(model, replay_tokens=64) as session, session.capture(PROMPT) as prefix:
        wanted = prefix.score(ROWS)
        with memory_for(model, 20), caplog.at_level(logging.WARNING, "longstraw_sdk"):
            found = prefix.score(ROWS)
        assert "a pack of 4 responses: they run as 2 and 2" in caplog.text
        assert all(relative_l2(f, w) < 1e-12 for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("n_tokens", [36, 20, 9])
def test_replays_go_on_with_smaller_packs(model, n_tokens):
    with open_session(model, replay_tokens=64) as session:
        wanted = update(session)
        model.zero_grad()
        taken = []
        with session.capture(PROMPT) as prefix, memory_for(model, n_tokens):
            for pack, outs in prefix.replay_in_packs(ROWS):
                assert [len(out.logps) for out in outs] == [len(ROWS[i]) for i in pack]
                sum(out.logps.sum() for out in outs).backward()
                taken += pack
        session.finalize()
        assert sorted(taken) == [0, 1, 2, 3], "each once"
        assert relative_l2(gradient(model), wanted) < 1e-12


def test_a_replay_whose_forward_fails_adds_nothing(model):
    with open_session(model, replay_tokens=64) as session:
        wanted = update(session)
        model.zero_grad()
        with session.capture(PROMPT) as prefix:
            with memory_for(model, 20), pytest.raises(torch.OutOfMemoryError) as caught:
                prefix.replay_packed(ROWS)
            assert "in replay behind a prompt of 33 tokens" in caught.value.__notes__[0]
            assert has_no_gradient(model) and not prefix.needs_sweep
            for row in ROWS:
                prefix.replay(row).logps.sum().backward()
        session.finalize()
        assert relative_l2(gradient(model), wanted) < 1e-12


def check_given_up(session, wanted):
    """The update cannot be closed; given up, it can be taken again."""
    model = session.bound.base
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(LifecycleError, match=r"not whole; call session\.discard\(\)"):
        session.finalize()
    with pytest.raises(LifecycleError, match="not closed"):
        optimizer.step()
    with session.capture(PROMPT) as prefix, pytest.raises(LifecycleError, match="not whole"):
        prefix.replay(ROWS[0])
    session.discard()
    assert has_no_gradient(model) and session.pool.audit() == [] and session.pool.live_bytes == 0
    assert not session.has_open_update
    assert relative_l2(update(session), wanted) == 0


@pytest.mark.parametrize("scope", ["full", "response"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_backward_that_fails_is_never_stepped_on(model, scope, after):
    with open_session(model, gradient_scope=scope) as session:
        wanted = update(session)
        model.zero_grad()
        with no_memory_in_backward(model, after), session.capture(PROMPT) as prefix:
            for row in ROWS[:after]:
                prefix.replay(row).logps.sum().backward()
            whole = None if after == 0 else gradient(model)
            out = prefix.replay(ROWS[after])
            with pytest.raises(torch.OutOfMemoryError):
                out.logps.sum().backward()
            assert whole is None or not torch.equal(gradient(model), whole), "it did add some"
            with pytest.raises(LifecycleError, match="a backward ended in an error"):
                prefix.sweep() if prefix.needs_sweep else prefix.replay(ROWS[0])
            prefix.release()
        check_given_up(session, wanted)


def test_a_sweep_that_fails_is_not_swept_again(model):
    """Once more it would add the chunks a second time that it had swept."""
    with open_session(model) as session:
        wanted = update(session)
        model.zero_grad()
        prefix = session.capture(PROMPT)
        for row in ROWS:
            prefix.replay(row).logps.sum().backward()
        replayed = gradient(model)
        with no_memory_in_backward(model, 1), pytest.raises(torch.OutOfMemoryError) as caught:
            prefix.sweep()
        assert "in the sweep behind a prompt of 33 tokens" in caught.value.__notes__[0]
        assert not torch.equal(gradient(model), replayed), "the last chunk was swept"
        with pytest.raises(LifecycleError, match="the sweep of prompt 1 ended in an error"):
            prefix.sweep()
        check_given_up(session, wanted)


def test_gradients_of_a_prompt_that_is_released_unswept_are_not_stepped_on(model):
    with open_session(model) as session:
        wanted = update(session)
        model.zero_grad()
        with pytest.raises(ZeroDivisionError), session.capture(PROMPT) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
            raise ZeroDivisionError
        check_given_up(session, wanted)


def test_sampling_fails_with_advice_and_leaves_nothing(model):
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        live_bytes = session.pool.live_bytes
        wanted = prefix.sample(3, max_new_tokens=5, seed=1)
        with memory_for(model, 2), pytest.raises(torch.OutOfMemoryError) as caught:
            prefix.sample(3, max_new_tokens=5, seed=1)
        assert "in sampling behind a prompt of 33 tokens" in caught.value.__notes__[0]
        assert session.pool.audit() == [] and session.pool.live_bytes == live_bytes
        again = prefix.sample(3, max_new_tokens=5, seed=1)
        assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_stepped_on(model, bad):
    with open_session(model) as session:
        wanted = update(session)
        model.zero_grad()
        with session.capture(PROMPT) as prefix:
            prefix.replay(ROWS[0]).logps.sum().backward()
            (prefix.replay(ROWS[1]).logps.sum() * bad).backward()
        with pytest.raises(NumericsError, match=r"NaN or infinite in \d+ of \d+ trained parameters, .*lora"):
            session.finalize()
        check_given_up(session, wanted)


def test_errors_that_are_no_lack_of_memory_are_left_alone(model):
    with open_session(model) as session, session.capture(PROMPT) as prefix:
        with pytest.raises(InputError) as caught:
            prefix.score([tokens(3).float()])
        assert not hasattr(caught.value, "__notes__")
        assert prefix.score(ROWS)
