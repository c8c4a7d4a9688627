"""Reading single rows of latent pages, and adding to their gradients, page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from ..state.resident import PagedView, Tensors

OfPage = Callable[[int], Tensors | None]
"""The gradients of a page by its index, to add to."""


class LatentPages(Protocol):
    """Rows on pages, components "latent" [T, R] and "k_rope" [T, Dr], as `PagedView` shows them."""

    @property
    def limit(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    def values(self, index: int) -> Tensors: ...
    def accumulators(self) -> AbstractContextManager[OfPage | None]: ...


class JoinedPages:
    """The first rows of a prefix whose memory is in one piece, as one page with the values `rows`."""

    def __init__(self, view: PagedView, rows: Tensors):
        self._view, self._rows = view, rows
        self.limit = view.limit
        self.page_tokens = max(1, view.limit)

    def values(self, index: int) -> Tensors:
        return self._rows

    @contextmanager
    def accumulators(self) -> Iterator[OfPage | None]:
        if not self._view.accumulate:
            yield None
            return
        (block,) = self._view.runs(with_grads=True)
        yield lambda index: block.grads


def joined(view: PagedView) -> LatentPages:
    """`view` as one page where its memory is in one piece: rows of hundreds of pages are then read at once."""
    if view.layer_state.stager is not None:  # gradients visit page by page
        return view
    blocks = list(view.runs())
    return JoinedPages(view, blocks[0].values) if len(blocks) == 1 else view


def rows_in_one_piece(pages: LatentPages, *, copy: bool = False) -> Tensors | None:
    """All rows of `pages`, of which there are some, where their memory is in one piece; `copy` joins pieces."""
    if not isinstance(pages, PagedView):
        return pages.values(0) if pages.limit <= pages.page_tokens else None
    blocks = [block.values for block in pages.runs()]
    if len(blocks) == 1:
        return blocks[0]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]} if copy else None


@contextmanager
def gradient_sums(pages: LatentPages) -> Iterator[Tensors | None]:
    """Gradients of all rows, to add to within the block as if their memory were in one piece; None where none are
    collected."""
    with pages.accumulators() as of_page:
        if of_page is None or not pages.limit:
            yield None
            return
        first, page_tokens = of_page(0), pages.page_tokens
        assert first is not None, "latents are differentiable"
        if pages.limit <= page_tokens:
            yield first
            return
        sums = {name: x.new_zeros(pages.limit, x.shape[-1]) for name, x in first.items()}
        yield sums
        for page in range(-(-pages.limit // page_tokens)):
            into = of_page(page)
            assert into is not None
            for name, total in into.items():
                total += sums[name][page * page_tokens :][: len(total)]


def page_bounds(pages: LatentPages, device: torch.device) -> torch.Tensor:
    """LongTensor: the first row of each page, and last the row behind all."""
    return torch.tensor([*range(0, pages.limit, pages.page_tokens), pages.limit], device=device)


class PageHits(NamedTuple):
    """Rows that are asked for, sorted, so that each page is visited once."""

    rows: torch.Tensor  # [N], ascending
    order: torch.Tensor  # [N], where each stands among those asked for
    edges: list[int]  # where the entries of each page begin in `rows`, and last where those behind all pages begin

    @classmethod
    def of(cls, asked: torch.Tensor, bounds: torch.Tensor) -> PageHits:
        """`asked` is a LongTensor [N], negative where nothing is; `bounds` are `page_bounds`."""
        rows, order = asked.sort()
        return cls(rows, order, torch.searchsorted(rows, bounds).tolist())

    def read(self, pages: LatentPages, out: torch.Tensor) -> None:
        """Write the rows that lie on pages to their places in `out` [N, R + Dr]."""
        for page, span in self._hit_pages():
            within = self.rows[span] - page * pages.page_tokens
            values = pages.values(page)
            out[self.order[span]] = torch.cat([values["latent"][within], values["k_rope"][within]], -1).to(out.dtype)

    def add(self, gradients: torch.Tensor, of_page: OfPage, page_tokens: int) -> None:
        """Add `gradients` [N, R + Dr] of the rows that lie on pages to those of the pages."""
        for page, span in self._hit_pages():
            sums = of_page(page)
            assert sums is not None, "latents are differentiable"
            within = self.rows[span] - page * page_tokens
            found = gradients[self.order[span]]
            rank = sums["latent"].shape[-1]
            sums["latent"].index_add_(0, within, found[:, :rank])
            sums["k_rope"].index_add_(0, within, found[:, rank:])

    def _hit_pages(self) -> Iterator[tuple[int, slice]]:
        for page, (begin, end) in enumerate(pairwise(self.edges)):
            if begin < end:
                yield page, slice(begin, end)
