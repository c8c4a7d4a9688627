"""Rows of a data set as `datasets` loads them, from a file, a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_rows(source: str, config: str | None = None, split: str = "train") -> Any:
    """The `datasets.Dataset` of a .jsonl, .json or .parquet file, of a folder, or of a hub id.

    Args:
        source: a folder is one of `save_to_disk`, or of files that `datasets.load_dataset` understands.
        config, split: which part of a folder or hub data set; a file is one split.
    """
    import datasets

    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() not in _READERS:
            raise InputError(f"{path} has the suffix {path.suffix!r}; allowed: {', '.join(_READERS)}")
        return datasets.load_dataset(_READERS[path.suffix.lower()], data_files=str(path), split="train")
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        found = datasets.load_from_disk(str(path))
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise InputError(f"{path} has no split {split!r}; it has {', '.join(found)}")
            return found[split]
        return found
    if path.suffix.lower() in _READERS:
        raise InputError(f"{path} does not exist")
    return datasets.load_dataset(str(path) if path.is_dir() else source, config, split=split)
