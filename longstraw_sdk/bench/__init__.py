"""Benchmarks that name their machine, versions, dtype and shapes, with their peers measured in the same run."""

from .presets import PRESETS
from .result import BenchResult, Measurement, PeakResult

__all__ = ["PRESETS", "BenchResult", "Measurement", "PeakResult"]
