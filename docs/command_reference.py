"""The command line as Markdown, from the objects that parse it."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer

from longstraw_sdk.cli.app import app


def commands() -> str:
    """A section per command of `longstraw`: what it does, and a table of its options."""
    return "\n\n".join(_command(name, command) for name, command in typer.main.get_command(app).commands.items())


def train_options() -> str:
    """Options of `longstraw train` beyond those of `trl grpo`."""
    from longstraw_sdk.trainers import LongStrawGRPOConfig
    from longstraw_sdk.trainers.train_script import RunOptions

    rows = []
    for kind in (LongStrawGRPOConfig, RunOptions):
        own = set(vars(kind)["__annotations__"])
        rows += [(f"`--{f.name}`", f.metadata["help"], f.default) for f in fields(kind) if f.name in own]
    return _table(rows)


def _command(name: str, command: Any) -> str:
    usage = "".join(f" {p.name.upper()}" for p in command.params if p.param_type_name == "argument")
    return f"## `longstraw {name}{usage}`\n\n{command.help}\n\n{_table(_rows(command.params))}"


def _rows(params: list[Any]) -> Iterator[tuple[str, str, Any]]:
    for param in params:
        if param.param_type_name == "argument":
            yield f"`{param.name.upper()}`", param.help, "required"
        else:
            names = " / ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
            yield names, param.help, "required" if param.required else param.default


def _table(rows: Any) -> str:
    lines = [
        f"| {names} | {(told or '').replace('|', chr(92) + '|')} | {'' if default is None else default} |"
        for names, told, default in rows
    ]
    return "\n".join(["| option | | default |", "|---|---|---|", *lines]) if lines else ""
