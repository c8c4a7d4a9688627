"""What a benchmark measured, and on what."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


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
class BenchResult:
    """Measurements of one run. `settings` holds dtype and shapes, `machine` hardware, date and versions."""

    preset: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    measurements: tuple[Measurement, ...]

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(m) | {"tokens_per_second": m.tokens_per_second} for m in self.measurements]
        return asdict(self) | {"measurements": rows}

    def write(self, output_dir: Path) -> Path:
        """Write `<preset>.json` into `output_dir` and return its path."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / f"{self.preset}.json"
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        return path


def describe_machine() -> dict[str, Any]:
    """Hardware, date and the versions that decide a result; no host name."""
    names = ("longstraw-sdk", "torch", "transformers", "peft", "trl")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in names},
    }
