"""What a run folder says, gathered by update, phase and rank. Nothing is checked here: `longstraw verify-run` does."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..evidence.artifacts import read_json
from ..evidence.journal import Entry, read_journal
from ..evidence.run_folder import JOURNAL, MEMORY, METRICS, RANKS, REQUEST


@dataclass(frozen=True)
class Recorded:
    """A run.

    Args:
        metrics: by update, what the trainer logged last of it.
        seconds: by rank, phase and update.
        peaks: by rank and phase, the most bytes on the device, or of the host's process where there is no device.
        on_device: whether `peaks` are of devices.
    """

    folder: Path
    entries: list[Entry]
    request: dict[str, Any]
    metrics: dict[int, dict[str, Any]]
    ranks: list[dict[str, Any]]
    seconds: dict[int, dict[str, dict[int, float]]] = field(default_factory=dict)
    peaks: dict[int, dict[str, int]] = field(default_factory=dict)
    on_device: bool = False

    @property
    def n_updates(self) -> int:
        return max((entry["update"] for entry in self.entries if entry["stage"] == "stepped"), default=0)

    @property
    def n_starts(self) -> int:
        return sum(entry["stage"] == "began" for entry in self.entries)

    @property
    def ended(self) -> bool:
        return bool(self.entries) and self.entries[-1]["stage"] == "ended"

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(updates, values) of a metric, where it is a number."""
        found = {u: logs[name] for u, logs in sorted(self.metrics.items()) if isinstance(logs.get(name), int | float)}
        return list(found), [float(value) for value in found.values()]


def read_run(folder: Path) -> Recorded:
    """`folder` is a `run` folder, or the output folder that has one. A run that did not end has no ranks yet."""
    folder = folder if (folder / JOURNAL).is_file() else folder / "run"
    if not (folder / JOURNAL).is_file():
        raise InputError(f"{folder / JOURNAL} is missing: name a run folder, or the trainer's output folder")
    entries, _ = read_journal(folder / JOURNAL)
    metrics: dict[int, dict[str, Any]] = defaultdict(dict)
    for line in _lines(folder / METRICS):
        metrics[line["update"]] |= line
    seconds: dict[int, dict[str, dict[int, float]]] = {}
    peaks: dict[int, dict[str, int]] = {}
    on_device = False
    for rank, path in _traces(folder):
        of_rank = seconds.setdefault(rank, defaultdict(lambda: defaultdict(float)))
        for line in _lines(path):
            of_rank[line["phase"]][line["update"]] += line["seconds"]
            on_device |= "peak_bytes" in line
            peak = line.get("peak_bytes", line["host_peak_bytes"])
            known = peaks.setdefault(rank, {})
            known[line["phase"]] = max(peak, known.get(line["phase"], 0))
    ranks = read_json(folder / RANKS)["ranks"] if (folder / RANKS).is_file() else []
    return Recorded(folder, entries, read_json(folder / REQUEST), dict(metrics), ranks, seconds, peaks, on_device)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines: a run that was killed may have written half of the last."""
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "update" in line:
            yield line


def _traces(folder: Path) -> Iterator[tuple[int, Path]]:
    """(rank, memory trace) in the order of ranks."""
    stem, _, suffix = MEMORY.partition(".")
    found = {0: folder / MEMORY} if (folder / MEMORY).is_file() else {}
    for path in folder.glob(f"{stem}-rank*.{suffix}"):
        if number := re.fullmatch(rf"{stem}-rank(\d+)\.{suffix}", path.name):
            found[int(number[1])] = path
    yield from sorted(found.items())
