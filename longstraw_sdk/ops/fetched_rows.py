"""Selected rows of a prefix that is split over ranks, brought to the queries that selected them.

A row that several queries of a rank select travels to it once. Gradients travel back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from ..state.resident import PagedView, Tensors
from ..types import accumulation_dtype
from .sparse_selection import NOT_SELECTED


class FetchedRows:
    """The rows of `view` that `selected` names, as one page. `selected` counts in these rows, new ones behind them.

    Making it, and leaving `accumulators()`, are collective.

    Args:
        view: this rank's rows of a split prefix, components "latent" and "k_rope".
        selected: LongTensor of positions, any shape, `NOT_SELECTED` where there is none.
    """

    def __init__(self, view: PagedView, selected: torch.Tensor):
        assert view.row_map is not None
        self.view, self.context = view, view.row_map.context
        resident = (selected != NOT_SELECTED) & (selected < view.first_new)
        positions = selected[resident].unique()
        keeper, row = view.row_map.locate(positions)
        self._order = keeper.argsort(stable=True)
        n_asked = keeper.bincount(minlength=self.context.size)
        n_served = self.context.exchange(n_asked[:, None])[:, 0]
        self._n_asked, self._n_served = n_asked.tolist(), n_served.tolist()
        served = self.context.exchange_uneven(row[self._order], self._n_asked, self._n_served)
        self._served, self._by_page = served.sort()

        found = self.context.exchange_uneven(self._read(), self._n_served, self._n_asked)
        self._rows = torch.empty_like(found)
        self._rows[self._order] = found
        self.limit = len(positions)
        self.page_tokens = max(1, self.limit)
        behind = torch.where(selected == NOT_SELECTED, NOT_SELECTED, self.limit + selected - view.first_new)
        self.selected = torch.where(resident, torch.searchsorted(positions, selected.contiguous()), behind)

    def values(self, index: int) -> Tensors:
        return self._named(self._rows)

    @contextmanager
    def accumulators(self) -> Iterator[Callable[[int], Tensors | None] | None]:
        if not self.view.accumulate:
            yield None
            return
        sums = torch.zeros(self._rows.shape, dtype=accumulation_dtype(self._rows.dtype), device=self._rows.device)
        yield lambda index: self._named(sums)
        self._add(self.context.exchange_uneven(sums[self._order], self._n_asked, self._n_served))

    def _named(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        rank = self.view.layer_state.components[0].trailing[0]
        return {"latent": rows[:, :rank], "k_rope": rows[:, rank:]}

    def _read(self) -> torch.Tensor:
        """What other ranks asked for, [N, R + Dr]."""
        components = self.view.layer_state.components
        rows = torch.empty(
            len(self._served), sum(c.trailing[0] for c in components), dtype=components[0].dtype,
            device=self._served.device,
        )  # fmt: skip
        for page, span in self._pages():
            values = self.view.values(page)
            within = self._served[span] - page * self.view.page_tokens
            rows[self._by_page[span]] = torch.cat([values["latent"][within], values["k_rope"][within]], -1)
        return rows

    def _add(self, gradients: torch.Tensor) -> None:
        with self.view.accumulators() as of_page:
            assert of_page is not None
            for page, span in self._pages():
                sums = of_page(page)
                assert sums is not None, "latents are differentiable"
                within = self._served[span] - page * self.view.page_tokens
                for name, found in self._named(gradients[self._by_page[span]]).items():
                    sums[name].index_add_(0, within, found)

    def _pages(self) -> Iterator[tuple[int, slice]]:
        size = self.view.page_tokens
        bounds = torch.arange(0, self.view.limit + size, size, device=self._served.device)
        edges = torch.searchsorted(self._served, bounds).tolist()
        for page, (begin, end) in enumerate(pairwise(edges)):
            if begin < end:
                yield page, slice(begin, end)
