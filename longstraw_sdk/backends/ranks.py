"""What the backends of several ranks share: how they start, which sizes fit, and what is true on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import distributed as dist
from torch import nn

from ..errors import ConfigurationError
from ..state import ContextGroup
from ..types import is_shared


def start_processes() -> int:
    """Initialise torch.distributed as the launcher says, unless it is already, and return the number of processes."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return int(PartialState(cpu=on_cpu).num_processes)


def check_sizes(world_size: int, context_parallel_size: int, expert_parallel_size: int) -> None:
    """Raise `ConfigurationError` unless the sizes fit the number of processes and each other."""
    if context_parallel_size < 1 or world_size % context_parallel_size:
        raise ConfigurationError(
            f"context_parallel_size={context_parallel_size} does not divide the {world_size} processes that are "
            "running; launch a multiple of it"
        )
    fits = expert_parallel_size >= 1 and world_size % expert_parallel_size == 0
    if not fits or (context_parallel_size % expert_parallel_size and expert_parallel_size % context_parallel_size):
        raise ConfigurationError(
            f"expert_parallel_size={expert_parallel_size} must divide the {world_size} processes, and divide "
            f"context_parallel_size={context_parallel_size} or be a multiple of it"
        )


def n_processes() -> int:
    """Processes of this run, as torch.distributed or, before it is initialised, the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


def on_any_rank(flags: Sequence[bool], group: ContextGroup | None, device: torch.device) -> list[bool]:
    """Each flag, true if it is on at least one rank of `group`. All call it with as many flags."""
    if group is None or not flags:
        return list(flags)
    found: list[bool] = group.gather(torch.tensor(flags, dtype=torch.uint8, device=device)).any(0).tolist()
    return found


def whole_gradient_norm(parameters: Iterable[nn.Parameter], experts: ContextGroup | None) -> torch.Tensor:
    """Norm [] of reduced gradients, those of experts on the other ranks of `experts` included. All call it."""
    held = [p for p in parameters if p.grad is not None]
    if experts is None:
        return _norm(held)
    norm = _norm([p for p in held if is_shared(p)])
    spread = experts.gather(_norm([p for p in held if not is_shared(p)]).to(norm.device, torch.float64))
    return torch.cat([norm.double().reshape(1), spread]).norm().to(norm.dtype)


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    return nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
