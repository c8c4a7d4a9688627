"""Pure tensor operators. Each fast one sits beside a plain reference with the same signature."""

from .logprobs import selective_log_probs
from .prefix_attention import prefix_attention

__all__ = ["prefix_attention", "selective_log_probs"]
