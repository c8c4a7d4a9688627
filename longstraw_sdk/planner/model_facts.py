"""What the planner knows of a model, from its config alone: nothing is downloaded but the config, nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from ..adapter import adapter_for
from ..errors import ConfigurationError, UnsupportedModelError
from ..state import AttentionKVSpec, IndexerKeySpec, MLALatentSpec, RecurrentSpec, StateSpec
from ..types import CausalLM
from .work import ModelWork

NF4_BYTES = 0.5 + 4 / 64
"""Per weight: four bits, and a float32 scale for every 64 (bitsandbytes without double quantisation)."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one model with LoRA.

    Args:
        config: of the text model.
        element_bytes, sum_bytes: of a weight or activation, and of what sums gradients.
        specs: what each layer keeps of a prompt.
        other_bytes: base weights that every rank holds whole and that are never quantised.
        linear_weights: weights of the linears in decoder layers, on every rank.
        expert_bytes: stacked experts of all ranks together.
        lora_shared, lora_experts: LoRA parameters; the latter are spread with the experts.
        work: FLOPs.
    """

    name: str
    config: Any
    element_bytes: int
    sum_bytes: int
    specs: tuple[StateSpec, ...]
    other_bytes: int
    linear_weights: int
    expert_bytes: int
    lora_shared: int
    lora_experts: int
    work: ModelWork
    context_parallel: bool
    expert_parallel: bool

    @cached_property
    def layers(self) -> list[tuple[str, ...]]:
        """The kinds of state that each decoder layer keeps."""
        kinds: dict[int, list[str]] = {}
        for spec in self.specs:
            kinds.setdefault(spec.layer, []).append(spec.kind)
        return [tuple(kinds[layer]) for layer in sorted(kinds)]

    @cached_property
    def is_sparse(self) -> bool:
        return any(isinstance(spec, MLALatentSpec) for spec in self.specs)

    @property
    def n_experts(self) -> int:
        return int(getattr(self.config, "n_routed_experts", 0) or 0)

    def base_bytes(self, expert_ranks: int, *, nf4: bool) -> float:
        linears = self.linear_weights * (NF4_BYTES if nf4 else self.element_bytes)
        return self.other_bytes + linears + self.expert_bytes / expert_ranks

    def lora_parameters(self, expert_ranks: int) -> float:
        return self.lora_shared + self.lora_experts / expert_ranks


def model_facts(model: str, lora_rank: int) -> ModelFacts:
    """Of a folder, a Hub id or a built-in geometry.

    Raises:
        ConfigurationError: there is no such model, or its config cannot be reached.
        UnsupportedModelError: the planner does not know its layers.
    """
    folder = Path(model)
    key = str(folder.resolve()) if folder.is_dir() else model
    return _facts(key, lora_rank)


@cache
def _facts(model: str, lora_rank: int) -> ModelFacts:
    config, dtype = _config_of(model)
    return facts_of(model, config, dtype, lora_rank)


def _config_of(model: str) -> tuple[Any, torch.dtype]:
    from .geometry import GEOMETRIES

    if model in GEOMETRIES:
        geometry = GEOMETRIES[model]
        return geometry.config(geometry.n_units), geometry.dtype
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigurationError(f"--model {model} is a folder without config.json; give the folder of a checkpoint")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--model {model!r} is neither a folder with a config.json that transformers knows, nor a built-in "
            f"geometry ({', '.join(GEOMETRIES)}), and its config could not be fetched from the Hugging Face Hub "
            f"({str(error).splitlines()[0]}); download config.json into a folder and give that"
        ) from error
    config = config.get_text_config()
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    return config, getattr(torch, dtype) if isinstance(dtype, str) else dtype


def facts_of(name: str, config: Any, dtype: torch.dtype, lora_rank: int) -> ModelFacts:
    """Of a config, by making the model with LoRA on the meta device."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    adapter = adapter_for(base)
    specs = adapter.state_specs(base)
    known = (AttentionKVSpec, RecurrentSpec, MLALatentSpec, IndexerKeySpec)
    strange = sorted({spec.kind for spec in specs if not isinstance(spec, known)})
    if strange:
        raise UnsupportedModelError(
            f"{type(adapter).__name__} keeps {', '.join(strange)} of some layers, whose memory the planner does not "
            f"know; it knows {', '.join(spec.kind for spec in known)}"
        )
    work = ModelWork.of(base)
    linear_weights, other_bytes, expert_bytes = _base_sizes(base)
    with torch.device("meta"):  # PEFT would make LoRA on the CPU first: 23 GB of it for GLM-5.2
        model = get_peft_model(base, adapter.lora_config(r=lora_rank))
    trained = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    experts = sum(n for name, n in trained if ".experts." in name)
    return ModelFacts(
        name=name,
        config=config,
        element_bytes=dtype.itemsize,
        sum_bytes=max(4, dtype.itemsize),
        specs=specs,
        other_bytes=other_bytes,
        linear_weights=linear_weights,
        expert_bytes=expert_bytes,
        lora_shared=sum(n for _, n in trained) - experts,
        lora_experts=experts,
        work=work,
        context_parallel=adapter.context_parallel,
        expert_parallel=adapter.expert_parallel,
    )


def _base_sizes(base: CausalLM) -> tuple[int, int, int]:
    """Weights of linears in decoder layers, bytes of everything else that is whole, bytes of stacked experts."""
    linears = {id(module.weight) for module in base.base_model.modules() if isinstance(module, torch.nn.Linear)}
    linear_weights = other_bytes = expert_bytes = 0
    for name, p in base.named_parameters():
        if ".experts." in name:
            expert_bytes += p.nbytes
        elif id(p) in linears:
            linear_weights += p.numel()
        else:
            other_bytes += p.nbytes
    return linear_weights, other_bytes, expert_bytes
