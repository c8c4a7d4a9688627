"""Writing what an audit kept, what it rejected and why."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, InputError
from .audit import AuditReport
from .dapo_math import MathRow, MathRows

ROWS_PER_GROUP = 10_000


@dataclass(frozen=True)
class CleanedFiles:
    """`cleaned`: kept rows with `prompt`, `answer` and `row`. `rejected`: the others with reasons. `report`: JSON."""

    cleaned: Path
    rejected: Path
    report: Path


def cleaned_files(output: str | Path) -> CleanedFiles:
    """The three paths of a cleaned copy; `output` ends in .parquet or .jsonl."""
    path = Path(output).expanduser()
    if path.suffix.lower() not in (".parquet", ".jsonl"):
        raise ConfigurationError(f"the cleaned copy {str(output)!r} must end in .parquet or .jsonl")
    return CleanedFiles(path, path.with_suffix(".rejected.jsonl"), path.with_suffix(".report.json"))


def check_writable(files: CleanedFiles, overwrite: bool) -> None:
    """Raise unless the folder exists and, without `overwrite`, none of the files does."""
    if not files.cleaned.parent.is_dir():
        raise InputError(f"the folder {files.cleaned.parent} does not exist; create it")
    existing = [str(path) for path in (files.cleaned, files.rejected, files.report) if path.exists()]
    if existing and not overwrite:
        raise InputError(f"{', '.join(existing)} exists; give another name, or overwrite=True (--overwrite)")


def write_cleaned(
    rows: MathRows | Sequence[Any], report: AuditReport, output: str | Path, *, overwrite: bool = False
) -> CleanedFiles:
    """Write kept rows, rejected rows (`<name>.rejected.jsonl`) and the report (`<name>.report.json`).

    Each appears complete or not at all, the cleaned copy last. A rejected row that repeats an earlier prompt is written
    without prompt and answer: its reason names the row that has them.
    """
    files = cleaned_files(output)
    check_writable(files, overwrite)
    rows = rows if isinstance(rows, MathRows) else MathRows(rows)
    if len(rows) != report.n_rows:
        raise InputError(f"the report is of {report.n_rows} rows, but {len(rows)} rows were given; audit these rows")
    write_kept = _write_parquet if files.cleaned.suffix.lower() == ".parquet" else _write_jsonl
    with ExitStack() as stack:
        temporary = [stack.enter_context(_Temporary(path)) for path in (files.rejected, files.report, files.cleaned)]
        _write_jsonl(temporary[0].path, _rejected(rows, report))
        temporary[1].path.write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False), encoding="utf-8")
        write_kept(temporary[2].path, _kept(rows, report))
        for file in temporary:
            file.keep()
    return files


class _Temporary:
    """A name beside `target` for a file that takes the target's name when kept, and is removed otherwise."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.path = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

    def __enter__(self) -> _Temporary:
        return self

    def keep(self) -> None:
        self.path.replace(self._target)

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


def _kept(rows: MathRows, report: AuditReport) -> Iterator[dict[str, Any]]:
    for index in report.kept:
        row: MathRow = rows[index]
        yield {"prompt": row.prompt, "answer": row.answer, "row": row.row}


def _rejected(rows: MathRows, report: AuditReport) -> Iterator[dict[str, Any]]:
    for index, reasons in report.reasons().items():
        found: dict[str, Any] = {"row": index, "reasons": [{"kind": kind, "detail": what} for kind, what in reasons]}
        if not any(kind == "duplicate" for kind, _ in reasons):
            row: MathRow = rows[index]
            found |= {"prompt": row.prompt, "answer": row.answer}
        yield found


def _write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    group = list(_take(rows, ROWS_PER_GROUP))
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    conversational = bool(group) and not isinstance(group[0]["prompt"], str)
    prompt = pa.list_(message) if conversational else pa.string()
    schema = pa.schema([("prompt", prompt), ("answer", pa.string()), ("row", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        while group:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            group = list(_take(rows, ROWS_PER_GROUP))


def _take(rows: Iterator[dict[str, Any]], n: int) -> Iterator[dict[str, Any]]:
    for _, row in zip(range(n), rows, strict=False):
        yield row
