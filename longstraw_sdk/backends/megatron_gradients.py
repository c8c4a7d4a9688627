"""Megatron's gradient buffers behind `.grad`: accumulated in float32, reduced once per update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import LifecycleError
from ..types import CausalLM
from .megatron_cpu import on_cpu
from .megatron_import import transformer_config


class GradientBuffers:
    """Megatron's DistributedDataParallel around the trained parameters of one model.

    Its hooks move each new gradient out of `.grad` into a float32 buffer that nothing but itself clears. So `.grad`
    shows the buffer at all times (as a copy, where the parameter is not float32), and what is done to `.grad` counts:
    where it was cleared or replaced since it was last shown, the buffer starts afresh.

    Args:
        groups: a `ProcessGroupCollection`.
        n_contexts: by how many the sum over all ranks is divided.
        distributed: for Megatron's distributed optimizer, which reduces each rank's part only: `.grad` is None then.
    """

    def __init__(self, model: CausalLM, groups: Any, n_contexts: int, *, distributed: bool = False):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        self._groups, self._n_contexts, self._distributed = groups, n_contexts, distributed
        self._shown: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        config = transformer_config(
            context_parallel_size=groups.cp.size(),
            calculate_per_token_loss=True,  # sums; otherwise every gradient is divided by the ranks of a context too
        )
        options = DistributedDataParallelConfig(
            # Without it buffers have the parameter's dtype, which only float64 wants.
            grad_reduce_in_fp32=any(p.dtype != torch.float64 for p in self.parameters),
            use_distributed_optimizer=distributed,
        )
        with on_cpu(), torch.enable_grad():
            self.ddp = DistributedDataParallel(config, options, model, pg_collection=groups)
        for p, accumulator in zip(self.parameters, self.ddp.grad_accs, strict=True):
            accumulator.register_prehook(self._before(p))
            accumulator.register_hook(self._after(p))  # behind Megatron's

    def gather_up(self) -> list[bool]:
        """Leave every gradient in the buffer alone and say which parameters have one, in order."""
        found = []
        for p in self.parameters:
            self._take_back(p)
            if p.grad is not None:  # put there by hand
                p.main_grad.add_(p.grad)
                p.grad = None
                found.append(True)
            else:
                found.append(p in self._shown)
        return found

    def reduce(self, found: list[bool]) -> None:
        """Average over contexts the sum over their ranks, and show it where it was `found` on any rank."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.ddp], pg_collection=self._groups)
        if self._n_contexts > 1:
            self.ddp.scale_gradients(1 / self._n_contexts)
        for p, there in zip(self.parameters, found, strict=True):
            self._shown.pop(p, None)
            if there and not self._distributed:
                self._show(p)

    def close(self) -> None:
        """Give the parameters back; gradients stay where they are shown."""
        self.ddp.param_to_bucket_group.clear()  # without their bucket Megatron's hooks do nothing
        self.ddp.grad_accs.clear()
        for p in self.parameters:
            del p.main_grad, p.grad_added_to_main_grad
        self.parameters = []
        self._shown.clear()

    def _before(self, p: Any) -> Callable[..., None]:
        def hook(*gradients: object) -> None:
            if self.parameters:
                self._take_back(p)

        return hook

    def _after(self, p: Any) -> Callable[..., None]:
        def hook(*gradients: object) -> None:
            if self.parameters:
                self._show(p)

        return hook

    def _take_back(self, p: Any) -> None:
        """Leave in the buffer what `.grad` says, and `.grad` to what is new."""
        shown, version = self._shown.get(p, (None, 0))
        if shown is None or p.grad is not shown:
            self._shown.pop(p, None)
            p.main_grad.zero_()
            return
        if shown is not p.main_grad and shown._version != version:
            p.main_grad.copy_(shown)
        p.grad = None

    def _show(self, p: Any) -> None:
        shown = p.main_grad if p.main_grad.dtype == p.dtype else p.main_grad.to(p.dtype)
        p.grad = shown
        self._shown[p] = shown, shown._version


def check_attached(buffers: GradientBuffers | None, parameters: list[nn.Parameter]) -> GradientBuffers:
    """Raise `LifecycleError` unless `parameters` are those that `buffers` were made for."""
    if buffers is None:
        raise LifecycleError("no session uses this backend; give it to a LongStrawSession, which attaches its model")
    if set(map(id, parameters)) - set(map(id, buffers.parameters)):
        raise LifecycleError(
            "parameters are trained now that were not when the session began, so Megatron's gradient buffers have no "
            "place for them; unfreeze them before you make the LongStrawSession"
        )
    return buffers
