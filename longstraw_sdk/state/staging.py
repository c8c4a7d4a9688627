"""Staging: pages that live in host memory visit the compute device one layer at a time.

While one layer computes, the next one's pages are on their way. The layer after that is asked for in the direction in
which layers were last visited, so that the same object serves forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .specs import StateKey

PageTensors = list[dict[str, torch.Tensor]]
"""One dict per page: component name -> [page_tokens, ...]."""

Rows = dict[str, torch.Tensor]
"""Component name -> [tokens, ...]."""


class Link(Protocol):
    """Moves pages to the compute device."""

    def start(self, layer: int, pages: PageTensors) -> Callable[[], Rows]:
        """Begin to copy; the function that is returned waits for the copies and hands them out, page after page."""


KEPT_FREE = {"response": 6 * 2**30, "full": 10 * 2**30}
"""Bytes beside weights and resident state that chunks of 8,192 tokens and packs of 4,096 take at most, by scope."""


@dataclass(frozen=True)
class Placement:
    """Where pages live.

    Without a `link` all live on `device`. With one they live there too, which is then host memory, and visit the
    compute device over it; but as many layers as fit in `room()` bytes, if it is given, live on the compute device.
    """

    device: torch.device
    link: Link | None = None
    room: Callable[[], int] | None = None

    def host_layers(self, layer_bytes: Mapping[int, tuple[int, int]], other_bytes: int) -> frozenset[int]:
        """The layers whose pages do not live on the compute device.

        Args:
            layer_bytes: per layer, bytes of its pages and of their gradients.
            other_bytes: what else of the state takes memory on the compute device.
        """
        if self.link is None:
            return frozenset()
        if self.room is None:
            return frozenset(layer_bytes)
        return spread_over_host(layer_bytes, self.room() - other_bytes)


def spread_over_host(layer_bytes: Mapping[int, tuple[int, int]], room: int) -> frozenset[int]:
    """The fewest layers, evenly spread, that must leave the compute device for the others to fit in `room` bytes.

    Between two of them there is then time to copy the next. While any layer is away, copies of the pages of two and of
    the gradients of one visit.
    """
    layers = sorted(layer_bytes)
    if sum(map(sum, layer_bytes.values())) <= room:
        return frozenset()
    for n_away in range(1, len(layers)):
        away = frozenset(layers[i * len(layers) // n_away] for i in range(n_away))
        staged = 2 * max(layer_bytes[layer][0] for layer in away) + max(layer_bytes[layer][1] for layer in away)
        if staged + sum(sum(n) for layer, n in layer_bytes.items() if layer not in away) <= room:
            return away
    return frozenset(layers)


def cuda_room(device: torch.device, kept_free: int) -> int:
    """Bytes on a CUDA device that PyTorch could still allocate, but for `kept_free`."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - kept_free


class CudaLink:
    """Copies from pinned host memory on a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, layer: int, pages: PageTensors) -> Callable[[], Rows]:
        copies: Rows = {}
        with torch.cuda.stream(self._stream):
            for name in pages[0] if pages else ():
                sources = [page[name] for page in pages]
                n_tokens = sum(len(source) for source in sources)
                copies[name] = torch.empty(n_tokens, *sources[0].shape[1:], dtype=sources[0].dtype, device=self.device)
                end = 0
                for source in sources:
                    start, end = end, end + len(source)
                    copies[name][start:end].copy_(source, non_blocking=True)
        done = self._stream.record_event()

        def wait() -> Rows:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            for tensor in copies.values():
                tensor.record_stream(current)
            return copies

        return wait


class Stager:
    """Holds the copies of at most two layers: the one that computes and the next.

    Args:
        link: what copies.
        device: the compute device.
        layers: layers that have pages, in the order in which a forward visits them.
        pages_of: the host pages of every state kind of a layer.
    """

    def __init__(
        self,
        link: Link,
        device: torch.device,
        layers: Sequence[int],
        pages_of: Callable[[int], dict[StateKey, PageTensors]],
    ):
        self.device = device
        self._link = link
        self._layers = list(layers)
        self._pages_of = pages_of
        self._waiting: dict[int, dict[StateKey, Callable[[], Rows]]] = {}
        self._ready: dict[int, dict[StateKey, Rows]] = {}
        self._last = -1
        self._step = 1

    def fetch(self, layer: int) -> dict[StateKey, Rows]:
        """The staged rows of every state kind of `layer`; starts the copies of the next layer."""
        place = self._layers.index(layer)
        if layer not in self._ready:
            if layer not in self._waiting:
                self._start(layer)
            self._ready = {layer: {key: wait() for key, wait in self._waiting.pop(layer).items()}}
            if self._last >= 0:
                self._step = 1 if place > self._last else -1
            self._last = place
            following = place + self._step
            self._waiting = {}
            if 0 <= following < len(self._layers):
                self._start(self._layers[following])
        return self._ready[layer]

    def _start(self, layer: int) -> None:
        self._waiting[layer] = {key: self._link.start(layer, pages) for key, pages in self._pages_of(layer).items()}

    def drop(self) -> None:
        """Forget all copies: the host pages changed, or are gone."""
        self._waiting, self._ready, self._last, self._step = {}, {}, -1, 1
