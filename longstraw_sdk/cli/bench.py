"""`longstraw bench`: measure a preset and its peers in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigurationError


def bench(
    preset: Annotated[
        str,
        typer.Argument(help="cpu-glm-memory: memory of one sparse layer behind long prompts, ours and transformers'."),
    ] = "cpu-glm-memory",
    output_dir: Annotated[Path, typer.Option(help="Folder for <preset>.json and <preset>.png.")] = Path(
        "longstraw-bench"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of a table.")] = False,
) -> None:
    """Run a benchmark and print time, peak and tokens per second of every system in it."""
    console = Console(stderr=as_json, quiet=as_json)
    from ..bench import PRESETS
    from ..bench.plots import plot_peaks

    if preset not in PRESETS:
        raise ConfigurationError(f"preset {preset!r} is not known; allowed: {', '.join(PRESETS)}")
    result = PRESETS[preset](lambda done: console.print(done, style="dim"))
    path = result.write(output_dir)
    picture = plot_peaks(result, output_dir)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    table = Table("system", "phase", title=f"{preset} on {result.machine['device']}")
    for name in ("prompt tokens", "new tokens", "seconds", "tokens/s", "peak MiB"):
        table.add_column(name, justify="right")
    for m in result.measurements:
        table.add_row(
            m.system,
            m.phase,
            f"{m.prompt_tokens:,}",
            f"{m.new_tokens:,}",
            f"{m.seconds:.3f}",
            f"{m.tokens_per_second:,.0f}",
            f"{m.peak_bytes / 2**20:,.1f}",
        )
    console.print(table)
    console.print(f"Peak is what the phase allocates on top of weights and resident state.\n{path}\n{picture}")
