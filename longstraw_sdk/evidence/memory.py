"""Live tensor bytes over time, phase by phase.

On a CPU there is no allocator counter to ask, so a dispatch mode watches every tensor that an operation returns and a
finalizer notes when its storage dies. What an operator allocates and frees inside itself is not seen; on CUDA
`torch.cuda.max_memory_allocated` is the measure.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class MemorySample:
    """Live bytes at one moment, counted from the start of the trace."""

    seconds: float
    phase: str
    live_bytes: int


@dataclass
class MemoryTrace:
    """What `trace_memory` recorded. Bytes are of tensors created inside the block that are still alive."""

    samples: list[MemorySample] = field(default_factory=list)
    live_bytes: int = 0
    peak_bytes: int = 0
    peak_by_phase: dict[str, int] = field(default_factory=dict)
    _phase: str = "start"
    _start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens within the block."""
        before, self._phase = self._phase, name
        self._note(0)
        try:
            yield
        finally:
            self._note(0)
            self._phase = before

    def _note(self, change: int) -> None:
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_by_phase[self._phase] = max(self.peak_by_phase.get(self._phase, 0), self.live_bytes)
        self.samples.append(MemorySample(time.perf_counter() - self._start, self._phase, self.live_bytes))


class _Watch(TorchDispatchMode):
    def __init__(self, trace: MemoryTrace):
        super().__init__()
        self.trace = trace
        self.known: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        for leaf in tree_leaves(out):
            if _has_storage(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self.known:
                    self._watch(storage)
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        self.trace._note(n_bytes)
        self.known[key] = weakref.finalize(storage, self._died, key, n_bytes)

    def _died(self, key: int, n_bytes: int) -> None:
        del self.known[key]
        self.trace._note(-n_bytes)

    def close(self) -> None:
        for finalizer in self.known.values():
            finalizer.detach()
        self.known.clear()


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_sparse and leaf.device.type != "meta"


@contextmanager
def trace_memory() -> Iterator[MemoryTrace]:
    """Record the live bytes of all tensors created within the block."""
    trace = MemoryTrace()
    watch = _Watch(trace)
    try:
        with watch:
            yield trace
    finally:
        watch.close()
