"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable

from .result import BenchResult
from .sparse_memory import sparse_memory

Preset = Callable[[Callable[[str], None]], BenchResult]
"""Runs one benchmark; its argument is called with what was just done."""

PRESETS: dict[str, Preset] = {"cpu-glm-memory": sparse_memory}
