"""Several processes under `accelerate launch` or `torchrun`, by torch.distributed process groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import distributed as dist
from torch import nn

from ..errors import ConfigurationError
from ..state import ContextGroup
from ..types import Reduction, accumulation_dtype


class AccelerateBackend:
    """Context parallelism over consecutive ranks, data parallelism over the rest.

    Every rank of a context computes the same loss of the same prompt, and its gradient is the part that went through
    its own tokens: parts are summed. Over the ranks that had other prompts the gradient is averaged, as DDP does.

    Args:
        context_parallel_size: ranks per prompt; must divide the number of processes.
    """

    def __init__(self, context_parallel_size: int = 1):
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
        world_size = PartialState(cpu=on_cpu).num_processes  # initialises torch.distributed as the launcher says
        if context_parallel_size < 1 or world_size % context_parallel_size:
            raise ConfigurationError(
                f"context_parallel_size={context_parallel_size} does not divide the {world_size} processes that are "
                "running; launch a multiple of it"
            )
        self.context: ContextGroup | None = None
        self.data: ContextGroup | None = None
        self.world: ContextGroup | None = None
        if world_size > 1:
            self.world = ContextGroup(_default_group(), "run")
            context, data = _groups(world_size, context_parallel_size)
            self.context = ContextGroup(context) if context_parallel_size > 1 else None
            self.data = ContextGroup(data, "data") if world_size > context_parallel_size else None

    @torch.no_grad()
    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        shared = list(parameters)
        # Across contexts first: then every context's first rank has the values of the very first one.
        for group in (self.data, self.context):
            if group is not None:
                for p in shared:
                    dist.broadcast(p.data, dist.get_global_rank(group.group, 0), group=group.group)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, replayed: bool) -> tuple[Reduction, ...]:
        trained = list(parameters)
        reductions = []
        context = self.context if replayed else None  # summed before, and once is enough
        for group, operation in ((context, "sum"), (self.data, "mean")):
            if group is not None:
                reduced = _reduce(trained, group, mean=operation == "mean")
                reductions.append(
                    Reduction(group.name, tuple(dist.get_process_group_ranks(group.group)), operation, *reduced)
                )
        return tuple(reductions)


_made: dict[tuple[dist.ProcessGroup, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Groups by the default group that they were made under and the context size: groups are not garbage-collected."""


def _groups(world_size: int, context_parallel_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's context and data group."""
    rank, size = dist.get_rank(), context_parallel_size
    key = (_default_group(), size)
    if key not in _made:
        contexts = [dist.new_group(range(first, first + size)) for first in range(0, world_size, size)]
        data = [dist.new_group(range(offset, world_size, size)) for offset in range(size)]
        _made[key] = contexts[rank // size], data[rank % size]
    return _made[key]


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


def _reduce(parameters: list[nn.Parameter], group: ContextGroup, *, mean: bool) -> tuple[int, int]:
    """Reduce every gradient that at least one rank has; returns how many parameters and elements those are."""
    if not parameters:
        return 0, 0
    device = parameters[0].device
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=device)
    anywhere = group.gather(have).any(0).tolist()
    taken = [p for p, found in zip(parameters, anywhere, strict=True) if found]
    for p in taken:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for dtype in dict.fromkeys(p.grad.dtype for p in taken if p.grad is not None):
        gradients = [p.grad for p in taken if p.grad is not None and p.grad.dtype == dtype]
        flat = torch.cat([g.flatten() for g in gradients]).to(accumulation_dtype(dtype))
        total = group.gather(flat).sum(0)  # in rank order, so every rank has the same bits
        if mean:
            total /= group.size
        for gradient, piece in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))
    return len(taken), sum(p.numel() for p in taken)
