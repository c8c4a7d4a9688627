"""Pages and who owns them.

A page holds `page_tokens` rows of one layer's state. Pages are handed out to an owner, released explicitly, and reused.
Reading a released page raises, and `audit()` lists every violation of the pool's own books.

Pages that are asked for together lie next to each other in memory, so that kernels can read them as one tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from ..errors import LifecycleError, UseAfterReleaseError
from .specs import Component


class Slab:
    """Memory of adjacent pages: one tensor per component, contiguous token after token."""

    def __init__(self, components: tuple[Component, ...], n_tokens: int, device: torch.device, *, pinned: bool):
        self.components = components
        self.device = device
        self.n_free = 0
        """Free pages."""
        self.tensors = {c.name: c.empty_rows(n_tokens, device, pinned=pinned) for c in components}

    def rows(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Name -> `leading + (end - start,) + trailing`."""
        return {c.name: self.tensors[c.name].narrow(c.token_dim, start, end - start) for c in self.components}


class Page:
    """One page: a named set of tensors, each `leading + (page_tokens,) + trailing`. Obtain it from `PagePool`."""

    def __init__(self, slab: Slab, start: int, end: int, number: int):
        self.slab = slab
        self.start, self.end = start, end
        self.number = number
        self.owner: str | None = None
        # Through `.data` each page counts its own writes, which is how a witness can name the page.
        self._tensors = {name: rows.data for name, rows in slab.rows(start, end).items()}
        self.n_bytes = sum(t.nbytes for t in self._tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """The whole page of component `name`. Raises `UseAfterReleaseError` once the page was released."""
        if self.owner is None:
            raise UseAfterReleaseError(
                f"page {self.number} ({name}) was released; keep the prefix open (inside its `with` block) until every "
                "backward pass that reads it has run"
            )
        return self._tensors[name]

    def version(self, name: str) -> int:
        """Counts writes to component `name`, through this page or through its slab."""
        return self._tensors[name]._version + self.slab.tensors[name]._version

    def is_followed_by(self, other: Page) -> bool:
        return self.slab is other.slab and self.end == other.start

    def fill_(self, value: float) -> None:
        for tensor in self._tensors.values():
            tensor.fill_(value)


_Kind = tuple[tuple[Component, ...], torch.device]


class PagePool:
    """Allocates pages to owners, takes them back, reuses them.

    Args:
        page_tokens: rows per page.
        poison: fill every page with NaN when it is handed out and when it comes back, so that any read of a row that
            was never written is loud. Costs one write of each page; meant for tests and debugging.
    """

    def __init__(self, page_tokens: int, *, poison: bool = False):
        self.page_tokens = page_tokens
        self.poison = poison
        self._live: dict[str, list[Page]] = {}
        # Slabs do not know their pages: memory of a cycle would wait for a collection.
        self._slabs: dict[_Kind, dict[Slab, list[Page]]] = defaultdict(dict)
        self._with_free: dict[_Kind, dict[Slab, list[Page]]] = defaultdict(dict)
        self._next_number = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def open(self, owner: str) -> None:
        """Register `owner`; pages can only be handed to an open owner."""
        if owner in self._live:
            raise LifecycleError(f"owner {owner!r} is open already")
        self._live[owner] = []

    def allocate(
        self,
        owner: str,
        components: Sequence[Component],
        device: torch.device,
        n_pages: int = 1,
        *,
        pinned: bool = False,
    ) -> list[Page]:
        """Hand `n_pages` adjacent pages to `owner`. Their content is undefined (NaN under `poison`).

        `pinned` host memory is what copies to a GPU while it computes.
        """
        if owner not in self._live:
            raise LifecycleError(f"owner {owner!r} is not open: open it first, or it was released already")
        kind = (tuple(components), device)
        pages = next((run for held in self._with_free[kind].values() if (run := _free_run(held, n_pages))), None)
        if pages is None:
            self._drop_free(kind)  # all too small, and the new slab may need their memory
            pages = self._new_slab(kind, n_pages, pinned=pinned)
        slab = pages[0].slab
        slab.n_free -= n_pages
        if not slab.n_free:
            del self._with_free[kind][slab]
        for page in pages:
            page.owner = owner
            if self.poison:
                page.fill_(float("nan"))
            self.live_bytes += page.n_bytes
        self._live[owner] += pages
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return pages

    def _new_slab(self, kind: _Kind, n_pages: int, *, pinned: bool) -> list[Page]:
        n = self.page_tokens
        slab = Slab(kind[0], n_pages * n, kind[1], pinned=pinned)
        slab.n_free = n_pages
        pages = [Page(slab, i * n, (i + 1) * n, self._next_number + i) for i in range(n_pages)]
        self._next_number += n_pages
        self._slabs[kind][slab] = self._with_free[kind][slab] = pages
        return list(pages)

    def _drop_free(self, kind: _Kind) -> None:
        """Forget slabs that hold free pages only."""
        for slab, pages in list(self._with_free[kind].items()):
            if slab.n_free == len(pages):
                del self._slabs[kind][slab], self._with_free[kind][slab]

    def release_pages(self, owner: str, pages: Sequence[Page]) -> None:
        """Take single pages back while `owner` stays open."""
        for page in pages:
            if page.owner != owner:
                raise UseAfterReleaseError(f"page {page.number} belongs to {page.owner!r}, not to {owner!r}")
        taken = set(pages)
        self._live[owner] = [page for page in self._live[owner] if page not in taken]
        for page in taken:
            self._take_back(page)

    def release(self, owner: str) -> None:
        """Take back every page of `owner` and close it. Releasing twice raises."""
        if owner not in self._live:
            raise UseAfterReleaseError(f"owner {owner!r} was released already, or never opened")
        for page in self._live.pop(owner):
            self._take_back(page)

    def _take_back(self, page: Page) -> None:
        if self.poison:
            page.fill_(float("nan"))
        page.owner = None
        kind = (page.slab.components, page.slab.device)
        page.slab.n_free += 1
        self._with_free[kind][page.slab] = self._slabs[kind][page.slab]
        self.live_bytes -= page.n_bytes

    def trim(self) -> int:
        """Drop all memory that holds free pages only, and return its bytes."""
        before = self.free_bytes
        for kind in list(self._with_free):
            self._drop_free(kind)
        return before - self.free_bytes

    @property
    def free_bytes(self) -> int:
        return sum(page.n_bytes for page in self._pages() if page.owner is None)

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._live)

    def _pages(self) -> Iterator[Page]:
        for slabs in self._slabs.values():
            for pages in slabs.values():
                yield from pages

    def audit(self) -> list[str]:
        """Every violation of the books, one sentence each; an empty list is a clean pool."""
        faults: list[str] = []
        holder: dict[int, str] = {}
        for owner, pages in self._live.items():
            for page in pages:
                if page.owner != owner:
                    faults.append(f"page {page.number} is listed under {owner!r} but says {page.owner!r}")
                if page.number in holder:
                    faults.append(f"page {page.number} is held by {holder[page.number]!r} and by {owner!r}")
                holder[page.number] = owner
        known = set()
        for page in self._pages():
            known.add(page.number)
            if page.number in holder:
                continue
            if page.owner is not None:
                faults.append(f"page {page.number} says {page.owner!r}, who does not list it")
            if self.poison and not all(bool(t.isnan().all()) for t in page._tensors.values()):
                faults.append(f"free page {page.number} was written after its release")
        faults += [f"page {n} is held by {holder[n]!r} but is not in the pool" for n in holder if n not in known]
        live = sum(page.n_bytes for pages in self._live.values() for page in pages)
        if live != self.live_bytes:
            faults.append(f"live bytes are {live} but the books say {self.live_bytes}")
        return faults


def _free_run(slab: list[Page], n_pages: int) -> list[Page]:
    """The first `n_pages` free pages that lie next to each other; [] if there are not so many."""
    first = 0
    for i, page in enumerate(slab):
        if page.owner is not None:
            first = i + 1
        elif i + 1 - first == n_pages:
            return slab[first : i + 1]
    return []
