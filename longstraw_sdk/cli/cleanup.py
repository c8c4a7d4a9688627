"""`longstraw cleanup`: remove what a driver that died left on a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def cleanup(
    run: Annotated[str, typer.Option("--run", help="ID of the run.")],
    run_dir: Annotated[Path, typer.Option(help="Folder in which the driver keeps its runs.")] = Path("runs"),
    address: Annotated[
        str | None, typer.Option(help="ip:port of the cluster's head, or auto; unset, where the driver connected.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to connect, and again until all is gone.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove the placement group and actors that a run's ownership journal names, and nothing else.

    Lists what was removed, what was gone already, and what is left on the cluster. Exit code 0 if nothing of the run is
    left, 1 otherwise. Refused while the run's driver is alive.
    """
    from ..placement.cleanup import clean_up

    found = clean_up(run_dir, run, address, timeout)
    if as_json:
        typer.echo(json.dumps({"run": run} | found.as_dict()))
    else:
        for word, names in found.as_dict().items():
            for name in names:
                typer.echo(f"{word:<8} {name}")
        if not found.removed and not found.kept:
            typer.echo(f"nothing of run {run} was there")
    if found.kept:
        raise typer.Exit(1)
