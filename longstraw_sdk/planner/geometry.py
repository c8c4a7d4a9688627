"""Shapes of published models, and a few of their layers with random weights for simulations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ..adapter import adapter_for
from ..state import StateSpec
from ..types import CausalLM

LORA_RANK = 16
CHECKPOINTING = {"use_reentrant": False}


@dataclass(frozen=True)
class WholeModel:
    """Sizes of a model with all its layers.

    Args:
        weights_bytes: on one rank, which holds its part of the routed experts and all of the rest.
        specs: what each layer keeps of a prompt.
        routed_bytes_per_token: what a token sends to its experts in all layers of one forward, if all were elsewhere.
        checkpointing: whether backward forwards each layer again.
    """

    weights_bytes: int
    specs: tuple[StateSpec, ...]
    routed_bytes_per_token: int
    checkpointing: bool


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A decoder whose layers are `front` and behind it `n_units` times `unit`, both lists of layer kinds.

    Args:
        model_type: transformers' name of the architecture.
        options: fields of its config, without those that name layers.
        layer_field: the config field that names the kind of every layer.
        dtype: of the weights that LoRA leaves alone.
        checkpointing: forward each layer again in backward, because the activations of all would not fit on a device.
    """

    name: str
    model_type: str
    layer_field: str
    front: tuple[str, ...]
    unit: tuple[str, ...]
    n_units: int
    options: Mapping[str, Any] = field(repr=False)
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = False

    def n_layers(self, n_units: int) -> int:
        return len(self.front) + n_units * len(self.unit)

    def config(self, n_units: int, expert_ranks: int = 1) -> Any:
        """Config of the front and `n_units` units, with the experts that one of `expert_ranks` ranks holds."""
        options = dict(self.options)
        if "n_routed_experts" in options:
            options["n_routed_experts"] //= expert_ranks
        options |= {self.layer_field: [*self.front, *self.unit * n_units], "num_hidden_layers": self.n_layers(n_units)}
        return CONFIG_MAPPING[self.model_type](**options)

    def build(self, n_units: int, expert_ranks: int, device: torch.device) -> CausalLM:
        """A `PeftModel` with random weights of `config(n_units, expert_ranks)` and LoRA on every linear."""
        torch.manual_seed(0)
        base = self._base(self.config(n_units, expert_ranks), device)
        if self.checkpointing:
            base.activation_checkpointing_enable(CHECKPOINTING)
        return get_peft_model(base, adapter_for(base).lora_config(r=LORA_RANK))

    def whole(self, expert_ranks: int) -> WholeModel:
        """What the whole model takes, counted without making it."""
        base = self._base(self.config(self.n_units), torch.device("meta"))
        n_bytes = 0
        for name, p in base.named_parameters():
            n_bytes += p.nbytes // (expert_ranks if ".experts." in name else 1)
        config = base.config
        n_moe_layers = list(getattr(config, "mlp_layer_types", None) or []).count("sparse")
        routed = n_moe_layers * getattr(config, "num_experts_per_tok", 0) * config.hidden_size * self.dtype.itemsize
        return WholeModel(n_bytes, adapter_for(base).state_specs(base), routed, self.checkpointing)

    def _base(self, config: Any, device: torch.device) -> CausalLM:
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype)


_PERIOD = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
_SELECTING = ("full", "full", "full", "shared", "shared", "shared")
_SHARING = ("full", "shared", "shared", "shared")

QWEN36_27B = Geometry(
    name="qwen3.6-27b",
    model_type="qwen3_5_text",
    layer_field="layer_types",
    front=_PERIOD,
    unit=_PERIOD,
    n_units=15,
    checkpointing=True,
    options={
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 2**23,
    },
)

# transformers' defaults are the released shapes but for which layers select: 0, 1, 2, 6, 10, ..., 74 of 78.
GLM52 = Geometry(
    name="glm-5.2",
    model_type="glm_moe_dsa",
    layer_field="indexer_types",
    front=_SELECTING,
    unit=_SHARING,
    n_units=18,
    options={
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 2**23,
    },
)

_TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2**14,
}

TINY_QWEN36 = Geometry(
    name="tiny-qwen3.6",
    model_type="qwen3_5_text",
    layer_field="layer_types",
    front=("linear_attention", "full_attention"),
    unit=("linear_attention", "full_attention"),
    n_units=3,
    checkpointing=True,
    dtype=torch.float32,
    options={
        **_TINY,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
)

TINY_QWEN3 = Geometry(
    name="tiny-qwen3",
    model_type="qwen3",
    layer_field="layer_types",
    front=("full_attention",),
    unit=("full_attention",),
    n_units=7,
    checkpointing=True,
    dtype=torch.float32,
    options=_TINY,
)

TINY_GLM52 = Geometry(
    name="tiny-glm-5.2",
    model_type="glm_moe_dsa",
    layer_field="indexer_types",
    front=("full", "shared"),
    unit=("full", "shared"),
    n_units=2,
    dtype=torch.float32,
    options={
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "index_topk": 64,
        "index_n_heads": 8,  # with few heads all may be negative, and then scores tie at 0
        "index_head_dim": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 2**14,
    },
)

GEOMETRIES = {geometry.name: geometry for geometry in (QWEN36_27B, GLM52)}
"""Built-in shapes of published models, by name."""
