"""One process: there is nothing to reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..errors import ConfigurationError
from ..ops import ThroughExperts, through_experts
from ..state import ContextGroup
from ..types import CausalLM, Reduction
from .ranks import n_processes, whole_gradient_norm


class LocalBackend:
    """The gradient of the one process is the gradient. Refuses to run under several, where it would be wrong."""

    context: ContextGroup | None = None
    experts: ContextGroup | None = None
    world: ContextGroup | None = None

    def __init__(self) -> None:
        self.through_experts: ThroughExperts = through_experts
        if n_processes() > 1:
            raise ConfigurationError(
                f"{n_processes()} processes are running, but the local backend reduces no gradients across processes, "
                'so each would train a different adapter; use backend="accelerate", or launch one process'
            )

    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    def attach(self, model: CausalLM) -> Callable[[], None]:
        return lambda: None

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, replayed: bool) -> tuple[Reduction, ...]:
        return ()

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        return whole_gradient_norm(parameters, None)
