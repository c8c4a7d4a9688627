"""Build the wheel, install it into an environment of its own, and use it from another directory.

The environment sees the dependencies of the interpreter that runs this script, but neither the repository nor an
editable install of it, so a package that is missing from the wheel fails to import.

    python scripts/wheel_smoke.py [FOLDER]      # leaves the wheel in FOLDER
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {".md", ".pyc"}

# Runs inside the new environment: argv = the version, the folder the package must come from, the packages.
CHECK = """
import importlib, importlib.metadata, pathlib, sys
version, home, *packages = sys.argv[1:]
assert importlib.metadata.version("longstraw-sdk") == version, importlib.metadata.version("longstraw-sdk")
import longstraw_sdk
assert longstraw_sdk.__version__ == version, longstraw_sdk.__version__
for name in packages:
    importlib.import_module(name)
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer
loaded = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "longstraw_sdk" and m.__file__}
strays = {n: f for n, f in loaded.items() if not pathlib.Path(f).resolve().is_relative_to(pathlib.Path(home).resolve())}
assert not strays, strays
print(f"imported {len(packages)} packages, {len(loaded)} modules, all of them from {home}")
"""


def run(*command: str | Path, cwd: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)


def build(work: Path, package_dir: dict[str, str]) -> Path:
    """The wheel of a copy of the sources: a `build/` left in the repository would smuggle deleted modules into it."""
    source = work / "source"
    source.mkdir()
    for top in package_dir.values():
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip_wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", work / "dist")
    run(sys.executable, *pip_wheel, source, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def missing_files(wheel: Path, package_dir: dict[str, str]) -> list[str]:
    """Files of the source folders that the wheel leaves out, code and data alike."""
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = [
        (Path(*package.split(".")) / (Path(folder) / name).relative_to(ROOT / top)).as_posix()
        for package, top in package_dir.items()
        for folder, _, names in os.walk(ROOT / top)
        for name in names
        if Path(name).suffix not in NOT_SHIPPED
    ]
    return sorted(set(wanted) - shipped)


def install(wheel: Path, work: Path) -> tuple[Path, Path]:
    """A new environment with the wheel in it; returns its folder of programs and its site-packages."""
    home = work / "venv"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    paths = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    pip_install = ("-m", "pip", "--python", scripts / "python", "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *pip_install, wheel, cwd=work)
    # A path in a .pth file is searched, but .pth files inside it are not run: an editable install stays invisible.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts, site


def main(keep: str | None = None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    with tempfile.TemporaryDirectory(prefix="wheel-smoke-") as temporary:
        work = Path(temporary)
        wheel = build(work, setuptools["package-dir"])
        missing = missing_files(wheel, setuptools["package-dir"])
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(missing)}: see packages and package-data in pyproject.toml")
        scripts, site = install(wheel, work)
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        arguments = (project["project"]["version"], site, *setuptools["packages"])
        run(scripts / "python", "-c", CHECK, *arguments, cwd=elsewhere)
        run(scripts / "longstraw", "--help", cwd=elsewhere)
        if keep is not None:
            Path(keep).mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, keep)
    print(f"wheel smoke test: {wheel.name} is whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
