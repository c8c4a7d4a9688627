"""An append-only record of what happened, in which every entry seals the one before it.

One JSON object per line: `seq`, `stage`, `time` (UTC), `previous` (the `sha256` of the entry before, or 64 zeros),
facts, and `sha256` over all the rest. An entry is on the disk before `append` returns; a line that a crash cut off is
dropped when the journal is opened again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError

START = "0" * 64

Entry = dict[str, Any]


class Journal:
    """Opens `path`, or begins it. Raises `InputError` if its entries do not seal each other."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: list[Entry] = []
        if path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            self.entries = list(parse(whole, path))
            if len(whole) < len(data):
                os.truncate(path, len(whole))

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


def seal(entry: Entry) -> str:
    """sha256 over an entry without its own."""
    rest = {name: value for name, value in entry.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def parse(data: bytes, path: Path) -> Iterator[Entry]:
    """The entries of a journal's bytes. Raises `InputError` at the first that is not as it was written."""
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
