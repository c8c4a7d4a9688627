"""Several processes by megatron-core: its process groups, gradient buffers, optimizers and token dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ..errors import ConfigurationError, LifecycleError
from ..ops import ThroughExperts, through_experts
from ..state import ContextGroup
from ..types import CausalLM, Reduction, is_shared
from .megatron_experts import MegatronDispatch
from .megatron_gradients import GradientBuffers, check_attached
from .megatron_import import load_megatron
from .ranks import check_sizes, default_group, on_any_rank, start_processes, whole_gradient_norm


class MegatronBackend:
    """The sizes and results of `AccelerateBackend`, on Megatron's groups, buffers and dispatcher.

    A gradient accumulates in a float32 buffer (float64 if all that is trained is), which is reduced over all ranks that
    hold the parameter in one call of `finalize_model_grads`. `.grad` is that buffer, so any torch optimizer works.
    Where Megatron's `parallel_state` is initialised already, its groups are used.

    Args:
        context_parallel_size, expert_parallel_size: as in `AccelerateBackend`.
        distributed_optimizer: shard gradients and optimizer state over ranks, for `optimizer()` alone: `.grad` is None
            after `finalize()`.

    Raises:
        ConfigurationError: megatron-core or einops is missing, no launcher started this process, or sizes do not fit.
    """

    def __init__(
        self, context_parallel_size: int = 1, expert_parallel_size: int = 1, *, distributed_optimizer: bool = False
    ):
        load_megatron()
        world_size = start_processes()
        if not dist.is_initialized():
            raise ConfigurationError(
                'backend="megatron" needs torch.distributed, also for one process; start it with torchrun or '
                "accelerate launch"
            )
        check_sizes(world_size, context_parallel_size, expert_parallel_size)
        self.groups = _initialised(context_parallel_size, expert_parallel_size)
        self.distributed_optimizer = distributed_optimizer
        self.context = _group(self.groups.cp, "context")
        self.experts = _group(self.groups.ep, "experts")
        self.world = _group(default_group(), "run")
        self.through_experts: ThroughExperts = (
            through_experts if self.experts is None else MegatronDispatch(self.groups)
        )
        self._n_contexts = world_size // context_parallel_size
        self._buffers: GradientBuffers | None = None

    @torch.no_grad()
    def share_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            group = self.groups.dp_cp if is_shared(p) else self.groups.expt_dp
            dist.broadcast(p.data, dist.get_global_rank(group, 0), group=group)

    def attach(self, model: CausalLM) -> Callable[[], None]:
        if self._buffers is not None:
            raise LifecycleError(
                "this MegatronBackend holds the gradient buffers of another session; close that one, or make a backend "
                "for each"
            )
        buffers = self._buffers = GradientBuffers(
            model, self.groups, self._n_contexts, distributed=self.distributed_optimizer
        )

        def detach() -> None:
            self._buffers = None
            buffers.close()

        return detach

    @torch.no_grad()
    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, replayed: bool) -> tuple[Reduction, ...]:
        buffers = check_attached(self._buffers, list(parameters))
        trained = buffers.parameters
        found = on_any_rank(buffers.gather_up(), self.world, trained[0].device)
        self._count_once(trained, replayed)
        buffers.reduce(found)
        taken = [p for p, there in zip(trained, found, strict=True) if there]
        shared, spread = [p for p in taken if is_shared(p)], [p for p in taken if not is_shared(p)]
        operation = "sum" if self._n_contexts == 1 else f"sum / {self._n_contexts}"
        return tuple(
            Reduction(name, tuple(dist.get_process_group_ranks(group)), operation, len(of), sum(p.numel() for p in of))
            for name, group, of in (
                ("all", self.groups.dp_cp, shared),
                ("all expert copies", self.groups.expt_dp, spread),
            )
            if dist.get_world_size(group) > 1 and (of or name == "all")
        )

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        if self.distributed_optimizer:
            raise ConfigurationError(
                "distributed_optimizer=True leaves no whole gradient to clip; give OptimizerConfig(clip_grad=...) to "
                "MegatronBackend.optimizer() instead"
            )
        return whole_gradient_norm(parameters, self.experts)

    def optimizer(self, config: Any) -> Any:
        """Megatron's optimizer of the session's trained parameters, as `get_megatron_optimizer` makes it.

        It copies parameters that are not float32 now, and steps from its copies: load a saved adapter before.

        Args:
            config: a `megatron.core.optimizer.OptimizerConfig`.

        Raises:
            ConfigurationError: on a CPU, or if `config.use_distributed_optimizer` is not the backend's.
            LifecycleError: no session uses this backend.
        """
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "Megatron's optimizers need CUDA. On a CPU any torch optimizer works on .grad, as torch.optim.AdamW"
            )
        return self._optimizer(config)

    def _optimizer(self, config: Any) -> Any:
        from megatron.core.optimizer import get_megatron_optimizer

        if self._buffers is None:
            raise LifecycleError("no session uses this backend; make the LongStrawSession before its optimizer")
        if config.use_distributed_optimizer != self.distributed_optimizer:
            raise ConfigurationError(
                f"use_distributed_optimizer={config.use_distributed_optimizer}, but the backend was made with "
                f"distributed_optimizer={self.distributed_optimizer}; they must be equal"
            )
        made = get_megatron_optimizer(
            config, [self._buffers.ddp], use_gloo_process_groups=False, pg_collection=self.groups
        )
        trained, step = self._buffers.parameters, made.step

        def counted_step() -> Any:
            result = step()
            torch.autograd.graph.increment_version(trained)  # it writes through .data: captures would not turn stale
            return result

        made.step = counted_step
        return made

    def _count_once(self, trained: list[Any], replayed: bool) -> None:
        """Let what was reduced before, which all ranks of a context hold alike, come out of the reduction unchanged."""
        if not replayed and self.context is not None and self.context.rank:
            for p in trained:
                if is_shared(p):
                    p.main_grad.zero_()
        if self.experts is None or any(on_any_rank([replayed], self.experts, trained[0].device)):
            return
        rank, size = (0, 1) if self.context is None else (self.context.rank, self.context.size)
        for p in trained:
            if not is_shared(p):
                # One copy per context counts; where experts are spread over several contexts, one copy for all of them.
                p.main_grad.mul_(rank < self.experts.size if self.experts.size <= size else self.experts.size // size)


def is_in_use() -> bool:
    """Whether this process has initialised Megatron's parallel_state. Does not import Megatron."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state is not None and bool(parallel_state.is_initialized())


def _initialised(context_parallel_size: int, expert_parallel_size: int) -> Any:
    """A `ProcessGroupCollection` of these sizes, made now or found."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            context_parallel_size=context_parallel_size,
            expert_model_parallel_size=expert_parallel_size,
            create_gloo_process_groups=False,
        )
    found = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    wanted = dict.fromkeys(found, 1) | {
        "context_parallel_size": context_parallel_size,
        "expert_model_parallel_size": expert_parallel_size,
    }
    if found != wanted:
        differ = ", ".join(
            f"{name}={size} instead of {wanted[name]}" for name, size in found.items() if size != wanted[name]
        )
        raise ConfigurationError(
            f"Megatron's parallel_state is initialised with {differ}; initialise it with the sizes that LongStraw is "
            "given, or leave that to LongStraw (parallel_state.destroy_model_parallel() undoes it)"
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def _group(group: dist.ProcessGroup, name: str) -> ContextGroup | None:
    return ContextGroup(group, name) if dist.get_world_size(group) > 1 else None
