"""Ray, and nothing else: the only module that imports it.

Whatever may take long has a time limit here. Questions to the head node have Ray's own, of 60 s each
(RAY_gcs_server_request_timeout_seconds).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from ..errors import ConfigurationError, LifecycleError, LongStrawError, PlacementError, RankLostError
from .actors import Coordinator, RankActor
from .cluster import ClusterFacts, validate_cluster
from .ownership import Owned
from .plan import STRATEGY, ActorSpec, DirectRayPlan, run_prefix

NAMESPACE = "longstraw"
_POLL_S = 0.1

Names = Mapping[str, str]
"""Name in the plan -> name on the cluster."""


@dataclass(frozen=True)
class Actors:
    """Handles of one attempt's actors; those of ranks in rank order."""

    coordinator: Any
    ranks: tuple[Any, ...]


@dataclass(frozen=True)
class Release:
    """What became of what was owned, by kind and name.

    Args:
        removed: was there, and is gone.
        absent: was gone already, or never came to be.
        kept: could not be removed in time.
        left: placement groups and actors that this run's journal did not create, and that were not touched: all groups
            of the cluster, and actors whose names are this run's.
    """

    removed: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[str]]:
        return asdict(self)


class RayRuntime:
    """A connection to a Ray cluster; a context manager that ends it if `connect` made it."""

    def __init__(self, ray: Any, *, ours: bool):
        self._ray = ray
        self._ours = ours

    @classmethod
    def connect(cls, address: str = "auto", timeout_s: float = 60.0) -> RayRuntime:
        """Connect this process to the cluster at `address`, or take the connection that it has.

        Args:
            address: `ip:port` of the head node, or "auto" for the one that RAY_ADDRESS or this machine says.

        Raises `PlacementError` if nothing answers in time, and `ConfigurationError` without Ray.
        """
        ray = _ray()
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if address not in ("auto", connected):
                raise ConfigurationError(
                    f"this process is connected to {connected!r}, but address={address!r}; call ray.shutdown() first, "
                    "or give 'auto' to stay there"
                )
            return cls(ray, ours=False)
        if "://" in address:
            raise ConfigurationError(
                f"address={address!r} is of a Ray client; a driver runs on a node of the cluster and is given the "
                "head's ip:port, or 'auto'"
            )
        deadline = time.monotonic() + timeout_s
        host, separator, port = address.rpartition(":")
        if separator and port.isdecimal():
            _knock(host, int(port), address, timeout_s)

        def start() -> None:
            # Without a local cluster, "auto" raises; a plain ray.init() would start one.
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")

        # Against a head that hangs, ray.init tries for many minutes and takes no limit.
        _within(start, deadline, f"no Ray cluster answered at {address!r} within {timeout_s:g} s; is its head alive?")
        return cls(ray, ours=True)

    def validate_cluster(self, plan: DirectRayPlan) -> ClusterFacts:
        """`validate_cluster` of the nodes as they are now. Call it before anything is created."""
        return validate_cluster(plan, self.nodes())

    def nodes(self) -> list[dict[str, Any]]:
        """All records of nodes, as `ray.nodes()` gives them."""
        return list(self._ray.nodes())

    def create_group(self, plan: DirectRayPlan, name: str, timeout_s: float) -> str:
        """Reserve the plan's bundles, all or none, and return the group's ID. It outlives this process."""
        from ray.util.placement_group import placement_group

        group = placement_group(list(plan.bundles), strategy=STRATEGY, name=name, lifetime="detached")
        if not group.wait(timeout_s):
            raise PlacementError(
                f"the placement group of run {plan.run_id!r} was not reserved within {timeout_s:g} s: CPUs or GPUs of "
                f"{', '.join(plan.node_ips)} are taken by others. `ray status` shows what is; wait for it, or allow "
                "more time"
            )
        self._group = group
        return str(group.id.hex())

    def create_actors(self, plan: DirectRayPlan, names: Names) -> Actors:
        """Ask for the actors of the plan in the group that `create_group` made. They outlive this process."""
        coordinator = self._create(Coordinator, plan.coordinator, names)
        return Actors(coordinator, tuple(self._create(RankActor, spec, names) for spec in plan.ranks))

    def _create(self, actor: type, spec: ActorSpec, names: Names) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {
            "name": names[spec.name],
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": spec.num_cpus,
            "num_gpus": spec.num_gpus,
            "resources": spec.resources,
            "max_restarts": 0,  # one that came back would know nothing of the other ranks
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=spec.bundle
            ),
        }
        return self._ray.remote(actor).options(**options).remote()

    def call(self, calls: Mapping[str, Any], what: str, timeout_s: float, grace_s: float = 30.0) -> dict[str, Any]:
        """Results by who was asked.

        Args:
            calls: what `actor.method.remote(...)` gave, by a name for messages such as "rank 3".
            grace_s: how long the others may go on once one has failed: most wait for it for ever.

        Raises `RankLostError` if a process or node is gone, `PlacementError` if the time is over, the error of a rank
        that raised one made for users, and `PlacementError` with its text for any other.
        """
        who = {reference: name for name, reference in calls.items()}
        results: dict[str, Any] = {}
        failed: dict[str, BaseException] = {}
        lost: dict[str, BaseException] = {}
        exceptions, deadline = self._ray.exceptions, time.monotonic() + timeout_s
        waiting = list(who)
        while waiting:
            ready, waiting = self._ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for reference in ready:
                try:
                    results[who[reference]] = self._ray.get(reference, timeout=max(1.0, deadline - time.monotonic()))
                    continue
                except exceptions.GetTimeoutError:
                    continue  # its answer lies on another node and does not come: it is as good as silent
                except exceptions.RayTaskError as error:
                    failed[who[reference]] = error
                except exceptions.RayError as error:
                    lost[who[reference]] = error
                deadline = min(deadline, time.monotonic() + grace_s)
        silent = [name for name in calls if name not in results | failed | lost]
        _raise(what, failed, lost, silent, timeout_s)
        return results

    def release(self, owned: Owned, run_id: str, timeout_s: float) -> Release:
        """Remove what is `owned`, wait until it is gone, and say what is left. Doing so twice is allowed."""
        deadline = time.monotonic() + timeout_s
        there = self._owned_there(owned)
        for kind, name in there:
            if kind == "actor":
                self._kill(name)
        for kind, name in there:
            if kind == "placement group":
                self._remove_group(name)
        while (remain := self._owned_there(owned)) and time.monotonic() < deadline:
            for kind, name in remain:  # an actor that was being created when its driver died
                if kind == "actor":
                    self._kill(name)
            time.sleep(_POLL_S)
        names = [("placement group", owned.group)] if owned.group is not None else []
        names += [("actor", name) for name in owned.actors]
        return Release(
            removed=[f"{kind} {name}" for kind, name in there if (kind, name) not in remain],
            absent=[f"{kind} {name}" for kind, name in names if (kind, name) not in there],
            kept=[f"{kind} {name}" for kind, name in remain],
            left=self._strangers(owned, run_id),
        )

    def close(self) -> None:
        """End the connection, if `connect` made it. What was created stays."""
        if self._ours and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> RayRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _groups(self) -> dict[str, dict[str, Any]]:
        """ID -> record of every placement group that is not removed."""
        from ray.util.placement_group import placement_group_table

        return {key: record for key, record in placement_group_table().items() if record["state"] != "REMOVED"}

    def _actor_names(self) -> list[str]:
        """Of all that live in our namespace."""
        named = self._ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]

    def _owned_there(self, owned: Owned) -> list[tuple[str, str]]:
        actors = [("actor", name) for name in self._actor_names() if name in owned.actors]
        names = {record["name"] for record in self._groups().values()} & {owned.group}
        return actors + [("placement group", name) for name in sorted(names)]

    def _strangers(self, owned: Owned, run_id: str) -> list[str]:
        prefix, others = run_prefix(run_id), set(owned.actors) | {owned.group}
        found = [f"actor {name}" for name in self._actor_names() if name.startswith(prefix) and name not in others]
        groups = [(key, record["name"]) for key, record in self._groups().items() if record["name"] not in others]
        found += [f"placement group {name or 'without a name'} ({key})" for key, name in groups]
        return sorted(found)

    def _kill(self, name: str) -> None:
        with suppress(ValueError):  # it is gone already
            self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

    def _remove_group(self, name: str) -> None:
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        for key, record in self._groups().items():
            if record["name"] == name:
                remove_placement_group(PlacementGroup(self._ray.PlacementGroupID(bytes.fromhex(key))))


def observed_placement() -> dict[str, Any]:
    """Where the actor that calls it is: node, address and accelerators, as Ray sees them."""
    ray = _ray()
    context = ray.get_runtime_context()
    accelerators = context.get_accelerator_ids()
    return {
        "node_id": context.get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "accelerators": [str(key) for key in accelerators.get("GPU", [])],
    }


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError('Ray is not installed; run pip install "longstraw-sdk[ray]"') from error
    return ray


def _knock(host: str, port: int, address: str, timeout_s: float) -> None:
    try:
        socket.create_connection((host.strip("[]"), port), timeout_s).close()
    except OSError as error:
        raise PlacementError(
            f"no Ray cluster answers at {address!r} ({error}); give the ip:port that `ray start --head` printed, and "
            "start the cluster if it is down"
        ) from error


def _within(function: Callable[[], None], deadline: float, message: str) -> None:
    """Run `function` in a thread of its own and wait for it until `deadline`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="ray.init")
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        raise PlacementError(message)
    if errors:
        raise PlacementError(f"{message} ({type(errors[0]).__name__}: {errors[0]})") from errors[0]


def _raise(
    what: str,
    failed: Mapping[str, BaseException],
    lost: Mapping[str, BaseException],
    silent: Sequence[str],
    timeout_s: float,
) -> None:
    """Raise the error that explains the others best, if there is one."""
    causes = {name: getattr(error, "cause", None) or error for name, error in failed.items()}
    refused = {name: cause for name, cause in causes.items() if isinstance(cause, LongStrawError)}
    if lost:
        said = "; ".join(f"{name}: {_first_line(error)}" for name, error in lost.items())
        raise RankLostError(f"{_listed(lost)} died in {what}, so the update is not closed ({said})")
    if refused:
        # Ranks that were held back by another's refusal say so by a LifecycleError.
        name, refusal = min(refused.items(), key=lambda item: isinstance(item[1], LifecycleError))
        refusal.add_note(f"raised by {name} in {what}")
        raise refusal
    if failed and silent:
        said = "; ".join(f"{name}: {_first_line(cause)}" for name, cause in causes.items())
        raise RankLostError(f"{_listed(silent)} did not answer in {what} after others had failed ({said})")
    if failed:
        name, cause = next(iter(causes.items()))
        other = PlacementError(f"{name} failed in {what}: {type(cause).__name__}: {cause}")
        other.add_note(str(failed[name]))
        raise other
    if silent:
        raise PlacementError(
            f"{_listed(silent)} did not answer in {what} within {timeout_s:g} s; allow more time, or see what they "
            "wait for with `ray stack`"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
