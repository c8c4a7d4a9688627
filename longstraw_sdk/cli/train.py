"""`longstraw train`: a GRPO run from a YAML file and flags."""

from __future__ import annotations

import os
from typing import Any

import typer
from rich.console import Console

from ..errors import ConfigurationError
from .doctor import print_checks
from .quiet import quiet_libraries

SETTINGS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}
"""The options are those of four dataclasses, which a parser of TRL's reads; `--help` among them."""


def train(context: typer.Context) -> None:
    """Train by GRPO: `longstraw train --config run.yaml`, with the options of `trl grpo` and LongStrawGRPOConfig.

    Exit code 0 at the end, 130 after Ctrl-C with the last update closed and saved, 2 if the request is refused. On
    several GPUs: accelerate launch ... -m longstraw_sdk.cli train --config run.yaml
    """
    quiet_libraries()
    from ..trainers import train_script

    request = train_script.parse(context.args)
    is_first = os.environ.get("RANK", "0") == "0"
    if request.run.doctor and is_first:
        checks = train_script.examined(request)
        if not all(check.ok for check in checks):
            print_checks([check for check in checks if not check.ok], Console(stderr=True))
            raise ConfigurationError("the run was not started; mend the above, or leave the checks out: --no_doctor")
    outcome = train_script.run(request)
    if is_first and request.run.json:
        typer.echo(train_script.summary(outcome))
    elif is_first and not request.run.quiet:
        typer.echo(f"{outcome.updates} updates; adapter and run record in {outcome.output_dir}")
    if outcome.stopped_by is not None:
        if is_first and not request.run.quiet:
            typer.echo(
                f"stopped after update {outcome.updates}, which is closed and saved; go on with "
                "--resume_from_checkpoint true",
                err=True,
            )
        raise typer.Exit(128 + outcome.stopped_by)
