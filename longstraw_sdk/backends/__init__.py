"""Sharding backends: which ranks share a prompt, and how their gradients become one."""

from .accelerate import AccelerateBackend
from .choice import make_backend
from .frozen_weights import fsdp_is_ours
from .local import LocalBackend
from .megatron import MegatronBackend
from .megatron_checkpoint import load_sharded, save_sharded
from .protocol import ShardingBackend

__all__ = [
    "AccelerateBackend",
    "LocalBackend",
    "MegatronBackend",
    "ShardingBackend",
    "fsdp_is_ours",
    "load_sharded",
    "make_backend",
    "save_sharded",
]
