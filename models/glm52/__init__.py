"""GLM-5.2: multi-head latent attention over tokens that a sparse indexer selects, mixture of experts."""

from .adapter import GLM52Adapter
from .expert_shards import keep_expert_shard, load_expert_shard

__all__ = ["GLM52Adapter", "keep_expert_shard", "load_expert_shard"]
