"""The training data."""

from __future__ import annotations

from collections.abc import Iterator

from .check import Check
from .subject import Subject


def examine(subject: Subject) -> Iterator[Check]:
    if subject.dataset is None:
        return
    from ..data.rows import load_rows

    try:
        rows = load_rows(subject.dataset, subject.dataset_config, subject.dataset_split)
    except Exception as error:  # datasets raises of every kind
        first = " ".join(str(error).split())[:300]
        remedy = "name a .jsonl or .parquet file, a folder or a hub id, and a split that it has"
        yield Check("dataset", False, f"{subject.dataset}: {first}", remedy)
        return
    if not len(rows):
        yield Check("dataset", False, f"{subject.dataset} has no rows", "choose a split with rows")
    elif "prompt" not in rows.column_names:
        columns = ", ".join(rows.column_names)
        yield Check("dataset", False, f"no column prompt among {columns}", "rename the column that holds the prompt")
    else:
        yield Check("dataset", True, f"{len(rows):,} rows with {', '.join(rows.column_names)}")
