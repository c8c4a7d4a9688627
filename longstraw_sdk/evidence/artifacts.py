"""Files of a run: written whole or not at all, and known by their sha256."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> str:
    """Write `content` so that a crash leaves the old file or the new one, and return the new one's sha256.

    When it returns, the file is on the disk under its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)
    return hashlib.sha256(data).hexdigest()


def sync_folder(folder: Path) -> None:
    """So that names in it are on the disk as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_path(path: Path) -> Path:
    """The first of `alternatives` that does not exist."""
    return next(candidate for candidate in alternatives(path) if not candidate.exists())


def alternatives(path: Path) -> Iterator[Path]:
    """`path`, and the names that stand in for it where what it holds must stay."""
    yield path
    for n in itertools.count(1):
        yield path.with_name(f"{path.stem}.{n}{path.suffix}")


def read_json(path: Path, sha256: str | None = None) -> Any:
    """What `write_json` wrote. Raises `InputError` if it is not there, not JSON, or not of `sha256`."""
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{path} is missing, or no file of its own")
    data = path.read_bytes()
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(f"{path} is not what was written: its sha256 differs")
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def inside(folder: Path, name: str) -> Path:
    """`folder / name`. Raises `InputError` if that is not below `folder`."""
    path = (folder / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(folder.resolve()):
        raise InputError(f"{name!r} leads out of {folder}")
    return folder / name
