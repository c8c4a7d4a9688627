"""Whether a Ray cluster is what a plan needs. Pure, over the records that `ray.nodes()` gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, PlacementError
from .plan import DirectRayPlan


@dataclass(frozen=True)
class NodeFacts:
    """One record of a node. A node that was started again has several, of which one is alive."""

    node_id: str
    node_ip: str
    alive: bool
    resources: Mapping[str, float]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> NodeFacts:
        return cls(
            str(record["NodeID"]),
            str(record["NodeManagerAddress"]),
            bool(record["Alive"]),
            dict(record.get("Resources") or {}),
        )


@dataclass(frozen=True)
class ClusterFacts:
    """All records of a cluster."""

    nodes: tuple[NodeFacts, ...]

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> ClusterFacts:
        return cls(tuple(NodeFacts.of(record) for record in records))

    def at(self, node_ip: str) -> list[NodeFacts]:
        """The live records of an address."""
        return [node for node in self.nodes if node.alive and node.node_ip == node_ip]

    def node_ids(self, plan: DirectRayPlan) -> dict[str, str]:
        """Ray's ID of the node at each of the plan's addresses, of a cluster that passed `validate_cluster`."""
        return {ip: self.at(ip)[0].node_id for ip in plan.node_ips}


def validate_cluster(plan: DirectRayPlan, nodes: Iterable[Mapping[str, Any]]) -> ClusterFacts:
    """What the cluster is, if it is what `plan` needs.

    Args:
        nodes: what `ray.nodes()` gives.

    Raises `PlacementError` that lists every fault of every node, and `ConfigurationError` for a plan without an image.
    """
    require_image(plan)
    facts = ClusterFacts.of(nodes)
    if faults := cluster_faults(plan, facts):
        raise PlacementError(
            f"the cluster is not what run {plan.run_id!r} needs, {len(faults)} faults; nothing was created:\n- "
            + "\n- ".join(faults)
        )
    return facts


def require_image(plan: DirectRayPlan) -> None:
    """Raise `ConfigurationError` if `plan` is one to look at."""
    if plan.image_resource is None:
        raise ConfigurationError(
            "runtime_image=None makes a plan to look at; to run it, give build_direct_ray_plan the image that the "
            "nodes run, as repository@sha256:<64 hex>"
        )


def cluster_faults(plan: DirectRayPlan, facts: ClusterFacts) -> list[str]:
    """In which the cluster differs from what `plan` needs, a sentence each; empty if it can be run there."""
    return [f"{ip}: {fault}" for ip, faults in faults_by_node(plan, facts).items() for fault in faults]


def faults_by_node(plan: DirectRayPlan, facts: ClusterFacts) -> dict[str, list[str]]:
    """`cluster_faults` of each of the plan's addresses, in its order."""
    return {ip: _node_faults(plan, facts, ip, needed) for ip, needed in zip(plan.node_ips, plan.bundles, strict=True)}


def _node_faults(plan: DirectRayPlan, facts: ClusterFacts, ip: str, needed: Mapping[str, float]) -> list[str]:
    live = facts.at(ip)
    if not live:
        gone = sum(node.node_ip == ip for node in facts.nodes)
        known = sorted({node.node_ip for node in facts.nodes if node.alive})
        was = f"its {gone} earlier records are dead" if gone else "no node was ever there"
        return [f"no live Ray node ({was}); live are {', '.join(known) or 'none'}. Start `ray start` there"]
    if len(live) > 1:
        ids = ", ".join(node.node_id for node in live)
        return [f"{len(live)} live Ray nodes ({ids}), so that ranks could land on either; stop all but one"]
    (node,) = live
    faults = []
    for name in ("GPU", "CPU"):
        if node.resources.get(name, 0) < needed[name]:
            faults.append(
                f"{node.resources.get(name, 0):g} {name}s, but the plan puts {plan.gpus_per_node} ranks of one {name} "
                f"each there; start the node with --num-{name.lower()}s={plan.gpus_per_node} or more"
            )
    own, image = f"node:{ip}", plan.image_resource
    if node.resources.get(own, 0) < needed[own]:
        faults.append(
            f"it does not offer the resource {own!r}, which Ray adds itself; start the node with --node-ip-address={ip}"
        )
    if image is not None and node.resources.get(image, 0) < needed[image]:
        others = sorted(name for name in node.resources if name.startswith("mint2m_image_") and name != image)
        seen = f"it declares {', '.join(others)}, another image" if others else "it declares no image"
        faults.append(
            f"it does not offer the resource {image!r} of {plan.runtime_image}: {seen}. Start Ray inside that image "
            f"with --resources='{{\"{image}\": 1}}'"
        )
    return faults
