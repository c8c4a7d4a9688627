"""What the engine asks of a sharding backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import nn


class GradientBackend(Protocol):
    """Reduces the accumulated gradients across processes, exactly once per update."""

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Reduce `.grad` of `parameters` in place; return the names of the groups reduced over."""
        ...
