"""The page pool: who owns a page, what its release means, and an audit that finds every broken book."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longstraw_sdk import LifecycleError, UseAfterReleaseError
from longstraw_sdk.state import Component, PagePool
from longstraw_sdk.state import pool as pool_module

CPU = torch.device("cpu")
SMALL = (Component("k", (2,), (3,), torch.float32), Component("v", (2,), (1,), torch.float32))
WIDE = (Component("latent", (), (5,), torch.float64),)
BYTES = {SMALL: 2 * 4 * (3 + 1) * 4, WIDE: 4 * 5 * 8}


def allocate(pool, owner, components):
    """One page."""
    [page] = pool.allocate(owner, components, CPU)
    return page


@pytest.fixture
def pool():
    pool = PagePool(4, poison=True)
    pool.open("a")
    pool.open("b")
    return pool


def test_a_page_has_the_shape_dtype_and_owner_it_was_asked_for(pool):
    page = allocate(pool, "a", SMALL)
    assert page.owner == "a"
    assert page.tensor("k").shape == (2, 4, 3)
    assert page.tensor("v").shape == (2, 4, 1)
    assert page.n_bytes == pool.live_bytes == BYTES[SMALL]
    assert allocate(pool, "a", WIDE).tensor("latent").dtype == torch.float64
    assert pool.audit() == []


def test_pages_never_share_memory(pool):
    pages = [allocate(pool, owner, SMALL) for owner in "abab"]
    for i, page in enumerate(pages):
        page.fill_(float(i))
    assert [float(p.tensor(n).mean()) for p in pages for n in "kv"] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_pages_asked_for_together_are_one_tensor(pool):
    allocate(pool, "b", SMALL)
    pages = pool.allocate("a", SMALL, CPU, 3)
    assert [a.is_followed_by(b) for a, b in pairwise(pages)] == [True, True]
    assert not pages[2].is_followed_by(pages[1])
    for i, page in enumerate(pages):
        page.fill_(float(i))
    rows = pages[0].slab.rows(pages[0].start, pages[2].end)
    assert rows["k"].shape == (2, 12, 3)
    assert rows["k"][1, :, 2].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert rows["k"].movedim(1, 0).is_contiguous(), "token after token"
    assert pool.audit() == []


def test_adjacent_free_pages_are_reused_together(pool):
    whole = pool.allocate("a", SMALL, CPU, 4)
    pool.release_pages("a", [whole[0], whole[2], whole[3]])
    assert pool.allocate("b", SMALL, CPU, 2) == whole[2:], "page 1 is held"
    assert allocate(pool, "b", SMALL) is whole[0]
    assert pool.free_bytes == 0
    assert pool.audit() == []


def test_free_memory_that_is_too_small_is_dropped_for_what_is_needed(pool):
    held = pool.allocate("b", SMALL, CPU, 2)
    memory = weakref.ref(pool.allocate("a", SMALL, CPU, 2)[0].slab.tensors["k"])
    pool.release("a")
    pool.release_pages("b", held[:1])
    assert pool.free_bytes == 3 * BYTES[SMALL]
    pool.allocate("b", SMALL, CPU, 3)
    assert memory() is None
    assert pool.free_bytes == BYTES[SMALL], "its neighbour is held"
    assert pool.audit() == []


def test_allocating_page_by_page_does_not_search_held_pages(pool, monkeypatch):
    """A prompt of a million tokens in host memory has thousands of pages, each on a slab of its own."""
    searched = []
    sound = pool_module._free_run
    monkeypatch.setattr(pool_module, "_free_run", lambda slab, n: searched.append(n) or sound(slab, n))
    pages = [allocate(pool, "a", SMALL) for _ in range(50)]
    assert not searched
    pool.release_pages("a", pages[20:22])
    assert allocate(pool, "a", SMALL) in pages[20:22]
    assert len(searched) == 1


def test_a_write_is_counted_for_its_page_alone_and_one_through_the_slab_for_all(pool):
    pages = pool.allocate("a", SMALL, CPU, 2)
    before = [page.version("k") for page in pages]
    pages[1].tensor("k")[0, 0] = 1.0
    assert [page.version("k") for page in pages] == [before[0], before[1] + 1]
    pages[0].slab.rows(1, 2)["k"].zero_()
    assert [page.version("k") for page in pages] == [before[0] + 1, before[1] + 2]
    assert pages[1].version("v") == pages[0].version("v")


def test_only_an_open_owner_gets_pages(pool):
    with pytest.raises(LifecycleError, match="owner 'c' is not open"):
        allocate(pool, "c", SMALL)
    with pytest.raises(LifecycleError, match="owner 'a' is open already"):
        pool.open("a")
    pool.release("a")
    with pytest.raises(LifecycleError, match=r"owner 'a' is not open.*released already"):
        allocate(pool, "a", SMALL)
    pool.open("a")
    allocate(pool, "a", SMALL)
    assert pool.owners == ("b", "a")


def test_release_takes_every_page_of_one_owner_and_no_other(pool):
    mine, others = [allocate(pool, "a", SMALL) for _ in range(3)], allocate(pool, "b", SMALL)
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
    first, second = (allocate(pool, "a", SMALL) for _ in range(2))
    with pytest.raises(UseAfterReleaseError, match="page 0 belongs to 'a', not to 'b'"):
        pool.release_pages("b", [first])
    pool.release_pages("a", [first])
    with pytest.raises(UseAfterReleaseError, match="page 0 belongs to None, not to 'a'"):
        pool.release_pages("a", [first])
    assert second.tensor("k").shape == (2, 4, 3)
    assert pool.live_bytes == BYTES[SMALL]
    assert pool.audit() == []


def test_freed_pages_are_reused_for_the_same_components_only(pool):
    page = allocate(pool, "a", SMALL)
    pointer = page.tensor("k").data_ptr()
    pool.release("a")
    wide = allocate(pool, "b", WIDE)
    assert wide is not page
    again = allocate(pool, "b", SMALL)
    assert again is page
    assert again.tensor("k").data_ptr() == pointer
    assert again.owner == "b"
    assert pool.free_bytes == 0


def test_peak_bytes_is_the_largest_live_bytes_there_ever_was(pool):
    for _ in range(3):
        allocate(pool, "a", SMALL)
    pool.release("a")
    allocate(pool, "b", WIDE)
    assert pool.live_bytes == BYTES[WIDE]
    assert pool.peak_bytes == 3 * BYTES[SMALL]


def test_trim_frees_memory_and_returns_its_bytes(pool):
    page = allocate(pool, "a", SMALL)
    kept = allocate(pool, "b", WIDE)
    memory = weakref.ref(page.slab.tensors["k"])
    pool.release("a")
    del page
    gc.collect()
    assert memory() is not None, "a free page is kept for reuse"
    gc.disable()
    try:
        assert pool.trim() == BYTES[SMALL]
        assert memory() is None, "at once, without the garbage collector"
    finally:
        gc.enable()
    assert pool.free_bytes == pool.trim() == 0
    assert kept.tensor("latent").shape == (4, 5)
    assert pool.audit() == []


def test_poison_fills_new_and_released_pages_with_nan(pool):
    page = allocate(pool, "a", SMALL)
    assert page.tensor("k").isnan().all()
    tensor = page.tensor("k").fill_(1.0)
    pool.release("a")
    assert tensor.isnan().all()
    plain = PagePool(4)
    plain.open("a")
    tensor = allocate(plain, "a", SMALL).tensor("k").fill_(1.0)
    plain.release("a")
    assert (tensor == 1).all(), "control: without poison nothing is written"


def corrupt_owner(pool, page):
    page.owner = "b"


def hold_twice(pool, page):
    pool._live["b"].append(page)
    page.owner = "b"


def disown(pool, page):
    page.owner = None


def forget(pool, page):
    pool._live["a"].remove(page)
    pool.live_bytes -= page.n_bytes
    page.fill_(float("nan"))


def drop_held(pool, page):
    pool._slabs.clear()


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
        (disown, ["listed under 'a' but says None"]),
        (forget, ["page 0 says 'a', who does not list it"]),
        (drop_held, ["page 0 is held by 'a' but is not in the pool"]),
        (miscount, ["live bytes are 128 but the books say 129"]),
        (write_after_release, ["free page 0 was written after its release"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_audit_lists_every_violation(pool, corrupt, faults):
    page = allocate(pool, "a", SMALL)
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

    @rule(owner=owners, components=st.sampled_from([SMALL, WIDE]), n_pages=st.integers(1, 3))
    def allocate(self, owner, components, n_pages):
        if owner not in self.model:
            with pytest.raises(LifecycleError):
                self.pool.allocate(owner, components, CPU, n_pages)
            return
        pages = self.pool.allocate(owner, components, CPU, n_pages)
        assert len(pages) == n_pages
        assert all(a.is_followed_by(b) for a, b in pairwise(pages))
        if not any(p is pages[0] for p in self.free):
            self.drop_free(components)
        for page in pages:
            assert not any(page.number in held for held in self.model.values()), "a page is handed out once"
            self.counter += 1
            page.fill_(float(self.counter))
            self.model[owner][page.number] = self.counter
            self.pages[page.number] = page
        self.released = [p for p in self.released if p not in pages]
        self.free = [p for p in self.free if p not in pages]
        self.peak = max(self.peak, self.live_bytes())

    def drop_free(self, components=None):
        """What the pool forgets: free pages whose slab has no held one."""
        held = {id(self.pages[n].slab) for numbers in self.model.values() for n in numbers}
        self.free = [p for p in self.free if id(p.slab) in held or components not in (None, p.slab.components)]

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
        before = sum(p.n_bytes for p in self.free)
        self.drop_free()
        assert self.pool.trim() == before - sum(p.n_bytes for p in self.free)

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
                assert all(bool((page.tensor(c.name) == value).all()) for c in page.slab.components)
        for page in getattr(self, "released", []):
            with pytest.raises(UseAfterReleaseError):
                page.tensor(page.slab.components[0].name)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25)
