"""Plain decoders: grouped-query or multi-head softmax attention in every layer (Llama, Qwen2, Qwen3, Mistral, ...)."""

from .adapter import DenseAdapter

__all__ = ["DenseAdapter"]
