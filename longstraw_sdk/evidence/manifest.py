"""What a folder holds, file by file. The manifest is written last, so a folder without one was never finished."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InputError
from .artifacts import read_json, write_json

MANIFEST = "checkpoint-manifest.json"
FORMAT = 1

NOTES = (".csv", ".html", ".json", ".jsonl", ".log", ".md", ".png", ".txt", ".yaml")
"""Files of these kinds may be added later, as callbacks do when a checkpoint was saved; nothing is loaded from them."""


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Hash every file below `folder`, see that it is on the disk, and write `MANIFEST` beside them, all or nothing.

    Args:
        facts: JSON values that are kept with the hashes.

    Raises `InputError` on a symbolic link: what it points to may change without the folder.
    """
    files = {str(path): _entry(folder / path, sync=True) for path in _files(folder)}
    write_json(folder / MANIFEST, {"format": FORMAT, "facts": dict(facts), "files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises `InputError` if there is none or it is none of ours."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} has no {MANIFEST}: it was not written to its end, or not by this trainer")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("files"), dict):
        raise InputError(f"{path} is not a manifest of format {FORMAT}")
    return found


def problems_of(folder: Path) -> list[str]:
    """In which `folder` differs from its manifest, a sentence each; empty if it is what was written."""
    try:
        listed = read_manifest(folder)["files"]
        present = {str(path) for path in _files(folder)}
    except InputError as error:
        return [str(error)]
    problems = [
        f"{name} is not in the manifest" for name in sorted(present - set(listed)) if Path(name).suffix not in NOTES
    ]
    for name, wanted in sorted(listed.items()):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            problems.append(f"the manifest names {name}, which is outside of the folder")
        elif name not in present:
            problems.append(f"{name} is missing")
        elif _entry(folder / name) != wanted:
            problems.append(f"{name} is not what was written: its sha256 or size differs")
    return problems


def _files(folder: Path) -> Iterator[PurePosixPath]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise InputError(f"{path} is a symbolic link; a checkpoint holds files only")
        name = PurePosixPath(path.relative_to(folder))
        if path.is_file() and str(name) not in (MANIFEST, f".{MANIFEST}"):
            yield name


def _entry(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return {"sha256": digest, "bytes": os.fstat(file.fileno()).st_size}
