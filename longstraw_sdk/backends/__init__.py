"""Sharding backends: how gradients of several processes become one. One small protocol, `GradientBackend`."""

from .local import LocalBackend
from .protocol import GradientBackend

__all__ = ["GradientBackend", "LocalBackend"]
