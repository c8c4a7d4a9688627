"""`longstraw audit`: find what is wrong with mathematics problems, and write a cleaned copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..data import AuditReport

SHOWN_ROWS = 5


def audit(
    source: Annotated[
        str, typer.Argument(help="A .parquet, .jsonl or .json file, a save_to_disk folder, or owner/name on the hub.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="Model folder or hub id whose tokenizer measures the prompts.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Reject longer prompts.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write kept rows here (.parquet or .jsonl), rejected ones and report beside it.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of an earlier audit.")] = False,
    split: Annotated[str, typer.Option(help="Split of a save_to_disk folder or hub data set.")] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Audit rows in the layout of DAPO-Math-17k and its variants; exit 1 if any was rejected.

    Finds rows with another layout, empty prompts and answers, answers that math-verify cannot read, duplicates,
    conflicting answers and prompts that are too long. Every rejected row is named with all its reasons.
    """
    if max_prompt_tokens is not None and tokenizer is None:
        raise ConfigurationError(f"--max-prompt-tokens {max_prompt_tokens} needs --tokenizer, a folder or hub id")
    if overwrite and output is None:
        raise ConfigurationError("--overwrite needs --output, the file to write")
    console = Console(stderr=as_json, quiet=as_json)
    from ..data import audit_rows, load_math_rows, write_cleaned
    from ..data.cleaned import check_writable, cleaned_files
    from ..data.tokens import load_tokenizer

    if output is not None:
        check_writable(cleaned_files(output), overwrite)
    rows = load_math_rows(source, split)
    report = audit_rows(rows, load_tokenizer(tokenizer) if tokenizer is not None else None, max_prompt_tokens)
    files = write_cleaned(rows, report, output, overwrite=overwrite) if output is not None else None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        _print(report, console)
        for path in (files.cleaned, files.rejected, files.report) if files is not None else ():
            console.print(str(path), soft_wrap=True)
    if report.n_rejected:
        raise typer.Exit(1)


def _print(report: AuditReport, console: Console) -> None:
    from ..data import FAULT_KINDS

    table = Table("fault", "rows", "first rows", "what was found there")
    for kind, meaning in FAULT_KINDS.items():
        details = report.faults.get(kind)
        if details:
            first, rows = next(iter(details.items()))
            shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (" ..." if len(rows) > SHOWN_ROWS else "")
            table.add_row(f"{kind}: {meaning}", f"{report.count(kind):,}", shown, escape(first))
    if table.row_count:
        console.print(table)
    console.print(f"{report.n_rows:,} rows: {report.n_kept:,} kept, {report.n_rejected:,} rejected.", highlight=False)
    lengths = report.prompt_tokens
    if lengths is not None:
        console.print(
            f"Prompt tokens of {lengths.n_rows:,} rows: min {lengths.min:,}, median {lengths.median:,}, p95 "
            f"{lengths.p95:,}, max {lengths.max:,}.",
            highlight=False,
        )
