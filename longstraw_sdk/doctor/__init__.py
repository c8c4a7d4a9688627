"""What must be true before a run may start, found in one pass, each fault with a remedy."""

from .check import Check, examine
from .subject import Subject

__all__ = ["Check", "Subject", "examine"]
