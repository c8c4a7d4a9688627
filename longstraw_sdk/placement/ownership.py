"""What a run owns on a cluster: written and on the disk before it is created, so that nothing is ever nobody's.

States, in the order of a run that nothing happens to:

    planned           plan and program, by their hashes; again where a run goes on by another plan
    connecting        an attempt begins
    validated         the cluster is what the plan needs
    creating_group    from here on the run owns the placement group of this name
    group_created
    creating_actors   from here on also the actors of these names
    actors_created
    running           updates are taken
    closed            once per update: its checkpoint is whole, and a run that goes on goes on from there
    ranks_closed      all updates are closed, and every rank gave its pages back
    releasing         everything owned is being removed
    released          nothing is owned
    ended             all updates are closed

`failed` (why) stands before the `releasing` of an attempt that failed, `recovering` (who) before that of a driver which
died. Names end in a token that was drawn for the attempt: what was not created by this journal never has one of them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import InputError, LifecycleError
from ..evidence.digests import facts_digest
from ..evidence.journal import Entry, Journal
from .plan import DirectRayPlan, check_run_id
from .program import RankProgram

OWNERSHIP = "ownership.jsonl"
LOCK = "driver.lock"


@dataclass(frozen=True)
class Owned:
    """Names on the cluster."""

    group: str | None = None
    actors: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.group is not None or bool(self.actors)


class OwnershipJournal:
    """The journal of one run, held by one process at a time; a context manager that gives it up.

    Raises `LifecycleError` if another process holds it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder / LOCK)
        try:
            self._journal = Journal(folder / OWNERSHIP)
        except BaseException:
            os.close(self._lock)
            raise

    @classmethod
    def of_run(cls, run_dir: Path, run_id: str) -> OwnershipJournal:
        """That of a run that was begun. Raises `InputError` if there is none below `run_dir`."""
        check_run_id(run_id)
        path = run_dir / run_id / OWNERSHIP
        if not path.is_file():
            raise InputError(f"{path} is missing: no driver began run {run_id!r} there; give the driver's run_dir")
        return cls(run_dir / run_id)

    @property
    def entries(self) -> list[Entry]:
        return self._journal.entries

    @property
    def state(self) -> str | None:
        return self.entries[-1]["stage"] if self.entries else None

    def write(self, state: str, **facts: Any) -> None:
        """On the disk when it returns; then do what it says."""
        self._journal.append(state, **facts)

    def begin(self, plan: DirectRayPlan, program: RankProgram) -> None:
        """Write what is run, and where: a run may go on on other nodes, but not with another program.

        Raises `InputError` if the journal is that of another program.
        """
        planned = {"plan_sha256": facts_digest(plan.as_dict()), "program_sha256": facts_digest(program.as_dict())}
        known = [entry for entry in self.entries if entry["stage"] == "planned"]
        if known and known[0]["program_sha256"] != planned["program_sha256"]:
            raise InputError(
                f"{self.folder / OWNERSHIP} is of run {plan.run_id!r} with another program; go on with the one it was "
                "begun with, or choose another run_id"
            )
        if not known or known[-1]["plan_sha256"] != planned["plan_sha256"]:
            self.write("planned", run_id=plan.run_id, **planned)

    def own(self, plan: DirectRayPlan) -> Owned:
        """Names for one attempt at `plan`. They are owned once they are written."""
        token = secrets.token_hex(8)
        actors = (plan.coordinator, *plan.ranks)
        return Owned(f"{plan.group_name}-{token}", tuple(f"{actor.name}-{token}" for actor in actors))

    @property
    def owned(self) -> Owned:
        """What may exist on a cluster now because of this run."""
        owned = Owned()
        for entry in self.entries:
            if entry["stage"] == "creating_group":
                owned = Owned(entry["group"], owned.actors)
            elif entry["stage"] == "creating_actors":
                owned = Owned(owned.group, (*owned.actors, *entry["actors"]))
            elif entry["stage"] == "released":
                owned = Owned()
        return owned

    @property
    def address(self) -> str | None:
        """The cluster of the last attempt."""
        found = [entry["address"] for entry in self.entries if entry["stage"] == "connecting"]
        return found[-1] if found else None

    @property
    def last_closed(self) -> Mapping[str, Any] | None:
        """The entry of the last closed update."""
        return next((entry for entry in reversed(self.entries) if entry["stage"] == "closed"), None)

    def close(self) -> None:
        os.close(self._lock)

    def __enter__(self) -> OwnershipJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path) -> int:
    """A file handle that is locked until it is closed, which a process that dies does too."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise LifecycleError(
            f"{path} is held by another process: the driver of this run is alive, or is being cleaned up after. Stop "
            "that process first"
        ) from error
    return handle
