"""Any order of calls on a session: each does what the books say or raises what it must, and no gradient is partial."""

import pytest
import torch
from failing import no_memory_in_backward
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longstraw_sdk import LifecycleError, LongStrawSession, StaleStateError, UseAfterReleaseError
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model

VOCAB = 97


def tokens(n, seed):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


PROMPTS = [tokens(n, n) for n in (1, 14, 21)]
ROWS = [tokens(n, 50 + n) for n in (1, 5)]
OPTIONS = {"chunk_tokens": 8, "page_tokens": 4, "poison": True, "probe": False}
AT_ONCE = 3


class Open:
    """What the books say of a prefix. `weights` counts the steps that its capture has seen."""

    def __init__(self, prefix, ids, weights):
        self.prefix, self.ids, self.weights = prefix, ids, weights
        self.released = self.unswept = False
        self.epoch = 0


class SessionMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.upcasts = float64_upcasts()
        self.upcasts.__enter__()

    @initialize(scope=st.sampled_from(["full", "response"]), architecture=st.sampled_from(["llama", "qwen36"]))
    def begin(self, scope, architecture):
        layers = {"layer_types": ["linear_attention", "full_attention"]} if architecture == "qwen36" else {}
        self.model, self.twin = (tiny_model(architecture, n_layers=2, **layers).double() for _ in range(2))
        self.scope = scope
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.05)
        self.session = LongStrawSession(self.model, gradient_scope=scope, **OPTIONS)
        self.books, self.graphs, self.replayed = [], [], []
        self.n_steps = 0
        self.partial = self.update_is_open = self.needs_finalize = False
        self.references = {}

    def teardown(self):
        self.session.close()
        assert self.session.pool.live_bytes == 0
        self.upcasts.__exit__(None, None, None)

    def pick(self, which):
        return self.books[which % len(self.books)]

    def why_unusable(self, book):
        if book.released:
            return UseAfterReleaseError
        return StaleStateError if book.weights != self.n_steps else None

    def why_not_trainable(self, book):
        return self.why_unusable(book) or (LifecycleError if self.partial else None)

    def run(self, function, error):
        """The result of `function`; or None, if it must raise `error`."""
        if error is None:
            return function()
        with pytest.raises(error) as caught:
            function()
        assert type(caught.value) is error
        return None

    def reference(self, ids, row):
        """The gradient of one response, in a session that has seen nothing else."""
        key = (self.n_steps, tuple(ids.tolist()), len(row))
        if key not in self.references:
            with LongStrawSession(self.twin, gradient_scope=self.scope, **OPTIONS) as session:
                with session.capture(ids) as prefix:
                    prefix.replay(row).logps.sum().backward()
                session.finalize()
            parts = [p.grad.flatten() for p in self.twin.parameters() if p.requires_grad]
            self.references[key] = torch.cat(parts)
            self.twin.zero_grad()
        return self.references[key]

    @precondition(lambda self: sum(not book.released for book in self.books) < AT_ONCE)
    @rule(which=st.integers(0, len(PROMPTS) - 1))
    def capture(self, which):
        self.books.append(Open(self.session.capture(PROMPTS[which]), PROMPTS[which], self.n_steps))
        self.update_is_open = True

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9), n=st.integers(1, 2))
    def score(self, which, n):
        book = self.pick(which)
        scored = self.run(lambda: book.prefix.score(ROWS[:n]), self.why_unusable(book))
        assert scored is None or [len(logps) for logps in scored] == [len(row) for row in ROWS[:n]]

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9), n=st.integers(1, 2))
    def sample(self, which, n):
        book = self.pick(which)
        rows = self.run(lambda: book.prefix.sample(n, max_new_tokens=2), self.why_unusable(book))
        assert rows is None or len(rows) == n

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9), row=st.sampled_from(ROWS))
    def replay(self, which, row):
        book = self.pick(which)
        out = self.run(lambda: book.prefix.replay(row), self.why_not_trainable(book))
        if out is not None:
            self.graphs.append((out, book, book.epoch, row))
            self.update_is_open = self.needs_finalize = True

    @precondition(lambda self: self.graphs)
    @rule(which=st.integers(0, 9))
    def backward(self, which):
        out, book, epoch, row = self.graphs.pop(which % len(self.graphs))
        error = UseAfterReleaseError if book.released else StaleStateError if book.epoch != epoch else None
        self.run(lambda: out.logps.sum().backward(), error)
        if error is None:
            self.collected(book, row)

    def collected(self, book, row):
        self.replayed.append((book.ids, row))
        book.unswept |= self.scope == "full" and len(book.ids) > 1

    @precondition(lambda self: self.books and not self.partial)
    @rule(which=st.integers(0, 9))
    def backward_that_fails(self, which):
        book = self.pick(which)
        if self.why_not_trainable(book):
            return
        with no_memory_in_backward(self.model):
            out = book.prefix.replay(ROWS[0])
            with pytest.raises(torch.OutOfMemoryError):
                out.logps.sum().backward()
        self.partial = self.update_is_open = self.needs_finalize = True
        book.unswept = book.prefix.needs_sweep

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9))
    def sweep(self, which):
        book = self.pick(which)
        n_tokens = self.run(book.prefix.sweep, LifecycleError if book.unswept and self.partial else None)
        if n_tokens is not None:
            assert n_tokens == (len(book.ids) - 1 if book.unswept else 0)
            book.unswept = False

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9))
    def refresh(self, which):
        book = self.pick(which)
        error = UseAfterReleaseError if book.released else LifecycleError if book.unswept else None
        self.run(book.prefix.refresh, error)
        if error is None:
            book.weights, book.epoch = self.n_steps, book.epoch + 1
            self.update_is_open = True

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9))
    def extend(self, which):
        book = self.pick(which)
        error = UseAfterReleaseError if book.released else LifecycleError if book.unswept else None
        longer = torch.cat([book.ids, ROWS[1]])
        if len(longer) > 60:
            return
        self.run(lambda: book.prefix.extend(longer), error)
        if error is None:
            book.ids, book.weights, book.epoch = longer, self.n_steps, book.epoch + 1
            self.update_is_open = True

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 9))
    def release(self, which):
        book = self.pick(which)
        book.prefix.release()
        self.partial |= book.unswept
        book.released, book.unswept = True, False

    @rule()
    def finalize(self):
        error = LifecycleError if self.partial or not self.update_is_open else None
        result = self.run(self.session.finalize, error)
        if result is None:
            return
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
        wanted = sum(self.reference(ids, row) for ids, row in self.replayed)
        found = torch.cat([g.flatten() for g in found])
        if self.replayed:
            assert relative_l2(found, wanted) < 1e-11
        else:
            assert not found.any()
        self.update_is_open = self.needs_finalize = False
        self.replayed, self.graphs = [], []
        for book in self.books:
            book.unswept = False

    @rule()
    def step(self):
        """Right after `finalize`, or on nothing; refused while responses were replayed."""
        self.run(self.optimizer.step, LifecycleError if self.needs_finalize else None)
        if not self.needs_finalize:
            self.n_steps += 1  # one without gradients counts as well
            self.optimizer.zero_grad()
            with torch.no_grad():
                for own, other in zip(self.twin.parameters(), self.model.parameters(), strict=True):
                    own.copy_(other)

    @rule()
    def discard(self):
        self.session.discard()
        assert all(p.grad is None for p in self.trained)
        for book in self.books:
            book.released, book.unswept = True, False
        self.partial = self.update_is_open = self.needs_finalize = False
        self.replayed, self.graphs = [], []

    @invariant()
    def books_agree(self):
        if not hasattr(self, "session"):
            return
        assert self.session.pool.audit() == []
        assert self.session.has_open_update == self.update_is_open
        for book in self.books:
            assert book.prefix.released == book.released
            assert book.prefix.needs_sweep == book.unswept
            assert book.released or book.prefix.stale == (book.weights != self.n_steps)
        if all(book.released for book in self.books):
            assert self.session.pool.live_bytes == 0


def settings_of(n_examples, n_calls):
    return settings(
        max_examples=n_examples, stateful_step_count=n_calls, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_any_order_of_calls():
    run_state_machine_as_test(SessionMachine, settings=settings_of(6, 20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_order_of_many_calls():
    run_state_machine_as_test(SessionMachine, settings=settings_of(150, 40))
