"""The command group and how errors end it."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import LongStrawError
from .audit import audit
from .bench import bench
from .demo import demo
from .doctor import doctor
from .parity import parity
from .plan import plan
from .report import report
from .train import SETTINGS as TRAIN
from .train import train
from .verify_run import verify_run

app = typer.Typer(
    name="longstraw",
    help="GRPO on very long prompts: capture the prompt once, replay each response, sweep for the exact gradient.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(demo)
app.command()(doctor)
app.command(**TRAIN)(train)
app.command()(report)
app.command()(bench)
app.command()(parity)
app.command()(audit)
app.command("verify-run")(verify_run)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. Errors made for users end it with one message and exit code 2."""
    try:
        app()
    except LongStrawError as error:
        Console(stderr=True).print(
            f"[bold red]{type(error).__name__}:[/] {escape(str(error))}", highlight=False, markup=True
        )
        sys.exit(2)
