"""What the engine asks of a sharding backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from ..ops import ThroughExperts
from ..state import ContextGroup
from ..types import CausalLM, Reduction


class ShardingBackend(Protocol):
    """Says which ranks share a prompt, and reduces the accumulated gradients over all ranks, once per update."""

    context: ContextGroup | None
    """The ranks that share a prompt; None if each has prompts of its own."""

    experts: ContextGroup | None
    """The ranks that hold one set of experts together; None if each holds all of them."""

    world: ContextGroup | None
    """All ranks of the run; None if this is the only one."""

    through_experts: ThroughExperts
    """How tokens reach the experts on other ranks of `experts`, and come back."""

    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank the first one's values, so that all train the same adapter. Every rank calls it."""
        ...

    def attach(self, model: CausalLM) -> Callable[[], None]:
        """Prepare the trained parameters of `model` for `reduce_gradients` and return the function that undoes it.

        The session calls it once, when every rank has the same values, and the undoing one when it closes.
        """
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
