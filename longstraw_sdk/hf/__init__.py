"""The adapter base for transformers decoders: public extension points only, no patched modelling code."""

from .adapter import TransformersAdapter

__all__ = ["TransformersAdapter"]
