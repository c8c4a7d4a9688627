"""Two tiny models with the architectures of their large namesakes, initialised from a seed."""

import torch
from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from longstraw_sdk.types import CausalLM

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
    """Hybrid model in float32: three gated-delta-net layers, then one full-attention layer with partial rotary."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
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
    model = _sharpened(Qwen3_5ForCausalLM(config).float(), gain=NORM_GAIN - 1)  # its norms multiply by 1 + weight
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.linear_attn.A_log.data.zero_()
            layer.linear_attn.dt_bias.data.copy_(torch.log(torch.expm1(1.0 / torch.tensor(GDN_MEMORY_TOKENS))))
    return model


def tiny_dense(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen3ForCausalLM:
    """Dense model in float32: three full-attention layers with full rotary."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        initializer_range=INITIALIZER_RANGE,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e9},
        tie_word_embeddings=False,
        attention_dropout=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return _sharpened(Qwen3ForCausalLM(config).float(), gain=NORM_GAIN)


def _sharpened(model: CausalLM, gain: float) -> CausalLM:
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.fill_(gain)
    return model
