"""The backend by name."""

from __future__ import annotations

from ..errors import ConfigurationError
from .accelerate import AccelerateBackend
from .local import LocalBackend, n_processes
from .protocol import ShardingBackend

NAMES = ("auto", "local", "accelerate")


def make_backend(name: str, context_parallel_size: int = 1) -> ShardingBackend:
    """`auto` is `local` in a single process and `accelerate` in several."""
    if name not in NAMES:
        raise ConfigurationError(f"backend={name!r} is not known; allowed: {', '.join(map(repr, NAMES))}")
    if name == "auto":
        name = "accelerate" if n_processes() > 1 or context_parallel_size > 1 else "local"
    if name == "accelerate":
        return AccelerateBackend(context_parallel_size)
    if context_parallel_size > 1:
        raise ConfigurationError(
            f"context_parallel_size={context_parallel_size} needs several processes; the local backend has one"
        )
    return LocalBackend()
