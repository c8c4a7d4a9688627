"""Imports point one way: a module may import its own floor and the floors below it, inside functions too.

A module that is not in the table fails the test: give it a floor. Names that are resolved from strings (the adapter
registry's "module:Class") are no import statements and do not count.
"""

import ast
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "longstraw_sdk"

# One number per first component below the package; "" is the package's own __init__, which offers the public API.
FLOOR = {
    "errors": 0,
    "types": 0,
    "data": 1,
    "environment": 1,
    "lazy": 0,
    "state": 1,
    "ops": 2,
    "lora": 3,
    "adapter": 4,
    "positions": 4,
    "hf": 5,
    "backends": 6,
    "bound": 6,
    "objective": 6,
    "capture": 7,
    "replay": 7,
    "sweep": 7,
    "turns": 7,
    "out_of_memory": 8,
    "session_core": 7,
    "planner": 8,
    "prefix": 8,
    "probe": 8,
    "rollout": 8,
    "sampling": 8,
    "session": 9,
    "": 10,
    "models": 11,
    "trainers": 11,
    "bench": 11,
    "evidence": 11,
    "demo": 11,
    "doctor": 11,
    "report": 11,
    "placement": 11,
    "cli": 11,
    "examples": 12,
}
# Architectures are leaves: only the top floors name them, and they reach no higher than the adapter contract and `hf`.
REACH = {"models": FLOOR["hf"]}

# (importing module, imported module) -> why this one upward import is right.
ALLOWED: dict[tuple[str, str], str] = {}


def module_files(root: Path) -> dict[str, Path]:
    """Dotted module name -> file. Links are not followed: models/ and trainers/ are read where they lie."""
    files = {}
    for top in (PACKAGE, "models", "trainers", "examples"):
        prefix = top if top in (PACKAGE, "examples") else f"{PACKAGE}.{top}"
        for folder, _, names in os.walk(root / top):
            for name in names:
                if name.endswith(".py"):
                    path = Path(folder) / name
                    parts = path.relative_to(root / top).with_suffix("").parts
                    files[".".join([prefix, *parts]).removesuffix(".__init__")] = path
    return files


def imported_modules(module: str, path: Path, known: set[str]) -> set[str]:
    """Modules of this project that `module` imports, at any depth of the file."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) + 1 - node.level], *base.split(".")])
                base = base.rstrip(".")
            for alias in node.names:  # `from package import x` means the module package.x where there is one
                name = f"{base}.{alias.name}"
                found.add(name if name in known else base)
    return {name for name in found if name.split(".")[0] in (PACKAGE, "examples", "models", "trainers")}


def unit(module: str) -> str:
    """The key of `module` in FLOOR."""
    parts = module.split(".")
    return "examples" if parts[0] == "examples" else ".".join(parts[1:2])


def violations(root: Path, allowed: dict[tuple[str, str], str] = ALLOWED) -> list[str]:
    files = module_files(root)
    found, used = [], set()
    for module, path in sorted(files.items()):
        if unit(module) not in FLOOR:
            found.append(f"{module} has no floor: add {unit(module)!r} to FLOOR")
            continue
        reach = REACH.get(unit(module), FLOOR[unit(module)])
        for target in sorted(imported_modules(module, path, set(files))):
            if (module, target) in allowed:
                used.add((module, target))
            elif target.split(".")[0] in ("models", "trainers"):
                found.append(f"{module} imports {target} under its bare name: write {PACKAGE}.{target}")
            elif unit(module) == unit(target) == "models":
                if module.split(".")[2:3] != target.split(".")[2:3]:
                    found.append(f"{module} imports another architecture, {target}")
            elif unit(target) == unit(module):
                continue
            elif FLOOR.get(unit(target), 0) > reach:
                found.append(f"{module} (reaches floor {reach}) imports {target} (floor {FLOOR[unit(target)]})")
    found += [f"{pair} is allowed, but nothing imports it: remove the entry" for pair in sorted(set(allowed) - used)]
    return found


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_the_checker_accepts_what_is_right(tmp_path):
    write_tree(
        tmp_path,
        {
            "longstraw_sdk/__init__.py": "from .session import Session\nfrom . import errors\n",
            "longstraw_sdk/errors.py": "import os\n",
            "longstraw_sdk/state/__init__.py": "from .pool import Pool\nfrom ..errors import E\n",
            "longstraw_sdk/state/pool.py": "from .. import errors\nfrom longstraw_sdk.errors import E\n",
            "longstraw_sdk/session.py": "def f():\n    from .state.pool import Pool\n",
            "models/__init__.py": "",
            "models/dense/__init__.py": "from .adapter import A\n",
            "models/dense/adapter.py": "from longstraw_sdk.state import Pool\nfrom .. import dense\n",
            "trainers/trainer.py": "from longstraw_sdk import Session\n",
            "examples/loop.py": "from longstraw_sdk.models.dense import A\n",
        },
    )
    assert violations(tmp_path) == []


def test_the_checker_reports_what_is_wrong(tmp_path):
    write_tree(
        tmp_path,
        {
            "longstraw_sdk/__init__.py": "",
            "longstraw_sdk/errors.py": "def f():\n    from .session import Session\n",
            "longstraw_sdk/session.py": "from longstraw_sdk.models.dense import A\n",
            "longstraw_sdk/state/pool.py": "from ..ops.attention import f\nfrom .. import x\n",
            "longstraw_sdk/ops/attention.py": "",
            "longstraw_sdk/attic.py": "",
            "models/dense/__init__.py": "",
            "models/qwen36/__init__.py": "from ..dense import A\nfrom longstraw_sdk import session\n",
            "trainers/trainer.py": "from models.dense import A\n",
        },
    )
    assert violations(tmp_path) == [
        "longstraw_sdk.attic has no floor: add 'attic' to FLOOR",
        "longstraw_sdk.errors (reaches floor 0) imports longstraw_sdk.session (floor 9)",
        "longstraw_sdk.models.qwen36 imports another architecture, longstraw_sdk.models.dense",
        "longstraw_sdk.models.qwen36 (reaches floor 5) imports longstraw_sdk.session (floor 9)",
        "longstraw_sdk.session (reaches floor 9) imports longstraw_sdk.models.dense (floor 11)",
        "longstraw_sdk.state.pool (reaches floor 1) imports longstraw_sdk (floor 10)",
        "longstraw_sdk.state.pool (reaches floor 1) imports longstraw_sdk.ops.attention (floor 2)",
        "longstraw_sdk.trainers.trainer imports models.dense under its bare name: write longstraw_sdk.models.dense",
    ]


def test_an_allowed_import_needs_to_exist(tmp_path):
    files = {"longstraw_sdk/errors.py": "import longstraw_sdk.session\n", "longstraw_sdk/session.py": ""}
    write_tree(tmp_path, files)
    pair = ("longstraw_sdk.errors", "longstraw_sdk.session")
    assert violations(tmp_path, {pair: "a reason"}) == []
    (tmp_path / "longstraw_sdk/errors.py").write_text("")
    assert violations(tmp_path, {pair: "a reason"}) == [
        f"{pair} is allowed, but nothing imports it: remove the entry",
    ]
