"""`longstraw verify-run`: whether a run folder is what its journal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError


def verify_run(
    folder: Annotated[Path, typer.Argument(help="The trainer's output folder, or the `run` folder below it.")],
    checkpoints: Annotated[bool, typer.Option(help="Re-hash the checkpoints that are still there.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Re-hash every file of a run and re-check its order, tokens, rewards, and one finalize and one step per update.

    Exit code 0 if nothing is broken, 1 at the first break, which is printed.
    """
    from ..evidence.verify import verify_run as verify

    if not folder.is_dir():
        raise InputError(f"{folder} is no folder")
    found: list[str] = []
    broken = None
    try:
        found = verify(folder, checkpoints=checkpoints)
    except InputError as error:
        broken = str(error)
    if as_json:
        typer.echo(json.dumps({"ok": broken is None, "broken": broken, "checked": found}))
    elif broken is None:
        for line in found:
            typer.echo(f"ok  {line}")
    else:
        typer.echo(f"broken  {broken}")
    if broken is not None:
        raise typer.Exit(1)
