"""A part of every layer's experts per rank: loading it, cutting it out of a whole model, and putting adapters together.

PEFT lays the LoRA of E stacked experts out as `lora_A` [E * r, in], expert by expert, and `lora_B` [out, r * E], rank
index by rank index with the experts innermost.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaExperts, GlmMoeDsaForCausalLM

from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.state import ContextGroup
from longstraw_sdk.types import CausalLM

_EXPERT = re.compile(r"(.*\.layers\.(?P<layer>\d+)\..*\.experts\.)(?P<expert>\d+)(\..*)")
_LAYER = re.compile(r".*\blayers\.(?P<layer>\d+)\..*")
_STACKED = re.compile(r".*\.experts\.(?:gate_up_proj|down_proj)")
_LORA = re.compile(r".*\.experts(?:\.base_layer)*\.lora_(?P<matrix>[AB])\..*")


def load_expert_shard(folder: str | Path, rank: int, size: int, **options: Any) -> GlmMoeDsaForCausalLM:
    """The model in `folder` with this rank's part of the experts; the others are never read.

    Args:
        folder: a local checkpoint in safetensors, experts one by one (as released) or stacked.
        rank, size: this rank holds the `rank`-th of `size` equal parts of each layer's experts.
        options: of `from_pretrained`, as `dtype` and `attn_implementation`.
    """
    folder = Path(folder)
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder)
    n_own = _part(config.n_routed_experts, size)
    tensors = dict(_own_tensors(folder, config.num_hidden_layers, range(rank * n_own, (rank + 1) * n_own)))

    class Shard(GlmMoeDsaForCausalLM):
        def __init__(self, config: Any):
            super().__init__(config)  # on the meta device, as from_pretrained calls it
            part = copy.copy(config)
            part.n_routed_experts = n_own
            for _, experts in _experts_of(self):
                experts.__init__(part)

    model = Shard.from_pretrained(None, config=config, state_dict=tensors, **options)
    model.__class__ = GlmMoeDsaForCausalLM
    model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    for _, experts in _experts_of(model):
        experts.first_expert = rank * n_own
    return model


def keep_expert_shard(model: CausalLM, rank: int, size: int) -> CausalLM:
    """Drop all but the `rank`-th of `size` parts of the experts of a whole model, LoRA on them included; in place."""
    for name, experts in list(_experts_of(model)):
        n_own = _part(experts.num_experts, size)
        own = slice(rank * n_own, (rank + 1) * n_own)
        for parameter_name, parameter in list(experts.named_parameters(recurse=False)):
            if parameter.ndim == 3:
                _replace(experts, parameter_name, parameter.data[own].clone())
        for wrapper in _wrappers(model, name):
            for matrix in ("A", "B"):
                for linear in getattr(wrapper, f"lora_{matrix}").values():
                    _replace(linear, "weight", _cut(matrix, linear.weight.data, experts.num_experts, own))
            wrapper.num_experts = n_own
        experts.num_experts, experts.first_expert = n_own, own.start
    return model


def mark_expert_shards(model: CausalLM) -> None:
    """Mark the parameters of experts as not shared by all ranks, in Megatron's way: `parameter.allreduce = False`."""
    for name, experts in _experts_of(model):
        for module in (experts, *_wrappers(model, name)):
            for parameter in module.parameters():
                parameter.allreduce = False


def gather_expert_lora(tensors: Mapping[str, torch.Tensor], n_own: int, group: ContextGroup) -> dict[str, torch.Tensor]:
    """`tensors` by the names of LoRA parameters, those of experts put together from all ranks of `group`. All call it.

    Args:
        n_own: experts per layer on each rank.
    """

    def whole(matrix: str, own: torch.Tensor) -> torch.Tensor:
        parts = group.gather(own)
        if matrix == "A":
            return parts.flatten(0, 1)
        return torch.cat([part.unflatten(1, (-1, n_own)) for part in parts], -1).flatten(1)

    return _of_experts(tensors, whole)


def cut_expert_lora(
    tensors: Mapping[str, torch.Tensor], n_experts: int, rank: int, size: int
) -> dict[str, torch.Tensor]:
    """The inverse of `gather_expert_lora`: of experts only the `rank`-th of `size` parts."""
    n_own = _part(n_experts, size)
    own = slice(rank * n_own, (rank + 1) * n_own)
    return _of_experts(tensors, lambda matrix, whole: _cut(matrix, whole, n_experts, own))


def _of_experts(
    tensors: Mapping[str, torch.Tensor], change: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        place = _LORA.fullmatch(name)
        found[name] = tensor if place is None else change(place["matrix"], tensor).contiguous()
    return found


def _cut(matrix: str, whole: torch.Tensor, n_experts: int, own: slice) -> torch.Tensor:
    if matrix == "A":
        return whole.unflatten(0, (n_experts, -1))[own].flatten(0, 1).clone()
    return whole.unflatten(1, (-1, n_experts))[..., own].flatten(1).clone()


def _part(n_experts: int, size: int) -> int:
    if n_experts % size:
        raise ConfigurationError(
            f"expert_parallel_size={size} does not divide the {n_experts} experts of a layer; choose a divisor"
        )
    return n_experts // size


def _experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name without PEFT's wrappers, and module, of every layer's stacked experts."""
    for path, module in model.named_modules():
        if isinstance(module, GlmMoeDsaExperts):
            yield re.sub(r"(?:\.base_layer)+$", "", path), module


def _wrappers(model: nn.Module, name: str) -> Iterator[Any]:
    """PEFT's wrappers of the experts called `name`, the outermost first."""
    module = model.get_submodule(name)
    while isinstance(module, ParamWrapper):
        yield module
        module = module.base_layer


def _replace(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A new parameter: one that has been through a backward pass keeps its old shape there."""
    setattr(module, name, nn.Parameter(tensor, getattr(module, name).requires_grad))


def _own_tensors(folder: Path, n_layers: int, own: range) -> Iterator[tuple[str, torch.Tensor]]:
    for file, names in _files(folder).items():
        with safe_open(folder / file, "pt") as tensors:
            for name in names:
                layer = _LAYER.fullmatch(name)
                if layer is not None and int(layer["layer"]) >= n_layers:
                    continue  # multi-token prediction, which from_pretrained leaves out too
                expert = _EXPERT.fullmatch(name)
                if expert is not None:
                    if int(expert["expert"]) in own:
                        yield f"{expert[1]}{int(expert['expert']) - own.start}{expert[4]}", tensors.get_tensor(name)
                elif _STACKED.fullmatch(name):
                    yield name, tensors.get_slice(name)[own.start : own.stop]
                else:
                    yield name, tensors.get_tensor(name)


def _files(folder: Path) -> dict[str, Iterable[str]]:
    """Tensor names by file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, list[str]] = {}
        for name, file in json.loads(index.read_text())["weight_map"].items():
            files.setdefault(file, []).append(name)
        return dict(files)
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigurationError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; give a local checkpoint "
            "folder (huggingface_hub.snapshot_download fetches one)"
        )
    with safe_open(single, "pt") as tensors:
        return {single.name: list(tensors.keys())}
