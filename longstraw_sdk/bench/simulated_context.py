"""One rank of a context without the others: its work and memory are real, what others would send is counted and copied.

The values that come out mean nothing, for every other rank is a copy of this one. Shapes, work, memory and bytes are
those of a real rank, which `tests/test_simulated_context.py` checks beside ranks that talk to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..backends.accelerate import reduce_over
from ..backends.local import LocalBackend
from ..state import ContextGroup
from ..types import Reduction


class SimulatedContext(ContextGroup):
    """Rank `rank` of `size`; what is not overridden is the real class's.

    One thing may not be a copy: candidates of a sparse selection name positions, and if all named rows of this rank,
    it would have nothing to fetch. Those of another rank are moved to the rows that it has in the same place.

    Args:
        chunk_tokens: prompt tokens per forward. Every chunk of the prefix has so many, and `size` divides them.
    """

    def __init__(self, rank: int, size: int, chunk_tokens: int):
        self.name = "context"
        self.rank = rank
        self.size = size
        self.received_bytes = 0
        self._slice_tokens = -(-chunk_tokens // size)

    def check_device(self, device: torch.device) -> None:
        pass

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)  # not an expanded view: the real one has memory of its own
        self._count(x, self.size - 1)
        return out.copy_(x.expand_as(out))

    def start_exchange(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._count(x[0], self.size - 1)
        out.copy_(x)
        return lambda: self._of_their_rows(out) if _are_candidates(x) else out

    def exchange_uneven(self, x: torch.Tensor, n_sent: list[int], n_received: list[int]) -> torch.Tensor:
        """As many rows as would come; what this rank would send, over and over."""
        x = x.contiguous()
        n_rows = sum(n_received)
        out = x.new_zeros(n_rows, *x.shape[1:])
        self.received_bytes += out[:1].nbytes * (n_rows - n_received[self.rank]) if n_rows else 0
        return torch.index_select(x, 0, torch.arange(n_rows, device=x.device) % len(x), out=out) if len(x) else out

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _of_their_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """Candidates [W, B, S, K], entry s named after the rows of rank s."""
        steps = torch.arange(self.size, device=packed.device) - self.rank
        moved = packed - (steps * self._slice_tokens)[:, None, None, None]  # a greater position makes a smaller key
        return torch.where(packed == torch.iinfo(torch.int64).min, packed, moved)


class SimulatedBackend(LocalBackend):
    """The local backend, but for a simulated context, over which gradients are summed as `AccelerateBackend` does."""

    def __init__(self, rank: int, size: int, chunk_tokens: int):
        super().__init__()
        self.context: ContextGroup | None = SimulatedContext(rank, size, chunk_tokens)
        self.world: ContextGroup | None = SimulatedContext(rank, size, chunk_tokens)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, replayed: bool) -> tuple[Reduction, ...]:
        if not replayed or self.context is None:
            return ()
        reduced = reduce_over(list(parameters), self.context, 1)
        return (Reduction("context", tuple(range(self.context.size)), "sum", *reduced),)


def _are_candidates(x: torch.Tensor) -> bool:
    """Whether `x` is what `select_top_k_over_ranks` exchanges; the counts of `FetchedRows` have two axes."""
    return x.dtype == torch.int64 and x.ndim == 4
