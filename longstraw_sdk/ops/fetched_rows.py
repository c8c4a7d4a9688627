"""Selected rows of a prefix that is split over ranks, brought to the queries that selected them.

A row that several queries of a rank select travels to it once. Gradients travel back the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..state.resident import PagedView, Tensors
from ..types import accumulation_dtype
from .latent_pages import LatentPages, OfPage, PageHits, joined, page_bounds
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
        self._served = PageHits.of(served, page_bounds(view, served.device))

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
    def accumulators(self) -> Iterator[OfPage | None]:
        if not self.view.accumulate:
            yield None
            return
        sums = torch.zeros(self._rows.shape, dtype=accumulation_dtype(self._rows.dtype), device=self._rows.device)
        yield lambda index: self._named(sums)
        found = self.context.exchange_uneven(sums[self._order], self._n_asked, self._n_served)
        with self.view.accumulators() as of_page:
            assert of_page is not None
            self._served.add(found, of_page, self.view.page_tokens)

    def _named(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        rank = self.view.layer_state.components[0].trailing[0]
        return {"latent": rows[:, :rank], "k_rope": rows[:, rank:]}

    def _read(self) -> torch.Tensor:
        """What other ranks asked for, [N, R + Dr]."""
        components, asked = self.view.layer_state.components, self._served.rows
        width = sum(c.trailing[0] for c in components)
        rows = torch.empty(len(asked), width, dtype=components[0].dtype, device=asked.device)
        self._served.read(self.view, rows)
        return rows


def reachable(
    view: PagedView, selected: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor
) -> tuple[LatentPages, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Resident rows, the selection in terms of them, and all new rows, once everything selected is on this rank."""
    if view.context is None:
        return joined(view), selected, latent, key_rope
    fetched = FetchedRows(view, selected)
    if view.split:
        latent, key_rope = (view.context.gather_tokens(x) for x in (latent, key_rope))
    return fetched, fetched.selected, latent, key_rope


def own_part(d_new: torch.Tensor, view: PagedView) -> torch.Tensor:
    """Gradient of this rank's new rows, summed over the ranks that attended to them."""
    if view.context is None or not view.split:
        return d_new
    return view.context.sum_scatter(view.context.by_rank(d_new))
