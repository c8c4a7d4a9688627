"""Adapter and optimizer state in Megatron's distributed checkpoints, which load on any number of expert ranks.

Every rank writes what it holds: of experts its part, of everything else the first rank's copy. LoRA A of E stacked
experts is cut along its rows; B, which PEFT lays out with the experts innermost, as [out, r, E] along the last axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from ..errors import ConfigurationError
from ..lora import base_model_of, is_lora_parameter
from ..types import CausalLM
from .megatron_cpu import on_cpu


def save_sharded(path: str | Path, model: CausalLM, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the adapter of `model`, and the state of `optimizer` if given, into the folder `path`.

    Every rank calls it, with Megatron's parallel_state initialised (a `MegatronBackend` does so). Megatron starts a
    process of its own here: a script needs its `if __name__ == "__main__":`.

    Raises:
        ConfigurationError: the optimizer is none of torch's, or keeps state that has not its parameter's shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    named = _adapter(model)
    state: dict[str, Any] = _sharded(model, "adapter", named)
    if optimizer is not None:
        moments, state["optimizer"] = _optimizer_state(optimizer, named)
        for key, tensors in moments.items():
            state |= _sharded(model, f"optimizer.{key}", tensors)
    Path(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with on_cpu():
        dist_checkpointing.save(state, str(path), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))


@torch.no_grad()
def load_sharded(path: str | Path, model: CausalLM, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what `save_sharded` wrote into `model` and `optimizer`, with as many ranks per set of experts as there are.

    Every rank calls it. Raises `ConfigurationError` if `optimizer` is given but was not saved, or has other groups.
    """
    from megatron.core import dist_checkpointing

    named = _adapter(model)
    saved = dist_checkpointing.load_common_state_dict(str(path)).get("optimizer")
    moments: dict[str, dict[str, torch.Tensor]] = {}
    if optimizer is not None:
        _check_groups(optimizer, saved, path)
        for key, dtypes in saved["moments"].items():
            moments[key] = {name: torch.empty_like(named[name], dtype=dtype) for name, dtype in dtypes.items()}
    wanted = {"adapter": named} | {f"optimizer.{key}": tensors for key, tensors in moments.items()}
    template: dict[str, Any] = {}
    for key, tensors in wanted.items():
        template |= _sharded(model, key, tensors)
    with on_cpu():
        found = dist_checkpointing.load(template, str(path))
    for key, tensors in wanted.items():
        for name, tensor in tensors.items():
            tensor.copy_(found[f"{key}.{name}"].reshape(tensor.shape))
    if optimizer is not None:
        optimizer.state.clear()
        for name, scalars in saved["scalars"].items():
            own = {key: tensors[name] for key, tensors in moments.items() if name in tensors}
            optimizer.state[named[name]] = scalars | own
        for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(options)


def _adapter(model: CausalLM) -> dict[str, torch.Tensor]:
    """LoRA, and what else is trained, by name."""
    named = base_model_of(model).named_parameters()
    return {name: p for name, p in named if p.requires_grad or is_lora_parameter(name)}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Tensors shaped as parameters, by key and name, and the rest, which is the same on every rank."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} is none of torch's optimizers; Megatron's write their own "
            "sharded_state_dict(), to be saved beside the adapter"
        )
    names = {id(p): name for name, p in named.items()}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for p, entry in optimizer.state.items():
        name = names[id(p)]
        scalars[name] = {}
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                scalars[name][key] = value
            elif value.shape == p.shape:
                moments.setdefault(key, {})[name] = value
            else:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} keeps {key} {tuple(value.shape)} for {name} {tuple(p.shape)}, which "
                    "cannot be cut along experts; save without the optimizer, or use one as AdamW or SGD"
                )
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    dtypes = {key: {name: tensor.dtype for name, tensor in tensors.items()} for key, tensors in moments.items()}
    return moments, {"moments": dtypes, "scalars": scalars, "groups": groups}


def _check_groups(optimizer: torch.optim.Optimizer, saved: Any, path: str | Path) -> None:
    if saved is None:
        raise ConfigurationError(f"{path} holds an adapter and no optimizer; load it without one")
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise ConfigurationError(
            f"{path} holds {len(saved['groups'])} parameter groups, the optimizer has {len(optimizer.param_groups)}; "
            "make it as the saved one was"
        )


def _sharded(model: CausalLM, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """`tensors`, shaped as the parameters they are named after, as `ShardedTensor` under "key.name"."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    part = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()
    expert_copy = (0, 0, parallel_state.get_expert_data_parallel_rank())
    copy = (0, 0, parallel_state.get_data_parallel_rank(with_context_parallel=True))
    found = {}
    for name, tensor in tensors.items():
        own, label = tensor.detach(), f"{key}.{name}"
        n_own = _stacked_experts(model, name)
        if n_own is None:
            found[label] = ShardedTensor.from_rank_offsets(label, own, replica_id=copy)
        elif ".lora_A." in name:
            found[label] = ShardedTensor.from_rank_offsets(label, own, (0, *part), replica_id=expert_copy)
        else:
            by_expert = own.unflatten(1, (-1, n_own))
            found[label] = ShardedTensor.from_rank_offsets(label, by_expert, (2, *part), replica_id=expert_copy)
    return found


def _stacked_experts(model: CausalLM, name: str) -> int | None:
    """How many experts this rank's LoRA matrix `name` is for; None if it adapts no stack of experts."""
    path, is_lora, _ = name.partition(".lora_")
    wrapper: Any = base_model_of(model).get_submodule(path) if is_lora else None
    if getattr(wrapper, "parameter_name", None) is None or wrapper.get_param().ndim != 3:
        return None
    return int(wrapper.num_experts)
