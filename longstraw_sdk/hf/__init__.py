"""The adapter base for transformers decoders: public extension points only, no patched modelling code."""

from .adapter import TransformersAdapter
from .positions import ExtendedPositions, extend_positions

__all__ = ["ExtendedPositions", "TransformersAdapter", "extend_positions"]
