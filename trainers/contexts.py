"""What TRL sees of several ranks: each context, the ranks that share a prompt, looks like one process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from transformers import TrainingArguments

from longstraw_sdk.backends import ShardingBackend
from longstraw_sdk.errors import ConfigurationError


class ContextAccelerator(Accelerator):
    """An `Accelerator` that counts contexts where it would count processes.

    Data is dealt out per context, gathered values come once per context, and the model is not wrapped in
    DistributedDataParallel: the session reduces the gradient itself. Whether this is the main process, where it runs
    and what it saves is told by the process as ever. Made by changing the class of a trainer's accelerator.
    """

    backend: ShardingBackend

    @property
    def context_size(self) -> int:
        context = self.backend.context
        return 1 if context is None else context.size

    @property
    def num_processes(self) -> int:
        return int(self.state.num_processes) // self.context_size

    @property
    def process_index(self) -> int:
        return int(self.state.process_index) // self.context_size

    def gather(self, tensor: Any) -> Any:
        return once_per_context(super().gather(tensor), self.state.num_processes, self.context_size)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        if norm_type != 2:
            raise ConfigurationError(f"norm_type={norm_type!r}: gradients are clipped by their Euclidean norm, 2")
        clipped = list(parameters)
        norm = self.backend.gradient_norm(clipped)
        torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
        return norm


def once_per_context(gathered: Any, n_processes: int, context_size: int) -> Any:
    """Of tensors [n_processes * n, ...] to which every rank gave n rows, the rows of each context's first rank."""
    if context_size == 1:
        return gathered

    def first_ranks(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (n_processes, -1))[::context_size].flatten(0, 1)

    return recursively_apply(first_ranks, gathered)


class NoReward:
    """Stands in for reward functions on the ranks whose answers do not count: the first of each context asks."""

    __name__ = "no_reward"

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)


def context_rng_file(index: int) -> str:
    """Name of the file in a checkpoint that keeps the random state of context `index`."""
    return f"rng_state_context_{index}.pth"


@contextmanager
def as_own_rng_state(checkpoint: str | None, context: int, args: TrainingArguments) -> Iterator[str | None]:
    """A folder in which transformers finds the random state of `context`, whatever number of ranks saved it."""
    if checkpoint is None:
        yield None
        return
    names = [context_rng_file(context)] + ["rng_state.pth"] * (context == 0)
    found = [path for path in (Path(checkpoint, name) for name in names) if path.is_file()]
    if not found:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        own = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
        shutil.copyfile(found[0], Path(folder, own))
        yield folder
