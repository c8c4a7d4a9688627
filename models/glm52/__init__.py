"""GLM-5.2: multi-head latent attention over tokens that a sparse indexer selects, mixture of experts."""

from .adapter import GLM52Adapter

__all__ = ["GLM52Adapter"]
