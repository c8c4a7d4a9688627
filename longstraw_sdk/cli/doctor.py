"""`longstraw doctor`: whether a run may start on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .quiet import quiet_libraries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..doctor import Check


def doctor(
    model: Annotated[str | None, typer.Option(help="Model folder or hub id: files, adapter, LoRA, positions.")] = None,
    model_manifest: Annotated[
        Path | None, typer.Option(help="model-snapshot.json of a run, whose files the model folder must hold.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A .jsonl or .parquet file, a folder or a hub id.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of the data set.")] = "train",
    output_dir: Annotated[Path | None, typer.Option(help="Where the run will write.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs that this machine must have.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest prompt.")] = None,
    response_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest response.")] = None,
    group: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 8,
    scope: Annotated[str, typer.Option(help="Gradient scope, full or response.")] = "full",
    placement_plan: Annotated[
        Path | None, typer.Option(help="A plan of build_direct_ray_plan, as JSON, that the Ray cluster must fit.")
    ] = None,
    ray_address: Annotated[str, typer.Option(help="ip:port of the Ray cluster's head, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check versions, kernels, GPUs, folders, model, data, positions and a Ray cluster, and say how to mend faults.

    Exit code 0 if a run may start, 1 if not. Nothing is downloaded but the model's configuration and the data set.
    """
    quiet_libraries()
    from ..doctor import Subject, examine

    checks = examine(
        Subject(
            model=model,
            model_manifest=model_manifest,
            dataset=dataset,
            dataset_config=dataset_config,
            dataset_split=dataset_split,
            output_dir=output_dir,
            gpus=gpus,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            group=group,
            scope=scope,  # type: ignore[arg-type]
            placement_plan=placement_plan,
            ray_address=ray_address,
        )
    )
    sound = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": sound, "checks": [asdict(check) for check in checks]}))
    else:
        print_checks(checks, Console())
    if not sound:
        raise typer.Exit(1)


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """One line each, and a line for each remedy."""
    for check in checks:
        sign = "[red]wrong[/]" if not check.ok else "[yellow]note[/] " if check.remedy else "[green]ok[/]   "
        console.print(f"{sign}  [bold]{escape(check.name)}[/]: {escape(check.found)}", highlight=False)
        if check.remedy:
            console.print(f"       -> {escape(check.remedy)}", highlight=False)
    wrong = sum(not check.ok for check in checks)
    console.print(f"{len(checks)} checks, {wrong} wrong", highlight=False)
