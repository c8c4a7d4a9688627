"""`longstraw demo`: watch a tiny model learn a long-context task by GRPO, on a CPU."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .quiet import quiet_libraries


class DemoModelName(StrEnum):
    qwen36 = "qwen36"
    dense = "dense"
    glm52 = "glm52"


def demo(
    output_dir: Annotated[Path, typer.Option(help="Folder for adapter, metrics, pictures and report.html.")] = Path(
        "longstraw-demo"
    ),
    model: Annotated[
        DemoModelName,
        typer.Option(
            help="qwen36: a Gated DeltaNet and an attention layer. dense: attention layers only. "
            "glm52: sparse latent attention and experts."
        ),
    ] = DemoModelName.qwen36,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and sampling.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="GRPO optimizer steps, 44 if unset.")] = None,
    compare_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Steps repeated with TRL's own trainer, 2 if unset. Many times slower; 0 for none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json instead of progress.")] = False,
) -> None:
    """Train a tiny model, of the Qwen3.6 architecture by default, by GRPO on 4,000-token prompts and write a report.

    Takes a few minutes on two CPU cores (a quarter of an hour for glm52) and needs no download. Warm-up, GRPO and the
    comparison with TRL's own trainer all run on this machine; the report says what was measured.
    """
    console = Console(stderr=as_json, quiet=as_json)
    console.print("Loading torch, transformers and trl ...", style="dim")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_libraries()
    from ..demo.report import write_report
    from ..demo.run import DemoConfig, run_demo

    options = {"n_steps": steps, "n_compare_steps": compare_steps}
    config = DemoConfig(model=model.value, seed=seed, **{k: v for k, v in options.items() if v is not None})
    with Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[remark]}"),
        console=console,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(part: str, done: int, total: int, remark: str) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total, remark=remark)
            bars.update(tasks[part], completed=done, remark=remark)

        result = run_demo(config, output_dir, progress)
    report = write_report(result, output_dir)
    if as_json:
        typer.echo(json.dumps(result.metrics(), indent=2))
        return
    console.print(
        f"\nMean reward on held-out prompts: {result.mean_reward_before:.2f} before, "
        f"[bold]{result.mean_reward_after:.2f}[/] after ({result.seconds:.0f} s in all)."
    )
    console.print(
        f"Prompt tokens forwarded: {result.prompt_tokens_forwarded:,}; without sharing "
        f"{result.prompt_tokens_without_sharing:,}."
    )
    console.print(f"Report: {report}")
