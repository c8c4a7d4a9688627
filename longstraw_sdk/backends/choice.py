"""The backend by name."""

from __future__ import annotations

import os

from torch import distributed as dist

from ..errors import ConfigurationError
from .accelerate import AccelerateBackend
from .local import LocalBackend
from .protocol import ShardingBackend

NAMES = ("auto", "local", "accelerate")


def make_backend(name: str, context_parallel_size: int = 1) -> ShardingBackend:
    """`auto` is `local` in a single process and `accelerate` in several."""
    if name not in NAMES:
        raise ConfigurationError(f"backend={name!r} is not known; allowed: {', '.join(map(repr, NAMES))}")
    if name == "auto":
        name = "accelerate" if _n_processes() > 1 or context_parallel_size > 1 else "local"
    if name == "accelerate":
        return AccelerateBackend(context_parallel_size)
    if context_parallel_size > 1:
        raise ConfigurationError(
            f"context_parallel_size={context_parallel_size} needs several processes; the local backend has one"
        )
    return LocalBackend()


def _n_processes() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
