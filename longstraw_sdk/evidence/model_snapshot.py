"""Which model a run started from."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lora import base_model_of
from ..types import CausalLM
from .artifacts import file_sha256
from .digests import facts_digest, frozen_digest

logger = logging.getLogger(__name__)

_SUFFIXES = (".json", ".safetensors")


def model_snapshot(model: CausalLM, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Name, class, configuration and weights of `model`.

    `files` are the sha256 of configuration and weights where the model was loaded from a folder or the hub's cache;
    `frozen_sha256` is over the first 64 KiB of each frozen weight as it is in memory.

    Args:
        earlier: a snapshot whose hashes are taken for files of unchanged size and time.
    """
    base: Any = base_model_of(model)
    config = {name: value for name, value in base.config.to_dict().items() if name != "_name_or_path"}
    folder = _folder_of(str(base.config._name_or_path))
    return {
        "name_or_path": str(base.config._name_or_path),
        "class": type(base).__name__,
        "config_sha256": facts_digest({name: str(value) for name, value in config.items()}),
        "frozen_sha256": frozen_digest(model),
        "files": None if folder is None else _files(folder, (earlier or {}).get("files") or {}),
    }


def _folder_of(name: str) -> Path | None:
    if name and Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _files(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in _SUFFIXES):
        status = os.stat(path)
        facts = {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}
        before = known.get(path.name, {})
        if {name: before.get(name) for name in facts} == facts:
            found[path.name] = dict(before)
            continue
        if status.st_size > 2**30:
            logger.info("hashing %s (%.0f GB)", path.name, status.st_size / 1e9)
        found[path.name] = facts | {"sha256": _blob_sha256(path) or file_sha256(path)}
    return found


def _blob_sha256(path: Path) -> str | None:
    """The hub's cache names large files by their sha256, which it checked when it wrote them."""
    name = path.resolve().name
    is_blob = path.is_symlink() and path.resolve().parent.name == "blobs"
    return name if is_blob and len(name) == 64 and set(name) <= set("0123456789abcdef") else None
