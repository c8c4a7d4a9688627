"""Adapter of the Qwen3.5 / Qwen3.6 hybrid architecture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from longstraw_sdk.hf import TransformersAdapter
from longstraw_sdk.state import RecurrentSpec, StateSpec
from longstraw_sdk.types import CausalLM, accumulation_dtype

from .gated_delta_net import swap_gated_delta_net
from .kernels import swap_fused


class Qwen36Adapter(TransformersAdapter):
    """Keeps keys and values of the attention layers, and of each Gated DeltaNet layer the recurrent matrix and the
    convolution tail at chunk boundaries (Gated Delta Networks, arXiv 2412.06464; transformers `modeling_qwen3_5.py`).
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "linear_attention")
    context_parallel: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "out_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )

    def install(self, model: CausalLM) -> Callable[[], None]:
        undo = ExitStack()
        undo.callback(super().install(model))
        undo.callback(swap_gated_delta_net(model))
        undo.callback(swap_fused(model))
        return undo.close

    def layer_spec(self, config: Any, layer: int, layer_type: str, dtype: torch.dtype) -> StateSpec:
        if layer_type != "linear_attention":
            return super().layer_spec(config, layer, layer_type, dtype)
        key_width = config.linear_num_key_heads * config.linear_key_head_dim
        value_width = config.linear_num_value_heads * config.linear_value_head_dim
        return RecurrentSpec(
            layer=layer,
            n_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_channels=2 * key_width + value_width,
            conv_tail=config.linear_conv_kernel_dim - 1,
            dtype=dtype,
            state_dtype=accumulation_dtype(dtype),
        )
