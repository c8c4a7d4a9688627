"""Qwen3.5 and Qwen3.6 dense text models (transformers `qwen3_5`): Gated DeltaNet and softmax attention layers."""

from .adapter import Qwen36Adapter

__all__ = ["Qwen36Adapter"]
