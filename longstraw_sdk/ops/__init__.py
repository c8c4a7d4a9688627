"""Pure tensor operators. Each fast one sits beside a plain reference with the same signature."""

from .logprobs import selective_log_probs
from .prefix_attention import prefix_attention
from .sparse_attention import sparse_latent_attention
from .sparse_selection import NOT_SELECTED, index_scores, select_top_k

__all__ = [
    "NOT_SELECTED",
    "index_scores",
    "prefix_attention",
    "select_top_k",
    "selective_log_probs",
    "sparse_latent_attention",
]
