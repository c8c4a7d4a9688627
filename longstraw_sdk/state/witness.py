"""Proof that nobody touched the resident state between capture and replay.

The structural witness records, for every tensor, its allocation (page number), storage pointer, version counter and
length. PyTorch counts every in-place write made through it; a write through a raw pointer leaves no trace there, which
is what the optional content digest is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ..errors import WitnessError
from .resident import ResidentState


@dataclass(frozen=True)
class WitnessEntry:
    layer: int
    kind: str
    place: str
    component: str
    storage: int
    version: int
    n_tokens: int
    digest: str | None

    @property
    def where(self) -> str:
        return f"layer {self.layer}, {self.kind}, {self.place}, component {self.component!r}"


@dataclass(frozen=True)
class Witness:
    """What the resident state looked like at one moment. Take it with `Witness.of`, check it with `verify`."""

    entries: tuple[WitnessEntry, ...]
    with_digest: bool

    @classmethod
    def of(cls, state: ResidentState, *, with_digest: bool = False) -> Witness:
        return cls(tuple(_entries(state, with_digest)), with_digest)

    def verify(self, state: ResidentState) -> None:
        """Raise `WitnessError`, naming layer and page, if anything differs from the moment of recording."""
        for before, now in zip_longest(self.entries, _entries(state, self.with_digest)):
            if before != now:
                raise WitnessError(
                    f"the resident state changed since capture: {_change(before, now)}. Something wrote into it; "
                    "discard this step, find the writer and capture again"
                )


def _change(before: WitnessEntry | None, now: WitnessEntry | None) -> str:
    if before is None or now is None or before.where != now.where:
        return f"{before.where if before else 'nothing'} became {now.where if now else 'nothing'}"
    changed = [
        f"{name} {getattr(before, name)} -> {getattr(now, name)}"
        for name in ("storage", "version", "n_tokens", "digest")
        if getattr(before, name) != getattr(now, name)
    ]
    return f"{now.where}: {', '.join(changed)}"


def _entries(state: ResidentState, with_digest: bool) -> Iterator[WitnessEntry]:
    for (layer, kind), paged in state.paged.items():
        for index, page in enumerate(paged.pages):
            for component in paged.components:
                tensor = page.tensor(component.name)
                place = f"page {index} (allocation {page.number})"
                version = page.version(component.name)
                yield _entry(layer, kind, place, component.name, tensor, version, paged.n_tokens, with_digest)
    for (layer, kind), recurrent in state.recurrent.items():
        for boundary, tensors in recurrent.boundaries.items():
            for name, tensor in tensors.items():
                place, n_tokens = f"boundary {boundary}", state.bounds[boundary]
                yield _entry(layer, kind, place, name, tensor, tensor._version, n_tokens, with_digest)


def _entry(
    layer: int,
    kind: str,
    place: str,
    component: str,
    tensor: torch.Tensor,
    version: int,
    n_tokens: int,
    with_digest: bool,
) -> WitnessEntry:
    digest = None
    if with_digest:
        raw = tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return WitnessEntry(layer, kind, place, component, tensor.data_ptr(), version, n_tokens, digest)
