"""The page pool: who owns a page, what its release means, and an audit that finds every broken book."""

import gc
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longstraw_sdk import LifecycleError, UseAfterReleaseError
from longstraw_sdk.state import Component, PagePool

CPU = torch.device("cpu")
SMALL = (Component("k", (2,), (3,), torch.float32), Component("v", (2,), (1,), torch.float32))
WIDE = (Component("latent", (), (5,), torch.float64),)
BYTES = {SMALL: 2 * 4 * (3 + 1) * 4, WIDE: 4 * 5 * 8}


@pytest.fixture
def pool():
    pool = PagePool(4, poison=True)
    pool.open("a")
    pool.open("b")
    return pool


def test_a_page_has_the_shape_dtype_and_owner_it_was_asked_for(pool):
    page = pool.allocate("a", SMALL, CPU)
    assert page.owner == "a"
    assert page.tensor("k").shape == (2, 4, 3)
    assert page.tensor("v").shape == (2, 4, 1)
    assert page.n_bytes == pool.live_bytes == BYTES[SMALL]
    assert pool.allocate("a", WIDE, CPU).tensor("latent").dtype == torch.float64
    assert pool.audit() == []


def test_pages_never_share_memory(pool):
    pages = [pool.allocate(owner, SMALL, CPU) for owner in "abab"]
    for i, page in enumerate(pages):
        page.fill_(float(i))
    assert [float(p.tensor(n).mean()) for p in pages for n in "kv"] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_only_an_open_owner_gets_pages(pool):
    with pytest.raises(LifecycleError, match="owner 'c' is not open"):
        pool.allocate("c", SMALL, CPU)
    with pytest.raises(LifecycleError, match="owner 'a' is open already"):
        pool.open("a")
    pool.release("a")
    with pytest.raises(LifecycleError, match=r"owner 'a' is not open.*released already"):
        pool.allocate("a", SMALL, CPU)
    pool.open("a")
    pool.allocate("a", SMALL, CPU)
    assert pool.owners == ("b", "a")


def test_release_takes_every_page_of_one_owner_and_no_other(pool):
    mine, others = [pool.allocate("a", SMALL, CPU) for _ in range(3)], pool.allocate("b", SMALL, CPU)
    others.fill_(7.0)
    pool.release("a")
    assert pool.owners == ("b",)
    assert pool.live_bytes == BYTES[SMALL]
    assert pool.free_bytes == 3 * BYTES[SMALL]
    for page in mine:
        with pytest.raises(UseAfterReleaseError, match=rf"page {page.number} \(k\) was released"):
            page.tensor("k")
    assert (others.tensor("k") == 7).all()
    assert pool.audit() == []


def test_double_release_is_refused(pool):
    pool.release("a")
    with pytest.raises(UseAfterReleaseError, match="owner 'a' was released already"):
        pool.release("a")
    with pytest.raises(UseAfterReleaseError, match="owner 'never' was released already, or never opened"):
        pool.release("never")


def test_single_pages_can_be_taken_back_once_and_only_from_their_owner(pool):
    first, second = (pool.allocate("a", SMALL, CPU) for _ in range(2))
    with pytest.raises(UseAfterReleaseError, match="page 0 belongs to 'a', not to 'b'"):
        pool.release_pages("b", [first])
    pool.release_pages("a", [first])
    with pytest.raises(UseAfterReleaseError, match="page 0 belongs to None, not to 'a'"):
        pool.release_pages("a", [first])
    assert second.tensor("k").shape == (2, 4, 3)
    assert pool.live_bytes == BYTES[SMALL]
    assert pool.audit() == []


def test_freed_pages_are_reused_for_the_same_components_only(pool):
    page = pool.allocate("a", SMALL, CPU)
    pointer = page.tensor("k").data_ptr()
    pool.release("a")
    wide = pool.allocate("b", WIDE, CPU)
    assert wide is not page
    again = pool.allocate("b", SMALL, CPU)
    assert again is page
    assert again.tensor("k").data_ptr() == pointer
    assert again.owner == "b"
    assert pool.free_bytes == 0


def test_peak_bytes_is_the_largest_live_bytes_there_ever_was(pool):
    for _ in range(3):
        pool.allocate("a", SMALL, CPU)
    pool.release("a")
    pool.allocate("b", WIDE, CPU)
    assert pool.live_bytes == BYTES[WIDE]
    assert pool.peak_bytes == 3 * BYTES[SMALL]


def test_trim_frees_memory_and_returns_its_bytes(pool):
    page = pool.allocate("a", SMALL, CPU)
    kept = pool.allocate("b", WIDE, CPU)
    memory = weakref.ref(page._tensors["k"])
    pool.release("a")
    del page
    gc.collect()
    assert memory() is not None, "a free page is kept for reuse"
    assert pool.trim() == BYTES[SMALL]
    gc.collect()
    assert memory() is None
    assert pool.free_bytes == pool.trim() == 0
    assert kept.tensor("latent").shape == (4, 5)
    assert pool.audit() == []


def test_poison_fills_new_and_released_pages_with_nan(pool):
    page = pool.allocate("a", SMALL, CPU)
    assert page.tensor("k").isnan().all()
    tensor = page.tensor("k").fill_(1.0)
    pool.release("a")
    assert tensor.isnan().all()
    plain = PagePool(4)
    plain.open("a")
    tensor = plain.allocate("a", SMALL, CPU).tensor("k").fill_(1.0)
    plain.release("a")
    assert (tensor == 1).all(), "control: without poison nothing is written"


def corrupt_owner(pool, page):
    page.owner = "b"


def hold_twice(pool, page):
    pool._live["b"].append(page)
    page.owner = "b"


def free_without_taking_back(pool, page):
    pool._free[(page.components, page.device)].append(page)
    page.fill_(float("nan"))


def free_and_disowned(pool, page):
    free_without_taking_back(pool, page)
    page.owner = None


def miscount(pool, page):
    pool.live_bytes += 1


def write_after_release(pool, page):
    tensor = page.tensor("v")
    pool.release("a")
    tensor[0, 0, 0] = 1.0


@pytest.mark.parametrize(
    ("corrupt", "faults"),
    [
        (corrupt_owner, ["page 0 is listed under 'a' but says 'b'"]),
        (
            hold_twice,
            [
                "page 0 is held by 'a' and by 'b'",
                "listed under 'a' but says 'b'",
                "live bytes are 256 but the books say 128",
            ],
        ),
        (free_without_taking_back, ["free page 0 still says owner 'a'", "page 0 is free and held by 'a'"]),
        (free_and_disowned, ["page 0 is free and held by 'a'", "listed under 'a' but says None"]),
        (miscount, ["live bytes are 128 but the books say 129"]),
        (write_after_release, ["free page 0 was written after its release"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_audit_lists_every_violation(pool, corrupt, faults):
    page = pool.allocate("a", SMALL, CPU)
    assert pool.audit() == []
    corrupt(pool, page)
    found = pool.audit()
    assert len(found) == len(faults), found
    for fault in faults:
        assert any(fault in sentence for sentence in found), found


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model that is one dict: owner -> {page number: value that its rows hold}."""

    owners = st.sampled_from("abc")

    @initialize(poison=st.booleans())
    def start(self, poison):
        self.pool = PagePool(4, poison=poison)
        self.model = {}
        self.pages = {}
        self.released, self.free = [], []
        self.peak = 0
        self.counter = 0

    def live_bytes(self):
        return sum(self.pages[n].n_bytes for held in self.model.values() for n in held)

    @rule(owner=owners)
    def open(self, owner):
        if owner in self.model:
            with pytest.raises(LifecycleError):
                self.pool.open(owner)
        else:
            self.pool.open(owner)
            self.model[owner] = {}

    @rule(owner=owners, components=st.sampled_from([SMALL, WIDE]))
    def allocate(self, owner, components):
        if owner not in self.model:
            with pytest.raises(LifecycleError):
                self.pool.allocate(owner, components, CPU)
            return
        page = self.pool.allocate(owner, components, CPU)
        assert not any(page.number in held for held in self.model.values()), "a page is handed out once"
        self.counter += 1
        page.fill_(float(self.counter))
        self.model[owner][page.number] = self.counter
        self.pages[page.number] = page
        self.released = [p for p in self.released if p is not page]
        self.free = [p for p in self.free if p is not page]
        self.peak = max(self.peak, self.live_bytes())

    @rule(owner=owners)
    def release(self, owner):
        if owner not in self.model:
            with pytest.raises(UseAfterReleaseError):
                self.pool.release(owner)
            return
        self.given_back(self.model.pop(owner))
        self.pool.release(owner)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def release_one(self, data):
        owner = data.draw(st.sampled_from([o for o, held in self.model.items() if held]))
        number = data.draw(st.sampled_from(sorted(self.model[owner])))
        del self.model[owner][number]
        self.given_back([number])
        self.pool.release_pages(owner, [self.pages[number]])

    @rule()
    def trim(self):
        assert self.pool.trim() == sum(p.n_bytes for p in self.free)
        self.free = []

    def given_back(self, numbers):
        pages = [self.pages[n] for n in numbers]
        self.released += pages
        self.free += pages

    @invariant()
    def books_agree_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.audit() == []
        assert set(self.pool.owners) == set(self.model)
        assert self.pool.live_bytes == self.live_bytes()
        assert self.pool.peak_bytes == self.peak
        assert self.pool.free_bytes == sum(p.n_bytes for p in self.free)

    @invariant()
    def live_rows_hold_what_was_written_and_released_pages_raise(self):
        for held in getattr(self, "model", {}).values():
            for number, value in held.items():
                page = self.pages[number]
                assert all(bool((page.tensor(c.name) == value).all()) for c in page.components)
        for page in getattr(self, "released", []):
            with pytest.raises(UseAfterReleaseError):
                page.tensor(page.components[0].name)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25)
