"""`longstraw bench`: measure a preset and its peers in one run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigurationError

_PRESETS = """cpu-small: one step on a group by every system, with small models on a CPU.

h200-27b-32k, h200-27b-128k, h200-27b-1m: the same with the Qwen3.6-27B geometry (random weights) on one H200.

h200-27b-cp2: the same behind 131,072 tokens on two H200, each alone and both together; start it with torchrun
--nproc-per-node 2 -m longstraw_sdk.cli bench. cpu-cp2: a small model and two processes on a CPU.

h200-glm-slice: layers of the GLM-5.2 geometry behind up to 1,048,576 tokens on one H200; cpu-glm-slice: tiny ones.

cpu-glm-memory: memory of one sparse layer behind long prompts, ours and transformers'.

simulated-ranks: one rank of 8 or 32 behind 2,097,152 and 4,456,448 positions on one GPU, beside the paper's figures.

cpu-simulated-ranks: the same of tiny models on a CPU."""


def bench(
    preset: Annotated[str, typer.Option(help=_PRESETS)] = "cpu-small",
    output_dir: Annotated[Path, typer.Option(help="Folder for <preset>.json and <preset>.png.")] = Path(
        "longstraw-bench"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows of the JSON file instead of a table.")
    ] = False,
) -> None:
    """Run a benchmark and print what it found."""
    is_first = os.environ.get("RANK", "0") == "0"  # the ranks of a launcher all measure, and one of them tells
    console = Console(stderr=as_json, quiet=as_json or not is_first)
    from ..bench import PRESETS

    if preset not in PRESETS:
        raise ConfigurationError(f"preset {preset!r} is not known; allowed: {', '.join(PRESETS)}")
    for result in PRESETS[preset](lambda done: console.print(done, style="dim")):
        path = result.write(output_dir) if is_first else output_dir
    if not is_first:
        return
    picture = result.plot(output_dir)
    if as_json:
        typer.echo(json.dumps(result.rows(), indent=2))
        return
    console.print(result.table())
    console.print(f"{result.note}\n{path}\n{picture}")
