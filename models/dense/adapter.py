"""Adapter of plain decoders."""

from __future__ import annotations

from typing import ClassVar

from longstraw_sdk.hf import TransformersAdapter


class DenseAdapter(TransformersAdapter):
    """Any transformers decoder with full softmax attention in every layer. Keys and values are all it keeps."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
    context_parallel: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
