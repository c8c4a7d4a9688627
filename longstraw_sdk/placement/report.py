"""What ranks say of themselves, held against the plan, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import PlacementError
from ..evidence.artifacts import write_json
from ..evidence.run_folder import RANKS
from .plan import DirectRayPlan

Phases = Sequence[tuple[str, int]]
"""Names of phases and the updates that were closed before each, in order."""


def check_places(plan: DirectRayPlan, node_ids: Mapping[str, str], places: Sequence[Mapping[str, Any]]) -> None:
    """Raise `PlacementError`, with all that is wrong, unless every rank is where the plan puts it.

    Args:
        node_ids: Ray's ID of the node at each address.
        places: `observed_placement()` of each rank, in rank order.
    """
    faults = []
    taken: dict[tuple[str, str], int] = {}
    for rank, place in zip(plan.ranks, places, strict=True):
        if place["node_id"] != node_ids[rank.node_ip]:
            faults.append(
                f"rank {rank.rank} runs on node {place['node_id']} ({place['node_ip']}), planned is "
                f"{node_ids[rank.node_ip]} ({rank.node_ip})"
            )
        if place["node_ip"] != rank.node_ip:
            faults.append(f"rank {rank.rank} calls its address {place['node_ip']}, planned is {rank.node_ip}")
        if len(place["accelerators"]) != 1:
            faults.append(f"rank {rank.rank} has {len(place['accelerators'])} accelerators, planned is one")
        for accelerator in place["accelerators"]:
            other = taken.setdefault((place["node_id"], accelerator), rank.rank)
            if other != rank.rank:
                faults.append(f"ranks {other} and {rank.rank} share accelerator {accelerator} of {place['node_ip']}")
    for ip in plan.node_ips:
        slots = [rank.slot for rank in plan.ranks if node_ids[ip] == places[rank.rank]["node_id"]]
        if sorted(slots) != list(range(plan.gpus_per_node)):
            faults.append(f"{ip} holds the slots {sorted(slots)}, planned are 0 to {plan.gpus_per_node - 1}")
    if faults:
        raise PlacementError("the ranks are not where they were planned:\n- " + "\n- ".join(faults))


def check_reports(asked: Sequence[Phases], reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise `PlacementError` unless every rank went through the phases that it was asked for, each to its end.

    Devices must be as many as ranks: Ray's numbers say so per node, UUIDs say so of the hardware.
    """
    faults = []
    for rank, (wanted, report) in enumerate(zip(asked, reports, strict=True)):
        found = [(entry["phase"], entry["update"]) for entry in report["phases"]]
        if found != list(wanted):
            at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(found), len(wanted)) if at is None else at
            faults.append(f"rank {rank} differs from what it was asked for at phase {at}: {found[at : at + 1]}")
        if unfinished := [entry["phase"] for entry in report["phases"] if not entry["ok"]]:
            faults.append(f"rank {rank} did not finish {', '.join(unfinished)}")
    uuids = [report["observed"]["uuid"] for report in reports if report["observed"]["uuid"] is not None]
    if len(set(uuids)) != len(uuids):
        faults.append(f"two ranks had the same accelerator; UUIDs in rank order: {', '.join(uuids)}")
    if faults:
        raise PlacementError("the ranks did not do what they were asked:\n- " + "\n- ".join(faults))


def write_rank_sessions(folder: Path, plan: DirectRayPlan, reports: Sequence[Mapping[str, Any]]) -> str:
    """Write planned and observed placement and the phases of every rank; returns the file's sha256."""
    ranks = [
        {
            "rank": rank.rank,
            "planned": {"local_rank": rank.slot, "node_ip": rank.node_ip, "bundle": rank.bundle},
            **report,
        }
        for rank, report in zip(plan.ranks, reports, strict=True)
    ]
    return write_json(folder / RANKS, {"ranks": ranks})
