"""What the documents promise: commands that parse, names and files that exist, arguments that are taken."""

import ast
import importlib
import inspect
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

import longstraw_sdk
from longstraw_sdk import environment, placement, rollout, trainers
from longstraw_sdk.cli.app import app
from longstraw_sdk.trainers import train_script

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "models/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FILE = re.compile(r"(?:tests|examples|benchmarks|models|docs|scripts|longstraw_sdk|trainers|\.ci)/[\w./-]*\w/?")
BUILT = ("docs/_build",)
PUBLIC = {name: module for module in (longstraw_sdk, trainers, placement, rollout) for name in module.__all__}


def blocks(text, *languages):
    return [body for language, body in BLOCK.findall(text) if language in languages]


def inline(text):
    return [" ".join(code.split()) for code in INLINE.findall(BLOCK.sub("", text))]


def command_lines(text):
    """Words behind `longstraw` of every command line, in blocks and in the text."""
    lines = [line for body in blocks(text, "", "bash") for line in body.replace("\\\n", " ").splitlines()]
    for line in [*lines, *inline(text)]:
        for part in line.split("#")[0].split("&&"):
            if found := re.search(r"(?:^\s*longstraw|-m longstraw_sdk\.cli) +(.*)", part):
                yield shlex.split(found[1])


@cache
def train_options():
    kinds = (train_script.GRPOScriptArguments, train_script.ModelOptions, train_script.RunOptions)
    names = {f.name for kind in (*kinds, trainers.LongStrawGRPOConfig) for f in fields(kind)}
    return names | {"config", "no_doctor", "help"}


def command_faults(words):
    commands = typer.main.get_command(app).commands
    name, *rest = words
    if name.startswith("-") or "|" in words or name == "...":
        return []
    if name not in commands:
        return [f"longstraw {name} is no command"]
    given = [word.split("=")[0] for word in rest if word.startswith("--")]
    if name == "train":
        known = {f"--{option}" for option in train_options()}
    else:
        known = {"--help"}.union(*(p.opts + p.secondary_opts for p in commands[name].params))
    return [f"longstraw {name} has no {option}" for option in given if option not in known]


def name_faults(text):
    """Of dotted names in the text, and of imports and calls in Python blocks."""
    faults = []
    for code in inline(text):
        if re.fullmatch(r"longstraw_sdk(\.\w+)+", code):
            faults += [] if exists(code) else [f"{code} does not exist"]
    for body in blocks(text, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longstraw_sdk"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                faults += [f"{name} does not exist" for name in names if not exists(name)]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PUBLIC:
                taken = inspect.signature(getattr(PUBLIC[node.func.id], node.func.id)).parameters
                faults += [f"{node.func.id} takes no {k.arg}" for k in node.keywords if k.arg and k.arg not in taken]
    return faults


def exists(dotted):
    module, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
        return True
    except ImportError:
        try:
            return hasattr(importlib.import_module(module), name)
        except ImportError:
            return False


def file_faults(text, folder):
    named = [code for code in inline(text) if FILE.fullmatch(code) and code not in BUILT]
    faults = [f"{name} does not exist" for name in named if not (ROOT / name).exists()]
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        linked = folder / path
        if not linked.is_file():
            faults.append(f"link to {target}: no such file")
        elif anchor and anchor not in anchors(linked.read_text()):
            faults.append(f"link to {target}: no such heading")
    return faults


def anchors(text):
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def faults_of(text, folder=ROOT):
    faults = [fault for words in command_lines(text) for fault in command_faults(words)]
    return faults + name_faults(text) + file_faults(text, folder)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_what_exists(path):
    assert faults_of(path.read_text(), path.parent) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`longstraw plann --gpus 1`", "longstraw plann is no command"),
        ("```\nlongstraw plan --gpu 1\n```\n", "longstraw plan has no --gpu"),
        ("```\naccelerate launch -m longstraw_sdk.cli train --chunks 1\n```\n", "longstraw train has no --chunks"),
        ("`longstraw_sdk.rollout.FtpSampler`", "longstraw_sdk.rollout.FtpSampler does not exist"),
        (
            "```python\nfrom longstraw_sdk.trainers import Trainer\n```\n",
            "longstraw_sdk.trainers.Trainer does not exist",
        ),
        ("```python\nLongStrawSession(model, chunks=2)\n```\n", "LongStrawSession takes no chunks"),
        ("`tests/test_nothing.py`", "tests/test_nothing.py does not exist"),
        ("[a](docs/nothing.md)", "link to docs/nothing.md: no such file"),
        ("[a](docs/concepts.md#nothing)", "link to docs/concepts.md#nothing: no such heading"),
    ],
)
def test_control_what_does_not_exist_is_named(text, fault):
    assert faults_of(text) == [fault]


def test_the_first_run_file_has_options_that_exist():
    (body,) = blocks((ROOT / "docs/quickstart.md").read_text(), "yaml")
    given = yaml.safe_load(body)
    assert {"model_name_or_path", "dataset_name", "reward_funcs", "output_dir"} <= set(given) <= train_options()


def test_operations_list_every_variable_with_its_values():
    rows = re.findall(r"^\| `(LONGSTRAW_\w+)` \| (.*?) \|", (ROOT / "docs/operations.md").read_text(), re.M)
    listed = {name: tuple(re.findall(r"`(\w+)`", values)) for name, values in rows}
    assert listed.pop(environment.POSITIONS) == ("PositionConfig",)
    assert listed == environment.ALLOWED


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs/api.md").read_text()
    described = set(re.findall(r"^\.\. auto\w+:: (?:[\w.]*\.)?(\w+)", page, re.M))
    errors = {n for n, value in vars(longstraw_sdk).items() if inspect.isclass(value) and issubclass(value, Exception)}
    constants = {"__version__", "FAULT_KINDS", "prompt_identity", "prompt_identities"}
    modules = ("data", "placement", "planner", "rollout", "trainers")
    public = set(longstraw_sdk.__all__).union(*(importlib.import_module(f"longstraw_sdk.{m}").__all__ for m in modules))
    assert public - errors - constants - described == set()
