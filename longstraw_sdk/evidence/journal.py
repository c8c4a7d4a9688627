"""An append-only record of what happened, in which every entry seals the one before it.

One JSON object per line: `seq`, `stage`, `time` (UTC), `previous` (the `sha256` of the entry before, or 64 zeros),
facts, and `sha256` over all the rest. An entry is on the disk before `append` returns; a line that a crash cut off is
dropped when the journal is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError
from .digests import seal

START = "0" * 64

Entry = dict[str, Any]


class Journal:
    """Opens `path`, or begins it. Raises `InputError` if its entries do not seal each other."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: list[Entry] = []
        if path.exists():
            self.entries, n_bytes = read_journal(path)
            if n_bytes < path.stat().st_size:
                os.truncate(path, n_bytes)

    def append(self, stage: str, **facts: Any) -> Entry:
        """Write one entry. Facts are JSON values under names that the journal does not use itself."""
        assert not facts.keys() & {"seq", "time", "previous", "sha256"}, facts.keys()
        entry = {
            "seq": len(self.entries),
            "stage": stage,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "previous": self.entries[-1]["sha256"] if self.entries else START,
            **facts,
        }
        entry["sha256"] = seal(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)
        return entry


def read_journal(path: Path) -> tuple[list[Entry], int]:
    """The entries of a journal and the bytes that they take; what a crash cut off stands behind them.

    Raises `InputError` at the first entry that is not as it was written.
    """
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    return list(_entries(whole, path)), len(whole)


def _entries(data: bytes, path: Path) -> Iterator[Entry]:
    previous = START
    for seq, line in enumerate(data.splitlines()):
        try:
            entry = json.loads(line)
            sound = isinstance(entry, dict) and entry["sha256"] == seal(entry) and isinstance(entry["stage"], str)
            follows = sound and entry["seq"] == seq and entry["previous"] == previous
        except (ValueError, KeyError) as error:
            raise InputError(f"{path}, entry {seq}: {type(error).__name__}: {error}") from error
        if not sound:
            raise InputError(f"{path}, entry {seq} was changed after it was written")
        if not follows:
            raise InputError(f"{path}: an entry before {seq} is missing, added or out of order")
        previous = entry["sha256"]
        yield entry
