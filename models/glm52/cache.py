"""The cache that shows resident latents and indexer keys to one forward, or to one generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longstraw_sdk.adapter import StateView
from longstraw_sdk.errors import LifecycleError
from longstraw_sdk.hf.cache import PagedCacheLayer, ResidentCache
from longstraw_sdk.ops import MAX_POSITION
from longstraw_sdk.ops.sparse_selection import Tile
from longstraw_sdk.state import StateKey

from .tape import TapePass


class LatentLayer(PagedCacheLayer):
    """Resident latents, and indexer keys where the layer selects for itself. Updates are functional."""

    def __init__(self, view: StateView, layer: int, *, keep_rows: bool):
        super().__init__(keep_rows=keep_rows)
        self.latent_key: StateKey = (layer, "mla_latent")
        self.indexer_key: StateKey = (layer, "indexer_key")
        self.latents = view.paged(self.latent_key, split=not keep_rows)
        has_indexer = self.indexer_key in view.state.paged
        self.index = view.paged(self.indexer_key, split=not keep_rows) if has_indexer else None
        self.rows: dict[str, torch.Tensor] = {}
        self.selected: torch.Tensor | None = None
        """What a forward with a graph selected, for the recomputation of a checkpointed layer. The layers that share it
        keep it alive anyhow."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise LifecycleError("a resident state of latents was given to a model whose attention is not bound")

    def append(self, key: StateKey, /, **new: torch.Tensor) -> list[torch.Tensor]:
        """Everything behind the prefix, new rows included: tensors [B, L, *] in the order given."""
        if not self.sealed:
            self.produced[key] = new
        if not self.keep_rows:
            return list(new.values())
        for name, rows in new.items():
            self.rows[name] = torch.cat([self.rows[name], rows], 1) if name in self.rows else rows
        return [self.rows[name] for name in new]

    def index_tiles(self, local: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Indexer keys on the grid of pages: (first position, [T, D] or [B, T, D]). `local` [B, L, D] comes last.

        A tile always spans a whole page, padded with zeros behind the last key, because the bits of a score depend on
        the shape of the product that it comes from. Causality hides the padding.
        """
        assert self.index is not None and self.index.context is None, "only layers with an indexer ask"
        size, limit = self.index.page_tokens, self.index.limit
        n_whole = limit // size
        for page in range(n_whole):
            yield page * size, self.index.values(page)["key"]
        rest = local
        if limit % size:
            tail = self.index.values(n_whole)["key"].to(local.dtype)
            rest = torch.cat([tail.expand(len(local), -1, -1), local], 1)
        yield from _whole_tiles(n_whole * size, rest, size)

    def resident_tiles(self) -> Iterator[Tile]:
        """Indexer keys of this rank's part of a split prefix, page by page; padding lies behind every query."""
        assert self.index is not None and self.index.row_map is not None
        size = self.index.page_tokens
        positions = self.index.row_map.own_positions(self.index.limit, self.index.layer_state.compute_device)
        for page in range(-(-self.index.limit // size)):
            keys = self.index.values(page)["key"]
            padding = size - len(keys)
            where = torch.nn.functional.pad(positions[page * size :][:size], (0, padding), value=MAX_POSITION)
            yield where, torch.nn.functional.pad(keys, (0, 0, 0, padding))

    def new_tiles(self, local: torch.Tensor) -> Iterator[Tile]:
        """Indexer keys behind a split prefix, on a grid of the page size; `local` [B, L, D] are this rank's."""
        assert self.index is not None and self.index.context is not None
        if self.index.split:
            local = self.index.context.gather_tokens(local)
        yield from _whole_tiles(self.index.first_new, local, self.index.page_tokens)

    def get_seq_length(self) -> int:
        return self.latents.first_new + (self.rows["latent"].shape[1] if "latent" in self.rows else 0)


def _whole_tiles(first: int, keys: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """`keys` [B, L, D] from position `first` on, `size` at a time, with zeros behind the last."""
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[1] % size))
    for start in range(0, keys.shape[1], size):
        yield first + start, keys[:, start : start + size]


class LatentCache(ResidentCache):
    """`ResidentCache` of latent layers that knows its place on the decision tape.

    Args:
        end_keys: per row, the chain key of the tokens before the next forward.
    """

    def __init__(self, layers: Sequence[LatentLayer], end_keys: list[int]):
        super().__init__(layers)
        self.end_keys = end_keys
        self.tape_pass: TapePass | None = None

    def begin(self, tape_pass: TapePass) -> None:
        self.tape_pass, self.end_keys = tape_pass, tape_pass.end_keys
