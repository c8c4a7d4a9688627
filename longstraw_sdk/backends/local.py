"""One process: there is nothing to reduce."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ConfigurationError
from ..state import ContextGroup
from ..types import Reduction


class LocalBackend:
    """The gradient of the one process is the gradient. Refuses to run under several, where it would be wrong."""

    context: ContextGroup | None = None
    has_other_prompts = False

    def __init__(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
            if world_size > 1:
                raise ConfigurationError(
                    f"{world_size} processes are running, but the local backend reduces no gradients across processes, "
                    'so each would train a different adapter; use backend="accelerate", or launch one process'
                )

    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> tuple[Reduction, ...]:
        return ()
