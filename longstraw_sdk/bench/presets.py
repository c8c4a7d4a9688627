"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .glm_slice import cpu_glm_slice, h200_glm_slice
from .group_steps import cpu_cp2, cpu_small, h200_27b_1m, h200_27b_32k, h200_27b_128k, h200_27b_cp2
from .result import BenchResult, Progress
from .simulated_ranks import cpu_simulated_ranks, simulated_ranks
from .sparse_memory import sparse_memory

Preset = Callable[[Progress], Iterator[BenchResult]]
"""Runs one benchmark; its argument is called with what was just done. Yields the result as far as it is known, so that
an interrupted run leaves something, and last the whole."""

PRESETS: dict[str, Preset] = {
    "cpu-small": cpu_small,
    "h200-27b-32k": h200_27b_32k,
    "h200-27b-128k": h200_27b_128k,
    "h200-27b-1m": h200_27b_1m,
    "h200-27b-cp2": h200_27b_cp2,
    "cpu-cp2": cpu_cp2,
    "h200-glm-slice": h200_glm_slice,
    "cpu-glm-slice": cpu_glm_slice,
    "cpu-glm-memory": sparse_memory,
    "cpu-simulated-ranks": cpu_simulated_ranks,
    "simulated-ranks": simulated_ranks,
}
