"""Giving back what a run owns on a cluster: at its end, after a failure, and after a driver that died."""

from __future__ import annotations

from pathlib import Path

from .ownership import Owned, OwnershipJournal
from .runtime import RayRuntime, Release


def release(journal: OwnershipJournal, runtime: RayRuntime, run_id: str, timeout_s: float) -> Release:
    """Remove what the journal owns. What stays for longer than `timeout_s` is `kept`, and still owned."""
    owned = journal.owned
    if not owned:
        return runtime.release(Owned(), run_id, timeout_s)
    journal.write("releasing")
    found = runtime.release(owned, run_id, timeout_s)
    if not found.kept:
        journal.write("released", removed=found.removed, absent=found.absent, left=found.left)
    return found


def recover(journal: OwnershipJournal, runtime: RayRuntime, run_id: str, by: str, timeout_s: float) -> Release:
    """`release` after a driver that died; `by` says who does it."""
    if journal.owned:
        journal.write("recovering", by=by, after=journal.state)
    return release(journal, runtime, run_id, timeout_s)


def clean_up(run_dir: Path, run_id: str, address: str | None = None, timeout_s: float = 60.0) -> Release:
    """What `longstraw cleanup` does.

    Args:
        address: of the cluster; None takes the one that the driver connected to.

    Raises `InputError` if there is no such run, `LifecycleError` while its driver is alive, and `PlacementError` if the
    cluster does not answer within `timeout_s`.
    """
    with OwnershipJournal.of_run(run_dir, run_id) as journal:
        with RayRuntime.connect(address or journal.address or "auto", timeout_s) as runtime:
            return recover(journal, runtime, run_id, "cleanup", timeout_s)
