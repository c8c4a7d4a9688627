"""Several processes under `accelerate launch` or `torchrun`, by torch.distributed process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import distributed as dist
from torch import nn

from ..ops import ThroughExperts, through_experts
from ..state import ContextGroup
from ..types import CausalLM, Reduction, accumulation_dtype, is_shared
from .frozen_weights import shard_frozen_weights
from .ranks import check_sizes, default_group, on_any_rank, start_processes, whole_gradient_norm


class AccelerateBackend:
    """Context parallelism over consecutive ranks, data parallelism over the rest.

    Every rank of a context computes the same loss of the same prompt, and its gradient is the part that went through
    its own tokens: parts are summed. Over the ranks that had other prompts the gradient is averaged, as DDP does.
    Experts that are spread over ranks get tokens from all of these: their gradient is summed over the ranks that hold
    the same experts, and divided by the number of contexts.

    Args:
        context_parallel_size: ranks per prompt; must divide the number of processes.
        expert_parallel_size: consecutive ranks that hold one set of experts together; must divide
            `context_parallel_size`, or be a multiple of it that divides the number of processes.
        shard_frozen_weights: keep 1/context_parallel_size of the decoder layers' frozen weights per rank, by FSDP2.
    """

    def __init__(
        self, context_parallel_size: int = 1, expert_parallel_size: int = 1, *, shard_frozen_weights: bool = False
    ):
        world_size = start_processes()
        check_sizes(world_size, context_parallel_size, expert_parallel_size)
        self.through_experts: ThroughExperts = through_experts
        self.world: ContextGroup | None = None
        self.context: ContextGroup | None = None
        self.data: ContextGroup | None = None
        self.experts: ContextGroup | None = None
        self.copies: ContextGroup | None = None
        self.shard_frozen_weights = shard_frozen_weights
        self.n_contexts = world_size // context_parallel_size
        if world_size > 1:
            self.world = ContextGroup(default_group(), "run")
            groups = _groups(world_size, context_parallel_size, expert_parallel_size)
            self.context, self.data, self.experts, self.copies = (
                ContextGroup(group, name) if dist.get_world_size(group) > 1 else None
                for group, name in zip(groups, ("context", "data", "experts", "expert copies"), strict=True)
            )
            if self.experts is None:
                self.copies = None  # every rank holds all, and nothing is spread

    @torch.no_grad()
    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            # Across contexts first: then every context's first rank has the values of the very first one.
            for group in (self.data, self.context) if is_shared(p) else (self.copies,):
                if group is not None:
                    dist.broadcast(p.data, dist.get_global_rank(group.group, 0), group=group.group)

    def attach(self, model: CausalLM) -> Callable[[], None]:
        if self.shard_frozen_weights:
            shard_frozen_weights(model, self.context)
        return lambda: None

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, replayed: bool) -> tuple[Reduction, ...]:
        trained = list(parameters)
        shared, spread = [p for p in trained if is_shared(p)], [p for p in trained if not is_shared(p)]
        if self.experts is not None:
            _complete(spread, self.experts)  # zeros for experts without a token, as where all lie on one rank
        stages = [(self.data, shared, self.n_contexts)]
        if replayed:  # otherwise summed before, and once is enough
            stages.insert(0, (self.context, shared, 1))
        if self.experts is not None and self.world is not None and not self.world.agree(not replayed):
            if not replayed:
                # Of what was reduced before, each context counts once, on however many ranks it holds the same experts.
                _divide(spread, max(1, 1 if self.context is None else self.context.size // self.experts.size))
            stages.append((self.copies, spread, self.n_contexts))
            if self.copies is None:
                _divide(spread, self.n_contexts)
        reductions = []
        for group, taken, divisor in stages:
            if group is not None:
                ranks = tuple(dist.get_process_group_ranks(group.group))
                operation = "sum" if divisor == 1 else "mean" if divisor == group.size else f"sum / {divisor}"
                reductions.append(Reduction(group.name, ranks, operation, *reduce_over(taken, group, divisor)))
        return tuple(reductions)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        return whole_gradient_norm(parameters, self.experts)


_made: dict[tuple[dist.ProcessGroup, int, int], tuple[dist.ProcessGroup, ...]] = {}
"""Groups by the default group that they were made under and the sizes: groups are not garbage-collected."""


def _groups(world_size: int, context_size: int, expert_size: int) -> tuple[dist.ProcessGroup, ...]:
    """This rank's context, data group, expert group, and the ranks that hold the same experts."""
    key = (default_group(), context_size, expert_size)
    if key not in _made:
        contexts = [range(first, first + context_size) for first in range(0, world_size, context_size)]
        data = [range(offset, world_size, context_size) for offset in range(context_size)]
        experts = [range(first, first + expert_size) for first in range(0, world_size, expert_size)]
        copies = [range(offset, world_size, expert_size) for offset in range(expert_size)]
        _made[key] = tuple(_own_group(partition) for partition in (contexts, data, experts, copies))
    return _made[key]


def _own_group(partition: list[range]) -> dist.ProcessGroup:
    groups = {ranks: dist.new_group(ranks) for ranks in partition}
    return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)


def _complete(parameters: list[nn.Parameter], group: ContextGroup) -> list[nn.Parameter]:
    """The parameters that have a gradient on at least one rank, with zeros where this one has none."""
    if not parameters:
        return []
    anywhere = on_any_rank([p.grad is not None for p in parameters], group, parameters[0].device)
    taken = [p for p, found in zip(parameters, anywhere, strict=True) if found]
    for p in taken:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return taken


def _divide(parameters: list[nn.Parameter], divisor: int) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad /= divisor


def reduce_over(parameters: list[nn.Parameter], group: ContextGroup, divisor: int) -> tuple[int, int]:
    """Sum every gradient that at least one rank has, and divide; returns how many parameters and elements those are."""
    taken = _complete(parameters, group)
    for dtype in dict.fromkeys(p.grad.dtype for p in taken if p.grad is not None):
        gradients = [p.grad for p in taken if p.grad is not None and p.grad.dtype == dtype]
        flat = torch.cat([g.flatten() for g in gradients]).to(accumulation_dtype(dtype))
        # Each rank sums its part, in rank order, and hands it to all: the same bits everywhere, in the room of two.
        parts = nn.functional.pad(flat, (0, -len(flat) % group.size)).view(group.size, -1)
        total = group.gather(group.sum_scatter(parts) / divisor).flatten()[: len(flat)]
        for gradient, piece in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))
    return len(taken), sum(p.numel() for p in taken)
