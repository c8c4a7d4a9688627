"""The backend by name."""

from __future__ import annotations

from ..errors import ConfigurationError
from .accelerate import AccelerateBackend
from .frozen_weights import fsdp_is_asked_for
from .local import LocalBackend
from .megatron import MegatronBackend, is_in_use
from .protocol import ShardingBackend
from .ranks import n_processes

NAMES = ("auto", "local", "accelerate", "megatron")


def make_backend(name: str, context_parallel_size: int = 1, expert_parallel_size: int = 1) -> ShardingBackend:
    """`auto` is `megatron` if its parallel_state is initialised, else `local` for one process and `accelerate`."""
    if name not in NAMES:
        raise ConfigurationError(f"backend={name!r} is not known; allowed: {', '.join(map(repr, NAMES))}")
    sharded = fsdp_is_asked_for()
    if name == "auto":
        several = max(n_processes(), context_parallel_size, expert_parallel_size) > 1
        name = "megatron" if is_in_use() else "accelerate" if several or sharded else "local"
    if name == "accelerate":
        return AccelerateBackend(context_parallel_size, expert_parallel_size, shard_frozen_weights=sharded)
    if sharded:
        raise ConfigurationError(f"FSDP was asked for, which backend={name!r} does not serve; use 'accelerate'")
    if name == "megatron":
        return MegatronBackend(context_parallel_size, expert_parallel_size)
    for option, size in (
        ("context_parallel_size", context_parallel_size),
        ("expert_parallel_size", expert_parallel_size),
    ):
        if size > 1:
            raise ConfigurationError(f"{option}={size} needs several processes; the local backend has one")
    return LocalBackend()
