"""Interpreter, packages, kernels and environment variables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from .. import environment
from ..errors import LongStrawError
from ..evidence.machine import version_of
from ..positions import asked_positions
from .check import Check
from .subject import Subject

PACKAGE = "longstraw-sdk"


def examine(subject: Subject) -> Iterator[Check]:
    yield Check("python", True, platform.python_version())  # pip refuses others than those that the package names
    yield from _packages()
    yield from _delta_rule_kernels()
    yield _environment()


def _packages() -> Iterator[Check]:
    """Every required distribution that is missing or of a version that is not allowed; optional ones if installed."""
    from packaging.requirements import Requirement

    checked = 0
    for text in metadata.requires(PACKAGE) or []:
        requirement = Requirement(text)
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if not optional and requirement.marker is not None and not requirement.marker.evaluate():
            continue
        found = version_of(requirement.name)
        if found is None and optional:
            continue
        checked += 1
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            yield Check(f"package {requirement.name}", False, found or "not installed", f'pip install "{wanted}"')
    yield Check("packages", True, f"{PACKAGE} {version_of(PACKAGE)}; {checked} others examined")


def _delta_rule_kernels() -> Iterator[Check]:
    """flash-linear-attention's gated delta rule, whose backward Triton compiled wrongly for Hopper for a while."""
    import torch

    if not torch.cuda.is_available():
        return
    name = "gated-delta-rule kernels"
    if find_spec("fla") is None:
        yield Check(
            name,
            True,
            "flash-linear-attention is not installed: recurrent layers run in plain PyTorch, many times slower",
            'pip install "longstraw-sdk[gpu]"',
        )
        return
    triton, fla = version_of("triton"), version_of("flash-linear-attention")
    found = f"flash-linear-attention {fla}, triton {triton}, tilelang {version_of('tilelang') or 'not installed'}"
    hopper = any(torch.cuda.get_device_capability(i)[0] == 9 for i in range(torch.cuda.device_count()))
    wrong = hopper and is_miscompiled(triton) and find_spec("tilelang") is None
    remedy = 'pip install "tilelang>=0.1.9", or triton 3.7.1 or later' if wrong else None
    if wrong:
        found += (
            ": on Hopper this Triton gives wrong gradients of it, and flash-linear-attention refuses to compute them"
        )
    yield Check(name, not wrong, found, remedy)


def is_miscompiled(triton: str | None) -> bool:
    """Whether this Triton gives wrong gradients of the gated delta rule on Hopper (flash-linear-attention's check)."""
    from packaging.version import Version

    return triton is not None and Version("3.4.0") <= Version(triton) < Version("3.7.1")


def _environment() -> Check:
    known = [*environment.ALLOWED, environment.POSITIONS]
    unknown = sorted(name for name in os.environ if name.startswith("LONGSTRAW_") and name not in known)
    try:
        environment.check()
        asked_positions(None)
    except LongStrawError as error:
        return Check("environment", False, str(error), "set the variable to an allowed value, or unset it")
    given = ", ".join(f"{name}={os.environ[name]}" for name in known if name in os.environ) or "nothing is set"
    if unknown:
        return Check(
            "environment", False, f"nobody reads {', '.join(unknown)}", f"unset it; known are {', '.join(known)}"
        )
    return Check("environment", True, given)
