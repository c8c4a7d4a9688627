"""Folders that a run writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .check import Check
from .subject import Subject

GIB = 2**30
LEAST_FREE_BYTES = 10 * GIB
"""Checkpoints hold LoRA and optimizer state, not the model: 1.4 GB each for r16 on 27B."""


def examine(subject: Subject) -> Iterator[Check]:
    wanted = {"temporary files": Path(tempfile.gettempdir())}
    if subject.output_dir is not None:
        wanted["output"] = subject.output_dir
    cache = os.environ.get("TRITON_CACHE_DIR")
    if cache is not None:  # by default in the home folder, and compiling anew is slow, not wrong
        wanted["Triton's cache"] = Path(cache)
    for what, folder in wanted.items():
        yield _folder(f"folder of {what}" if what != "output" else "output folder", folder)


def _folder(name: str, folder: Path) -> Check:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is no folder")
        with tempfile.NamedTemporaryFile(dir=there, prefix=".longstraw-", suffix=".tmp") as file:
            file.write(b"longstraw")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Check(
            name, False, f"{folder} cannot be written to: {error}", "choose another folder, or make it writable"
        )
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / GIB:.0f} GiB free"
    few = free < LEAST_FREE_BYTES
    return Check(name, True, found, "make room: less than 10 GiB may not hold two checkpoints" if few else None)
