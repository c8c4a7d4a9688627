"""The resident state of one prompt: pages, boundary states and, in full scope, their gradient accumulators.

Capture appends to it, replays and the sweep read it through views. Its values never change after capture; only the
accumulators do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import UseAfterReleaseError
from ..types import accumulation_dtype
from .context import ContextGroup, RowMap, TokenSlice
from .pool import Page, PagePool
from .specs import Component, PagedSpec, RecurrentSpec, StateKey, StateSpec, min_forward_tokens
from .staging import Link, PageTensors, Stager

Tensors = Mapping[str, torch.Tensor]


class Block(NamedTuple):
    """The valid rows of one page, or of adjacent ones. `grads` is None where gradients are not collected."""

    values: Tensors
    grads: Tensors | None


class PagedLayerState:
    """Rows of one layer, one per prefix token that this rank runs, on pages owned by one prompt.

    `expected_tokens` is how many rows will come; their pages then lie next to each other.
    """

    def __init__(self, spec: PagedSpec, pool: PagePool, owner: str, device: torch.device, expected_tokens: int = 0):
        self.spec = spec
        self.components = spec.components
        self.device = device
        self.expected_tokens = expected_tokens
        self.stager: Stager | None = None
        """Set where pages live in host memory: what is read, and gradients that are collected, pass through it."""
        self.n_tokens = 0
        self.pages: list[Page] = []
        self.has_gradient = False
        self._accumulators: list[Page] = []
        self._pool = pool
        self._owner = owner

    def append(self, rows: Tensors) -> None:
        """Copy `rows` (name -> [1, *leading, T, *trailing]) behind the rows that are there."""
        if not self.pages:  # autocast may produce another dtype than the weights have
            self.components = tuple(replace(c, dtype=rows[c.name].dtype) for c in self.components)
        n_new = rows[self.components[0].name].shape[self.components[0].token_dim + 1]
        done = 0
        while done < n_new:
            index, used = divmod(self.n_tokens, self.page_tokens)
            if index == len(self.pages):
                self._add_pages(n_new - done)
            n = min(self.page_tokens - used, n_new - done)
            for c in self.components:
                source = rows[c.name][0].narrow(c.token_dim, done, n)
                self.pages[index].tensor(c.name).narrow(c.token_dim, used, n).copy_(source)
            self.n_tokens += n
            done += n

    def _add_pages(self, n_tokens: int) -> None:
        """Pages for at least one of `n_tokens` further rows."""
        # In host memory one by one: PyTorch rounds each pinned allocation up to a power of two.
        wanted = 1 if self.stager is not None else max(n_tokens, self.expected_tokens - self.n_tokens)
        n_pages = -(-wanted // self.page_tokens)
        self.pages += self._pool.allocate(self._owner, self.components, self.device, n_pages, pinned=self._pinned)

    @property
    def _pinned(self) -> bool:
        return self.stager is not None and self.stager.device.type == "cuda"

    @property
    def page_tokens(self) -> int:
        return self._pool.page_tokens

    @property
    def compute_device(self) -> torch.device:
        return self.device if self.stager is None else self.stager.device

    def first_rows(self, rows: Tensors, n: int) -> dict[str, torch.Tensor]:
        """The first `n` of `rows` (name -> [1, *leading, T, *trailing]), without the padding of a slice."""
        found = {}
        for c in self.components:
            whole = rows[c.name].shape[c.token_dim + 1] == n
            # A narrowed root would copy its gradient, for all layers before the first of them is used.
            found[c.name] = rows[c.name] if whole else rows[c.name].narrow(c.token_dim + 1, 0, n)
        return found

    def values(self, index: int, limit: int) -> Tensors:
        """Page `index` of the first `limit` rows, on the compute device."""
        page = self.pages[index]
        whole = {c.name: page.tensor(c.name) for c in self.components}  # a released page raises, staged or not
        first = index * self.page_tokens
        n = min(self.page_tokens, limit - first)
        if self.stager is not None:
            return self._staged_rows(first, n)
        return {c.name: whole[c.name].narrow(c.token_dim, 0, n) for c in self.components}

    def _staged_rows(self, first: int, n: int) -> dict[str, torch.Tensor]:
        assert self.stager is not None
        staged = self.stager.fetch(self.spec.layer)[self.spec.key]
        return {c.name: staged[c.name].narrow(0, first, n).movedim(0, c.token_dim) for c in self.components}

    @contextmanager
    def accumulators(self, limit: int) -> Iterator[Callable[[int], Tensors | None]]:
        """Within the block, the gradients of a page by its index, to add to; None if the state is not differentiable.

        Those of pages in host memory visit the compute device for the length of the block.
        """
        visiting: dict[int, tuple[Tensors, Tensors]] = {}

        def of_page(index: int) -> Tensors | None:
            if not self._accumulator_components:
                return None
            self._ensure_accumulators()
            self.has_gradient = True
            n = min(self.page_tokens, limit - index * self.page_tokens)
            sums = _rows(self._accumulators[index], self._accumulator_components, 0, n)
            if self.stager is None:
                return sums
            if index not in visiting:
                visiting[index] = (
                    sums,
                    {name: total.to(self.stager.device, copy=True) for name, total in sums.items()},
                )
            return visiting[index][1]

        yield of_page
        for sums, visitors in visiting.values():
            for name, total in sums.items():
                total.copy_(visitors[name])

    def blocks(self, limit: int, *, with_grads: bool = False) -> Iterator[Block]:
        """The first `limit` rows, page by page. `with_grads` hands out gradients to add to until the next page."""
        for index in range(-(-limit // self.page_tokens)):
            values = self.values(index, limit)
            if not with_grads:
                yield Block(values, None)
                continue
            with self.accumulators(limit) as of_page:
                yield Block(values, of_page(index))

    def runs(self, limit: int, *, with_grads: bool = False) -> Iterator[Block]:
        """The first `limit` rows in as few blocks as memory allows, usually one; gradients as in `blocks`."""
        if self.stager is not None:
            if with_grads:  # gradients visit page by page
                yield from self.blocks(limit, with_grads=True)
            elif limit:
                self.values(0, limit)  # a released page raises
                yield Block(self._staged_rows(0, limit), None)
            return
        if with_grads and limit and self._accumulator_components:
            self._ensure_accumulators()
            self.has_gradient = True
        for first, last in self._adjacent(-(-limit // self.page_tokens)):
            n = min(limit, (last + 1) * self.page_tokens) - first * self.page_tokens
            sums = _adjacent_rows(self._accumulators[first : last + 1], n) if with_grads else None
            yield Block(_adjacent_rows(self.pages[first : last + 1], n), sums or None)

    def _adjacent(self, n_pages: int) -> Iterator[tuple[int, int]]:
        """First and last index of pages that lie next to each other, and so do their accumulators."""
        first = 0
        for index in range(n_pages):
            together = index + 1 < n_pages and all(
                pages[index].is_followed_by(pages[index + 1]) for pages in (self.pages, self._accumulators) if pages
            )
            if not together:
                yield first, index
                first = index + 1

    def page_tensors(self) -> PageTensors:
        """The pages for staging, token after token: name -> [page_tokens, *leading, *trailing]."""
        return [{c.name: page.tensor(c.name).movedim(c.token_dim, 0) for c in self.components} for page in self.pages]

    def cotangents(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Collected gradients of rows `start` to `end`: name -> [1, *leading, end - start, *trailing]; {} if none."""
        if not self.has_gradient:
            return {}
        if start == end:
            return {
                c.name: torch.zeros(1, *c.leading, 0, *c.trailing, dtype=c.dtype, device=self.compute_device)
                for c in self._accumulator_components
            }
        self._ensure_accumulators()  # a context's rank may hold rows that nothing read
        page_tokens = self._pool.page_tokens
        pieces: dict[str, list[torch.Tensor]] = {c.name: [] for c in self._accumulator_components}
        for index in range(start // page_tokens, -(-end // page_tokens)):
            first = max(start - index * page_tokens, 0)
            last = min(end - index * page_tokens, page_tokens)
            for name, rows in _rows(self._accumulators[index], self._accumulator_components, first, last).items():
                pieces[name].append(rows)
        dims = {c.name: c.token_dim for c in self.components}
        return {name: torch.cat(parts, dims[name])[None] for name, parts in pieces.items()}

    def drop_accumulators(self) -> None:
        self._pool.release_pages(self._owner, self._accumulators)
        self._accumulators = []
        self.has_gradient = False

    @property
    def n_bytes(self) -> int:
        return sum(page.n_bytes for page in self.pages) + sum(page.n_bytes for page in self._accumulators)

    @property
    def differentiable(self) -> bool:
        return any(c.differentiable for c in self.components)

    @property
    def _accumulator_components(self) -> tuple[Component, ...]:
        return tuple(replace(c, dtype=accumulation_dtype(c.dtype)) for c in self.components if c.differentiable)

    def _ensure_accumulators(self) -> None:
        components = self._accumulator_components
        while missing := len(self.pages) - len(self._accumulators):
            n_pages = 1 if self.stager is not None else missing
            pages = self._pool.allocate(self._owner, components, self.device, n_pages, pinned=self._pinned)
            for page in pages:
                page.fill_(0.0)
            self._accumulators += pages


def _adjacent_rows(pages: Sequence[Page], n: int) -> dict[str, torch.Tensor]:
    """The first `n` rows of adjacent pages; {} of no pages."""
    for page in pages:
        for name in page.slab.tensors:
            page.tensor(name)  # a released page raises
    return pages[0].slab.rows(pages[0].start, pages[0].start + n) if pages else {}


def _rows(page: Page, components: Sequence[Component], start: int, end: int) -> dict[str, torch.Tensor]:
    return {c.name: page.tensor(c.name).narrow(c.token_dim, start, end - start) for c in components}


class PagedView(NamedTuple):
    """What one forward may read of a layer: its first `limit` rows; `accumulate` collects their gradients.

    With a `row_map` other rows are on other ranks, and `split` says whether the new tokens are split as well or are the
    same on every rank. `n_tokens` counts the prefix tokens on all ranks, None if this one has them all.
    """

    layer_state: PagedLayerState
    limit: int
    accumulate: bool
    row_map: RowMap | None = None
    split: bool = False
    n_tokens: int | None = None

    @property
    def context(self) -> ContextGroup | None:
        return None if self.row_map is None else self.row_map.context

    @property
    def first_new(self) -> int:
        """Position of the first token behind the prefix."""
        return self.limit if self.n_tokens is None else self.n_tokens

    @property
    def page_tokens(self) -> int:
        return self.layer_state.page_tokens

    def values(self, index: int) -> Tensors:
        return self.layer_state.values(index, self.limit)

    def accumulators(self) -> AbstractContextManager[Callable[[int], Tensors | None] | None]:
        """Gradients of a page by its index, to add to within the block; None where gradients are not collected."""
        return self.layer_state.accumulators(self.limit) if self.accumulate else nullcontext()

    def mark_gradient(self) -> None:
        """Gradients are being collected, even if this rank holds no row: sweeps take the same path on all ranks."""
        if self.accumulate and self.first_new:
            self.layer_state.has_gradient |= self.layer_state.differentiable

    def blocks(self, *, with_grads: bool = False) -> Iterator[Block]:
        return self.layer_state.blocks(self.limit, with_grads=with_grads and self.accumulate)

    def runs(self, *, with_grads: bool = False) -> Iterator[Block]:
        return self.layer_state.runs(self.limit, with_grads=with_grads and self.accumulate)


class RecurrentLayerState:
    """State of one recurrent layer at chunk boundaries, and the gradient at the boundary that is being differentiated.

    Boundary 0 is the empty state before the first token: it is a constant and is stored as absent.
    """

    def __init__(self, spec: RecurrentSpec):
        self.spec = spec
        self.boundaries: dict[int, dict[str, torch.Tensor]] = {}
        self.released = False
        self._gradient: dict[str, torch.Tensor] = {}

    def put(self, boundary: int, tensors: Tensors, *, keep_earlier: bool) -> None:
        """Store the state after chunk `boundary`: name -> [1, *leading, *trailing], copied."""
        if not keep_earlier:
            self.boundaries.clear()
        self.boundaries[boundary] = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def at(self, boundary: int) -> dict[str, torch.Tensor] | None:
        if self.released:
            raise UseAfterReleaseError(f"the recurrent state of layer {self.spec.layer} was released")
        return self.boundaries[boundary] if boundary else None

    def leaves(self, boundary: int) -> dict[str, torch.Tensor] | None:
        """The state as autograd leaves whose gradient is added, in the accumulation dtype, to this layer's sum."""
        state = self.at(boundary)
        if state is None:
            return None
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda tensor, name=name: self._collect(name, tensor))
        return leaves

    def _collect(self, name: str, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            return
        if name in self._gradient:
            self._gradient[name].add_(gradient)
        else:
            self._gradient[name] = gradient.to(accumulation_dtype(gradient.dtype), copy=True)

    def take_cotangents(self) -> dict[str, torch.Tensor]:
        """The collected gradients, name -> [1, ...]; collecting starts anew."""
        gradient, self._gradient = self._gradient, {}
        return gradient

    @property
    def has_gradient(self) -> bool:
        return bool(self._gradient)

    @property
    def n_bytes(self) -> int:
        tensors = [t for state in self.boundaries.values() for t in state.values()]
        return sum(t.nbytes for t in [*tensors, *self._gradient.values()])

    def release(self) -> None:
        self.boundaries.clear()
        self._gradient.clear()
        self.released = True


class ResidentState:
    """Everything that survives of one prefix.

    Args:
        specs: what each layer keeps.
        prefix_ids: LongTensor [P - 1], the prompt without its last token.
        pool: where pages come from; the state opens `owner` there and releases it.
        device: where pages live.
        link: how pages in host memory get to the compute device, the device of `prefix_ids`; None if they live there.
        host_layers: those whose pages live on `device` if there is a link, the others' beside the model; None for all.
        context: the ranks that share the prefix; each then keeps the rows that it computed of every chunk, and all keep
            the same recurrent states. None if this rank keeps everything.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        prefix_ids: torch.Tensor,
        pool: PagePool,
        owner: str,
        device: torch.device,
        link: Link | None = None,
        context: ContextGroup | None = None,
        host_layers: Collection[int] | None = None,
    ):
        self.prefix_ids = prefix_ids
        self.context = context
        self.min_forward_tokens = min_forward_tokens(specs)
        self.pool = pool
        self.owner = owner
        self.bounds: list[int] = [0]
        self.row_map = None if context is None else RowMap(context, self.min_forward_tokens)
        self.owned: list[int] = [0]
        """Rows that this rank keeps of the tokens before each boundary."""
        pool.open(owner)
        n_own = -(-len(prefix_ids) // (1 if context is None else context.size))
        paged = [spec for spec in specs if isinstance(spec, PagedSpec)]
        away = {spec.layer for spec in paged} if host_layers is None else set(host_layers)
        self.paged: dict[StateKey, PagedLayerState] = {}
        for spec in paged:
            place = device if link is None or spec.layer in away else prefix_ids.device
            self.paged[spec.key] = PagedLayerState(spec, pool, owner, place, n_own)
        self.recurrent: dict[StateKey, RecurrentLayerState] = {
            spec.key: RecurrentLayerState(spec) for spec in specs if isinstance(spec, RecurrentSpec)
        }
        self.released = False
        self.stager: Stager | None = None
        if link is not None and away:
            self._stage_through(link, away)

    def _stage_through(self, link: Link, away: set[int]) -> None:
        def pages_of(layer: int) -> dict[StateKey, PageTensors]:
            return {key: paged.page_tensors() for key, paged in self.paged.items() if key[0] == layer}

        self.stager = Stager(link, self.prefix_ids.device, sorted(away), pages_of)
        for (layer, _), paged in self.paged.items():
            if layer in away:
                paged.stager = self.stager

    @property
    def n_tokens(self) -> int:
        """Prefix tokens captured so far."""
        return self.bounds[-1]

    @property
    def _layers(self) -> list[PagedLayerState | RecurrentLayerState]:
        return [*self.paged.values(), *self.recurrent.values()]

    @property
    def last_boundary(self) -> int:
        return len(self.bounds) - 1

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has collected gradients that wait for a sweep."""
        return any(layer.has_gradient for layer in self._layers)

    @property
    def n_bytes(self) -> int:
        """Bytes held now: pages, boundary states, accumulators."""
        return sum(layer.n_bytes for layer in self._layers)

    def slice_of(self, n_tokens: int, rank: int | None = None) -> TokenSlice:
        """Which of `n_tokens` new tokens `rank` of the context (this one if None) runs."""
        if self.context is None:
            return TokenSlice(0, n_tokens, n_tokens)
        return self.context.slice_of(n_tokens, self.min_forward_tokens, rank)

    def append_chunk(self, n_tokens: int, produced: Mapping[StateKey, Tensors], *, keep_boundaries: bool) -> None:
        """Store what a chunk of `n_tokens` produced: rows of this rank's slice of it, and the states at its end."""
        if self.stager is not None:
            self.stager.drop()
        n_own = self.slice_of(n_tokens).n_real
        for key, paged in self.paged.items():
            paged.append(paged.first_rows(produced[key], n_own))
        self.bounds.append(self.n_tokens + n_tokens)
        self.owned.append(self.owned[-1] + n_own)
        if self.row_map is not None:
            self.row_map.append(n_tokens)
        for key, recurrent in self.recurrent.items():
            recurrent.put(self.last_boundary, produced[key], keep_earlier=keep_boundaries)

    def drop_accumulators(self) -> None:
        for paged in self.paged.values():
            paged.drop_accumulators()
        for recurrent in self.recurrent.values():
            recurrent.take_cotangents()

    def release(self) -> None:
        """Give all pages back. A second call raises `UseAfterReleaseError`."""
        if self.stager is not None:
            self.stager.drop()
        self.pool.release(self.owner)
        for recurrent in self.recurrent.values():
            recurrent.release()
        self.released = True
