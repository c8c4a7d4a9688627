"""Pure tensor operators. Each fast one sits beside a plain reference with the same signature."""

from .carry import carry_state, carry_tail
from .decode_attention import decode_attention
from .expert_exchange import ThroughExperts, through_experts
from .index_scores import index_scores
from .logprobs import selective_log_probs
from .lora_linear import add_lora, lora_linear
from .prefix_attention import Recall, prefix_attention
from .sparse_attention import sparse_latent_attention
from .sparse_selection import MAX_POSITION, NOT_SELECTED, select_top_k, select_top_k_over_ranks

__all__ = [
    "MAX_POSITION",
    "NOT_SELECTED",
    "Recall",
    "ThroughExperts",
    "add_lora",
    "carry_state",
    "carry_tail",
    "decode_attention",
    "index_scores",
    "lora_linear",
    "prefix_attention",
    "select_top_k",
    "select_top_k_over_ranks",
    "selective_log_probs",
    "sparse_latent_attention",
    "through_experts",
]
