"""What a benchmark measured, and on what."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

Progress = Callable[[str], None]
"""Is told what was just done."""

ROW_FIELDS = (
    "preset",
    "system",
    "gradient_scope",
    "prompt_tokens",
    "group",
    "capture_seconds",
    "replay_seconds",
    "sweep_seconds",
    "step_seconds",
    "peak_gib",
    "roofline_share",
    "device",
    "date",
)
"""What every row of every benchmark has, so that scripts can read them all."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One phase of one system.

    `peak_bytes` counts what the phase allocates on top of weights and resident state.
    """

    system: str
    phase: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class BenchResult(ABC):
    """What one preset found. `settings` holds dtype and shapes, `machine` hardware, date and versions."""

    preset: str
    settings: dict[str, Any]
    machine: dict[str, Any]

    @property
    @abstractmethod
    def note(self) -> str:
        """What a reader of the table must know."""

    @abstractmethod
    def table(self) -> Table:
        """The result for a terminal."""

    @abstractmethod
    def plot(self, output_dir: Path) -> Path:
        """Write `<preset>.png` into `output_dir` and return its path."""

    @abstractmethod
    def measured(self) -> Iterator[dict[str, Any]]:
        """One dict per measurement: what it has of `ROW_FIELDS`, and whatever else belongs to it."""

    def rows(self) -> list[dict[str, Any]]:
        """What the JSON file holds: dicts with all of `ROW_FIELDS`, None where one has no meaning, and more."""
        known = {"preset": self.preset, "device": self.machine["device"], "date": self.machine["date"]}
        return [dict.fromkeys(ROW_FIELDS) | known | row | {"machine": self.machine} for row in self.measured()]

    def write(self, output_dir: Path) -> Path:
        """Write `<preset>.json` into `output_dir` and return its path."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / f"{self.preset}.json"
        path.write_text(json.dumps(self.rows(), indent=2) + "\n")
        return path


@dataclass(frozen=True, kw_only=True)
class PeakResult(BenchResult):
    """Time and peak memory of systems beside each other."""

    measurements: tuple[Measurement, ...]

    @property
    def note(self) -> str:
        return "Peak is what the phase allocates on top of weights and resident state."

    def table(self) -> Table:
        table = Table("system", "phase", title=f"{self.preset} on {self.machine['device']}")
        for name in ("prompt tokens", "new tokens", "seconds", "tokens/s", "peak MiB"):
            table.add_column(name, justify="right")
        for m in self.measurements:
            table.add_row(
                m.system,
                m.phase,
                f"{m.prompt_tokens:,}",
                f"{m.new_tokens:,}",
                f"{m.seconds:.3f}",
                f"{m.tokens_per_second:,.0f}",
                f"{m.peak_bytes / 2**20:,.1f}",
            )
        return table

    def plot(self, output_dir: Path) -> Path:
        from .plots import plot_peaks

        return plot_peaks(self, output_dir)

    def measured(self) -> Iterator[dict[str, Any]]:
        for m in self.measurements:
            known = {"group": 1, "replay_seconds": m.seconds, "peak_gib": m.peak_bytes / 2**30}
            yield asdict(m) | known | {"tokens_per_second": m.tokens_per_second, "settings": self.settings}
