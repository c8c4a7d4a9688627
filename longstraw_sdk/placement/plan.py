"""Where every rank of a run is to be: a pure description, the same for the same input, to be read before it is run.

A node becomes one bundle of one placement group, and a rank one actor in its node's bundle. Bundles and actors ask for
a share of `node:<ip>`, which Ray gives every node, and of a resource named after the digest of the image that the node
runs, which whoever starts the node declares: an actor can then start on no other node and in no other image.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, InputError, require_at_least

FORMAT = 1
STRATEGY = "STRICT_SPREAD"
SHARE = 0.001
"""Of the node's and the image's resource per actor: Ray counts in steps of 0.0001, and a node offers 1."""

MOST_GPUS = 512
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:(?P<digest>[0-9a-f]{64})")


@dataclass(frozen=True)
class ActorSpec:
    """One actor: its name, the node and image that it is bound to, and what it takes of its node's bundle."""

    name: str
    node_ip: str
    bundle: int
    num_cpus: int
    num_gpus: int
    image_resource: str | None

    @property
    def resources(self) -> dict[str, float]:
        """Custom resources, beside CPUs and GPUs."""
        return _binding(self.node_ip, self.image_resource, 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "node_ip": self.node_ip,
            "bundle": self.bundle,
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": self.resources,
        }


@dataclass(frozen=True)
class RankSpec(ActorSpec):
    """The actor of one rank. `slot` counts the ranks of a node from 0."""

    rank: int
    slot: int

    def as_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "slot": self.slot} | super().as_dict()


@dataclass(frozen=True, kw_only=True)
class DirectRayPlan:
    """Made by `build_direct_ray_plan`. Names, bundles and actors follow from the five fields.

    Args:
        run_id: part of every name that the run takes on the cluster.
        node_ips: the nodes; ranks are counted along them.
        gpus_per_node: ranks per node, one GPU and one CPU each.
        runtime_image: `repository@sha256:<64 hex>`; None makes a plan to look at, which no driver runs.
        image_resource: the Ray resource that nodes running this image declare; None without an image.
    """

    run_id: str
    node_ips: tuple[str, ...]
    gpus_per_node: int
    runtime_image: str | None
    image_resource: str | None

    @property
    def world_size(self) -> int:
        return len(self.node_ips) * self.gpus_per_node

    @property
    def prefix(self) -> str:
        """What every name of this run on a cluster begins with."""
        return run_prefix(self.run_id)

    @property
    def group_name(self) -> str:
        return f"{self.prefix}group"

    @property
    def bundles(self) -> tuple[dict[str, float], ...]:
        """Resources per node; the first has room for the coordinator."""
        ranks = {"CPU": float(self.gpus_per_node), "GPU": float(self.gpus_per_node)}
        return tuple(
            ranks | _binding(ip, self.image_resource, self.gpus_per_node + (i == 0))
            for i, ip in enumerate(self.node_ips)
        )

    @property
    def coordinator(self) -> ActorSpec:
        """Holds the store at which ranks meet, so that no rank's end takes it along."""
        return ActorSpec(f"{self.prefix}coordinator", self.node_ips[0], 0, 0, 0, self.image_resource)

    @property
    def ranks(self) -> tuple[RankSpec, ...]:
        return tuple(
            RankSpec(
                f"{self.prefix}rank-{bundle * self.gpus_per_node + slot}",
                ip,
                bundle,
                1,
                1,
                self.image_resource,
                bundle * self.gpus_per_node + slot,
                slot,
            )
            for bundle, ip in enumerate(self.node_ips)
            for slot in range(self.gpus_per_node)
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "node_ips": list(self.node_ips),
            "gpus_per_node": self.gpus_per_node,
            "runtime_image": self.runtime_image,
            "image_resource": self.image_resource,
            "placement_group": {"name": self.group_name, "strategy": STRATEGY, "bundles": list(self.bundles)},
            "coordinator": self.coordinator.as_dict(),
            "ranks": [rank.as_dict() for rank in self.ranks],
        }

    def to_json(self) -> str:
        """The same text for the same plan."""
        return json.dumps(self.as_dict(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DirectRayPlan:
        """Raises `InputError` unless `text` is, key by key, what `to_json` writes for its own first fields."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InputError(f"this is no plan: not JSON ({error})") from error
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise InputError(f"this is no plan of format {FORMAT}; write it with build_direct_ray_plan(...).to_json()")
        needed = ("run_id", "node_ips", "gpus_per_node", "runtime_image")
        if missing := [name for name in needed if name not in given]:
            raise InputError(f"the plan lacks {', '.join(missing)}; write it anew with build_direct_ray_plan")
        try:
            plan = build_direct_ray_plan(**{name: given[name] for name in needed})
        except ConfigurationError as error:
            raise InputError(f"the plan cannot be: {error}") from error
        wanted = plan.as_dict()
        wrong = sorted(
            name for name in wanted.keys() | given.keys() if _text(given.get(name)) != _text(wanted.get(name))
        )
        if wrong:
            raise InputError(
                f"the plan's {', '.join(wrong)} do not follow from its {', '.join(needed)}; do not edit a plan, write "
                "it anew with build_direct_ray_plan"
            )
        return plan


def build_direct_ray_plan(
    *, run_id: str, node_ips: Sequence[str], gpus_per_node: int, runtime_image: str | None = None
) -> DirectRayPlan:
    """The plan of a run on `node_ips`. Touches nothing; arguments as in `DirectRayPlan`.

    Raises `ConfigurationError` on a name, address, number or image that cannot be, a tag instead of a digest included.
    """
    check_run_id(run_id)
    require_at_least("gpus_per_node", gpus_per_node, 1)
    if gpus_per_node > MOST_GPUS:
        raise ConfigurationError(
            f"gpus_per_node={gpus_per_node} is more than the {MOST_GPUS} that a bundle has room for"
        )
    if isinstance(node_ips, str) or not isinstance(node_ips, Sequence) or not node_ips:
        raise ConfigurationError(f"node_ips must be a list of at least one address, got {node_ips!r}")
    for ip in node_ips:
        if not _is_address(ip):
            raise ConfigurationError(
                f"node_ips holds {ip!r}; give each node's IP address, not its name, as `ray.nodes()` shows it under "
                "NodeManagerAddress"
            )
    if repeated := sorted({ip for ip in node_ips if list(node_ips).count(ip) > 1}):
        raise ConfigurationError(f"node_ips holds {', '.join(repeated)} more than once; a node is one bundle")
    return DirectRayPlan(
        run_id=run_id,
        node_ips=tuple(node_ips),
        gpus_per_node=gpus_per_node,
        runtime_image=runtime_image,
        image_resource=None if runtime_image is None else image_resource_of(runtime_image),
    )


def image_resource_of(runtime_image: str) -> str:
    """The name of the resource that a node running `runtime_image` declares: `mint2m_image_<64 hex of the digest>`."""
    found = _IMAGE.fullmatch(runtime_image) if isinstance(runtime_image, str) else None
    if found is None:
        raise ConfigurationError(
            f"runtime_image={runtime_image!r} does not name an image by its digest, repository@sha256:<64 hex>. A tag "
            "may mean another image tomorrow: take the digest from `docker buildx imagetools inspect NAME:TAG`, or "
            "give None for a plan that is only looked at"
        )
    return f"mint2m_image_{found['digest']}"


def check_run_id(run_id: object) -> None:
    """Raise `ConfigurationError` unless `run_id` can be part of names and of a path."""
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"run_id must be 1 to 63 of a-z, 0-9 and '-', the first no '-', got {run_id!r}")


def run_prefix(run_id: str) -> str:
    """Ends with a sign that no run ID holds, so that no run's names begin with another's."""
    return f"longstraw:{run_id}:"


def _binding(node_ip: str, image_resource: str | None, n_actors: int) -> dict[str, float]:
    names = [f"node:{node_ip}"] + ([] if image_resource is None else [image_resource])
    return {name: round(n_actors * SHARE, 4) for name in names}


def _is_address(ip: object) -> bool:
    try:
        return isinstance(ip, str) and str(ipaddress.ip_address(ip)) == ip
    except ValueError:
        return False


def _text(value: Any) -> str:
    """Of JSON values: 1, 1.0 and true are three."""
    return json.dumps(value, sort_keys=True)
