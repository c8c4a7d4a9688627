"""Tiny models with the architectures of their large namesakes, initialised from a seed."""

import torch
from transformers import (
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

MAX_POSITIONS = 8192
INITIALIZER_RANGE = 0.08  # 0.02 suits thousands of channels; at 64 it roughly doubles the warm-up
GDN_MEMORY_TOKENS = (1.0, 2.0, 4.0, 8.0)
"""Initial decay time of each value head. Short memories give states that look alike at 160 and at 4,000 tokens, so that
what is learnt in short documents holds in long ones; memories of thousands of tokens did not."""
HEAD_DIM = 64
NORM_GAIN = 1.5
"""Initial gain of query and key norms. With gain 1 a normed score cannot exceed sqrt(HEAD_DIM) = 8, and exp(8) is less
than the 4,096 tokens that a single found token competes with."""


def tiny_qwen36(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen3_5ForCausalLM:
    """Hybrid model in float32: a gated-delta-net layer, then a full-attention layer with partial rotary."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=INITIALIZER_RANGE,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
        },
        tie_word_embeddings=False,
        attention_dropout=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config).float()
    model.model.layers[0].linear_attn.A_log.data.zero_()
    model.model.layers[0].linear_attn.dt_bias.data.copy_(torch.log(torch.expm1(1.0 / torch.tensor(GDN_MEMORY_TOKENS))))
    attention = model.model.layers[1].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.fill_(NORM_GAIN - 1)  # these norms multiply by 1 + weight
    return model


def tiny_dense(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> SmolLM3ForCausalLM:
    """Dense model in float32: an attention layer without and one with rotary embedding, as SmolLM3 mixes them.

    With rotary embedding in both, what was learnt in short documents did not hold in long ones.
    """
    config = SmolLM3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        no_rope_layers=[0, 1],  # 0 is a layer without, whatever the name suggests
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        initializer_range=INITIALIZER_RANGE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return SmolLM3ForCausalLM(config).float()


def tiny_glm52(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> GlmMoeDsaForCausalLM:
    """Sparse latent attention in float32: two layers share one selection of 256 tokens; the second has experts."""
    config = GlmMoeDsaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        index_topk_pattern="FS",
        index_topk=256,
        index_n_heads=4,
        index_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        routed_scaling_factor=1.0,
        initializer_range=INITIALIZER_RANGE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    torch.manual_seed(seed)
    return GlmMoeDsaForCausalLM(config).float()
