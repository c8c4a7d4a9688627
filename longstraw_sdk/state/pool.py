"""Pages and who owns them.

A page holds `page_tokens` rows of one layer's state. Pages are handed out to an owner, released explicitly, and reused.
Reading a released page raises, and `audit()` lists every violation of the pool's own books.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ..errors import LifecycleError, UseAfterReleaseError
from .specs import Component

_FreeKey = tuple[tuple[Component, ...], torch.device]


class Page:
    """One page: a named set of tensors, each `leading + (page_tokens,) + trailing`. Obtain it from `PagePool`."""

    def __init__(self, components: tuple[Component, ...], page_tokens: int, device: torch.device, number: int):
        self.components = components
        self.number = number
        self.device = device
        self.owner: str | None = None
        # Only pinned host memory is copied while a GPU computes.
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self._tensors = {
            c.name: torch.empty(c.page_shape(page_tokens), dtype=c.dtype, device=device, pin_memory=pinned)
            for c in components
        }

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self._tensors.values())

    def tensor(self, name: str) -> torch.Tensor:
        """The whole page of component `name`. Raises `UseAfterReleaseError` once the page was released."""
        if self.owner is None:
            raise UseAfterReleaseError(
                f"page {self.number} ({name}) was released; keep the prefix open (inside its `with` block) until every "
                "backward pass that reads it has run"
            )
        return self._tensors[name]

    def fill_(self, value: float) -> None:
        for tensor in self._tensors.values():
            tensor.fill_(value)


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
        self._free: dict[_FreeKey, list[Page]] = defaultdict(list)
        self._next_number = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def open(self, owner: str) -> None:
        """Register `owner`; pages can only be handed to an open owner."""
        if owner in self._live:
            raise LifecycleError(f"owner {owner!r} is open already")
        self._live[owner] = []

    def allocate(self, owner: str, components: Sequence[Component], device: torch.device) -> Page:
        """Hand one page to `owner`. Its content is undefined (NaN under `poison`)."""
        if owner not in self._live:
            raise LifecycleError(f"owner {owner!r} is not open: open it first, or it was released already")
        key = (tuple(components), device)
        if self._free[key]:
            page = self._free[key].pop()
        else:
            page = Page(key[0], self.page_tokens, device, self._next_number)
            self._next_number += 1
        page.owner = owner
        if self.poison:
            page.fill_(float("nan"))
        self._live[owner].append(page)
        self.live_bytes += page.n_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return page

    def release_pages(self, owner: str, pages: Sequence[Page]) -> None:
        """Take single pages back while `owner` stays open."""
        for page in pages:
            if page.owner != owner:
                raise UseAfterReleaseError(f"page {page.number} belongs to {page.owner!r}, not to {owner!r}")
            self._live[owner].remove(page)
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
        self.live_bytes -= page.n_bytes
        self._free[(page.components, page.device)].append(page)

    def trim(self) -> int:
        """Drop all free pages and return their bytes."""
        freed = self.free_bytes
        self._free.clear()
        return freed

    @property
    def free_bytes(self) -> int:
        return sum(page.n_bytes for pages in self._free.values() for page in pages)

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._live)

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
        for pages in self._free.values():
            for page in pages:
                if page.owner is not None:
                    faults.append(f"free page {page.number} still says owner {page.owner!r}")
                if page.number in holder:
                    faults.append(f"page {page.number} is free and held by {holder[page.number]!r}")
                if self.poison and not all(bool(t.isnan().all()) for t in page._tensors.values()):
                    faults.append(f"free page {page.number} was written after its release")
        live = sum(page.n_bytes for pages in self._live.values() for page in pages)
        if live != self.live_bytes:
            faults.append(f"live bytes are {live} but the books say {self.live_bytes}")
        return faults
