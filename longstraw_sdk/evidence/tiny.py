"""Tiny random LoRA models of each architecture, for parity checks that need no download."""

from __future__ import annotations

from typing import Any

import torch

from ..adapter import adapter_for
from ..errors import ConfigurationError
from ..types import CausalLM
from .parity import randomize_lora

ARCHITECTURES = ("qwen36", "llama", "qwen2", "qwen3", "mistral", "glm52")


def tiny_model(architecture: str, *, n_layers: int = 4, rank: int = 4, seed: int = 0, **overrides: Any) -> CausalLM:
    """A float32 `PeftModel` with non-zero LoRA on every linear: vocabulary 97, width 32, 4 heads on 2 key-value heads.

    Args:
        architecture: one of `ARCHITECTURES`; "qwen36" has one attention layer in four, the others attend in all.
        overrides: config fields.
    """
    import transformers
    from peft import get_peft_model

    names = {
        "qwen36": "Qwen3_5",
        "llama": "Llama",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "mistral": "Mistral",
        "glm52": "GlmMoeDsa",
    }
    if architecture not in names:
        raise ConfigurationError(f"architecture {architecture!r} is not known; allowed: {', '.join(ARCHITECTURES)}")
    options: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if architecture == "qwen36":
        options |= {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
    if architecture == "qwen2":
        del options["head_dim"]
    if architecture == "mistral":
        options["sliding_window"] = None
    if architecture == "glm52":
        del options["head_dim"]
        options |= {
            "pad_token_id": None,  # its embedding would be zero, and so every score of the indexer equal
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "index_topk": 16,
            "index_n_heads": 16,  # a score is exactly 0, and so tied, where every head is negative
            "index_head_dim": 16,
            "index_topk_pattern": "FFSSFS"[:n_layers].ljust(n_layers, "S"),
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 2,
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        }
    name = names[architecture]
    config_class = getattr(transformers, f"{name}TextConfig" if architecture == "qwen36" else f"{name}Config")
    torch.manual_seed(seed)
    base = getattr(transformers, f"{name}ForCausalLM")(config_class(**(options | overrides)))
    model = get_peft_model(base, adapter_for(base).lora_config(r=rank))
    randomize_lora(model, seed)
    return model
