"""Frozen weights sharded by FSDP2 over the ranks of a context, which run every layer together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import ConfigurationError
from ..lora import is_lora_parameter
from ..state import ContextGroup
from ..types import CausalLM, is_shared

_FSDP = "ACCELERATE_USE_FSDP"  # set by `accelerate launch` from its configuration


def shard_frozen_weights(model: CausalLM, context: ContextGroup | None) -> None:
    """Let each rank of `context` keep its part of every decoder layer's frozen weights, gathered while the layer runs.

    LoRA, embeddings, head and experts that are spread over ranks already stay whole. There is no way back: the model
    stays sharded when its session closes, and another session may bind it.

    Raises:
        ConfigurationError: ranks do not share prompts, or the model has no list of decoder layers.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if context is None:
        raise ConfigurationError(
            "FSDP2 shards frozen weights over the ranks of a context, which run every layer together, but "
            "context_parallel_size is 1; set it above 1, or launch without FSDP"
        )
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigurationError(
            f"{type(model.base_model).__name__} has no list of decoder `layers` to shard; launch without FSDP"
        )
    mesh = DeviceMesh.from_group(context.group, next(model.parameters()).device.type)
    for layer in layers:
        if not isinstance(layer, FSDPModule):
            whole = set(_kept_whole(layer))
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


def fsdp_is_asked_for() -> bool:
    """Whether `accelerate launch` was told to use FSDP.

    Raises:
        ConfigurationError: it was told to use the first version of FSDP.
    """
    if os.environ.get(_FSDP, "false").lower() != "true":
        return False
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigurationError(
            f"FSDP version {version} flattens LoRA together with frozen weights; set fsdp_version: 2 in accelerate's "
            "configuration"
        )
    return True


@contextmanager
def fsdp_is_ours() -> Iterator[None]:
    """Within the block accelerate does not know that FSDP was asked for: it would shard LoRA, and every forward."""
    asked = os.environ.get(_FSDP)
    os.environ[_FSDP] = "false"
    try:
        yield
    finally:
        if asked is None:
            del os.environ[_FSDP]
        else:
            os.environ[_FSDP] = asked


def _kept_whole(layer: nn.Module) -> Iterable[nn.Parameter]:
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad or is_lora_parameter(f".{name}") or not is_shared(parameter):
            yield parameter
