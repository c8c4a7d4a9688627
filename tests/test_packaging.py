"""What the wheel will hold, what an import costs, and what the pins admit.

setuptools silently leaves out of the wheel what `packages` does not list, so the list is compared with the tree.
"""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# The versions the project promises to be tested with; a change here is a change of that promise.
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "megatron-core": "0.16.1",
    "ray": "2.60.0",
}
# Extras that need an accelerator or that no test installs.
UNPINNED_EXTRAS = {"gpu"}


def packages_in_tree(root: Path, package_dir: dict[str, str]) -> dict[str, Path]:
    """Dotted name -> folder, for every folder that holds Python files. Links are not followed."""
    found = {}
    for package, top in package_dir.items():
        for folder, subfolders, files in os.walk(root / top):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            if any(name.endswith(".py") for name in files):
                parts = Path(folder).relative_to(root / top).parts
                found[".".join([package, *parts])] = Path(folder)
    return found


def packaging_faults(root: Path, setuptools: dict) -> list[str]:
    listed, tree = setuptools["packages"], packages_in_tree(root, setuptools["package-dir"])
    faults = [f"{name} is missing from `packages` in pyproject.toml" for name in sorted(tree.keys() - set(listed))]
    faults += [f"{name} is in `packages`, but no such folder has Python files" for name in listed if name not in tree]
    faults += [f"{name} has no __init__.py" for name, path in tree.items() if not (path / "__init__.py").is_file()]
    faults += [f"{name} is listed twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    return faults


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(requirement.specifier).startswith("==") for requirement in requirements)
    return {canonicalize_name(req.name): Version(str(req.specifier)[2:]) for req in requirements}


def direct_requirements(skip_extras: set[str] = frozenset()) -> list[Requirement]:
    project = PYPROJECT["project"]
    lines = list(project["dependencies"])
    for extra, requirements in project["optional-dependencies"].items():
        lines += requirements if extra not in skip_extras else []
    return [requirement for line in lines if (requirement := Requirement(line)).name != project["name"]]


def python(*code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", "\n".join(code)], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_every_package_is_listed():
    assert packaging_faults(ROOT, SETUPTOOLS) == []


def test_a_forgotten_package_is_named(tmp_path):
    for name in ("core/__init__.py", "core/extra/__init__.py", "side/__init__.py", "side/bare/module.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "core" / "side").symlink_to("../side")
    setuptools = {"packages": ["core", "core.side", "core.gone"], "package-dir": {"core": "core", "core.side": "side"}}
    assert packaging_faults(tmp_path, setuptools) == [
        "core.extra is missing from `packages` in pyproject.toml",
        "core.side.bare is missing from `packages` in pyproject.toml",
        "core.gone is in `packages`, but no such folder has Python files",
        "core.side.bare has no __init__.py",
    ]


@pytest.mark.parametrize("name", ["models", "trainers"])
def test_links_are_relative(name):
    link = ROOT / "longstraw_sdk" / name
    assert link.is_symlink(), f"{link} must be a link; on Windows enable symbolic links in git (core.symlinks)"
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == (ROOT / name).resolve()


@pytest.mark.parametrize("name", ["models", "trainers"])
def test_bare_import_is_refused(name):
    result = python(f"import {name}")
    assert result.returncode != 0
    assert "ImportError" in result.stderr and f"longstraw_sdk.{name}" in result.stderr


def test_importing_the_core_is_light():
    heavy = ["trl", "peft", "ray", "megatron", "datasets", "accelerate"]
    result = python(
        "import sys, longstraw_sdk, longstraw_sdk.models, longstraw_sdk.trainers, longstraw_sdk.placement",
        f"print(sorted(set({heavy}) & set(sys.modules)))",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_trainer_names_are_lazy_and_typos_are_reported():
    result = python(
        "import longstraw_sdk.trainers as trainers",
        "assert {'LongStrawGRPOConfig', 'LongStrawGRPOTrainer'} <= set(dir(trainers))",
        "trainers.LongStrawGRPOTrainr",
    )
    assert "AttributeError" in result.stderr and "LongStrawGRPOTrainer" in result.stderr


def test_version_is_stated_once():
    import longstraw_sdk

    assert longstraw_sdk.__version__ == PYPROJECT["project"]["version"]


def test_console_script_resolves():
    module, function = PYPROJECT["project"]["scripts"]["longstraw"].split(":")
    assert find_spec(module) is not None
    assert python(f"from {module} import {function}; assert callable({function})").returncode == 0


def test_pins_are_the_tested_versions():
    assert {name: str(version) for name, version in pins().items() if name in TESTED} == TESTED


def test_ranges_admit_the_pins():
    pinned = pins()
    refused = [
        f"{requirement} does not admit the pinned {pinned[name]}"
        for requirement in direct_requirements()
        if (name := canonicalize_name(requirement.name)) in pinned and pinned[name] not in requirement.specifier
    ]
    assert refused == []


def test_direct_requirements_are_pinned():
    names = {canonicalize_name(requirement.name) for requirement in direct_requirements(UNPINNED_EXTRAS)}
    assert names - pins().keys() == set()


def test_torch_range_starts_at_2_11():
    (torch,) = [requirement for requirement in direct_requirements() if requirement.name == "torch"]
    assert Version("2.11.0") in torch.specifier and Version("2.10.1") not in torch.specifier


@pytest.mark.parametrize(
    ("name", "faulty"),
    [("transformers", "5.23.0"), ("trl", "1.15.0"), ("peft", "0.19.0")],  # docs/known-faults.md, rows 28, 30 and 39
)
def test_versions_with_known_faults_are_not_admitted(name, faulty):
    found = [requirement for requirement in direct_requirements() if requirement.name == name]
    assert found and not any(Version(faulty) in requirement.specifier for requirement in found)
