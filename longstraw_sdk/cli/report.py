"""`longstraw report`: a page about a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The trainer's output folder, or the `run` folder below it.")],
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder for report.html and its pictures; `report` beside the run if unset.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write an HTML page with rewards, log-prob drift, memory by phase and rank, and time by phase of a run."""
    from ..report import read_run, write_page

    found = read_run(run)
    page = write_page(found, found.folder.parent / "report" if output_dir is None else output_dir)
    if as_json:
        typer.echo(json.dumps({"report": str(page), "updates": found.n_updates, "ended": found.ended}))
    else:
        typer.echo(str(page))
