"""JSON Lines read strictly: a line that cannot be read becomes a `BadLine`, so that callers can name or count it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError


@dataclass(frozen=True)
class BadLine:
    """A line that is no JSON value; `detail` says where and why."""

    detail: str


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number (from 1) and value of every line that is not blank.

    A byte order mark and CRLF are accepted. Lines end at a line feed only: U+2028 and its kind are text in JSON.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _value(line, number)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); convert it to UTF-8") from error


def strict_json(text: str) -> Any:
    """`json.loads` that refuses what it would otherwise repair silently: repeated keys, NaN and Infinity."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _value(line: str, number: int) -> Any:
    try:
        return strict_json(line)
    except (ValueError, RecursionError) as error:
        return BadLine(f"line {number} is not JSON: {error}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"key {repeated!r} occurs twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
