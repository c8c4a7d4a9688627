"""Checks and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .subject import Subject


@dataclass(frozen=True)
class Check:
    """One prerequisite.

    `ok` with a remedy: the run works, but not as well as it could. Not `ok`: it would fail, or be wrong.
    """

    name: str
    ok: bool
    found: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert self.ok or self.remedy, f"{self.name}: a fault needs a remedy"


Examination = Callable[[Subject], Iterable[Check]]


def examine(subject: Subject) -> list[Check]:
    """All checks of `subject`, whichever of them fail. Folders are written to, and left as they were."""
    from . import data, devices, folders, memory, model, placement, software

    examinations: tuple[Examination, ...] = (
        software.examine,
        devices.examine,
        folders.examine,
        model.examine,
        memory.examine,
        data.examine,
        placement.examine,
    )
    return [check for examination in examinations for check in _whatever_happens(examination, subject)]


def _whatever_happens(examination: Examination, subject: Subject) -> Iterator[Check]:
    """The checks; what goes wrong in an examination itself is a fault as well, and does not hide the others."""
    try:
        yield from examination(subject)
    except Exception as error:
        name = examination.__module__.rpartition(".")[2]
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        yield Check(name, False, f"the examination itself failed: {said}", "mend what the message names, then repeat")
