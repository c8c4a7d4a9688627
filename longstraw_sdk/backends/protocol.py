"""What the engine asks of a sharding backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from ..state import ContextGroup
from ..types import Reduction


class ShardingBackend(Protocol):
    """Says which ranks share a prompt, and reduces the accumulated gradients over all ranks, once per update."""

    context: ContextGroup | None
    """The ranks that share a prompt; None if each has prompts of its own."""

    experts: ContextGroup | None
    """The ranks that hold one set of experts together; None if each holds all of them."""

    world: ContextGroup | None
    """All ranks of the run; None if this is the only one."""

    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank the first one's values, so that all train the same adapter. Every rank calls it."""
        ...

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, replayed: bool) -> tuple[Reduction, ...]:
        """Reduce `.grad` of `parameters` in place and say how. Every rank calls it.

        Args:
            replayed: whether this rank's context replayed anything since the last call. If not, what `.grad` holds is
                the same on all its ranks already.
        """
        ...

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """Euclidean norm [] of the reduced gradient of the whole model, equal on every rank. Every rank calls it."""
        ...
