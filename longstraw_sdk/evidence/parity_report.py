"""A parity report: what was compared, with which model and versions, under one sha256 over all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .artifacts import read_json, write_json
from .digests import seal
from .machine import describe_machine


def write_report(path: Path, rows: Sequence[Mapping[str, Any]], models: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the report of `rows` (as `longstraw parity --json` prints them) and return its sha256."""
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist; create it")
    content = {
        "rows": [dict(row) for row in rows],
        "models": {name: dict(snapshot) for name, snapshot in models.items()},
        **describe_machine(),
    }
    sha256 = seal(content)
    write_json(path, content | {"sha256": sha256})
    return sha256


def read_report(path: Path) -> dict[str, Any]:
    """The report. Raises `InputError` if it is not what was written."""
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise InputError(f"{path} is no parity report")
    if content.get("sha256") != seal(content):
        raise InputError(f"{path} was changed after it was written: its sha256 differs")
    return content
