"""The Ray cluster that a placement plan names."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ConfigurationError, InputError, PlacementError
from .check import Check
from .subject import Subject

CONNECT_SECONDS = 30.0


def examine(subject: Subject) -> Iterator[Check]:
    """Nothing without a plan; else the plan, whether the cluster answers, and each of the plan's nodes."""
    if subject.placement_plan is None:
        return
    from ..placement import DirectRayPlan, RayRuntime
    from ..placement.cluster import ClusterFacts, faults_by_node, require_image

    path = subject.placement_plan
    try:
        plan = DirectRayPlan.from_json(path.read_text())
        require_image(plan)
    except (OSError, ValueError, InputError, ConfigurationError) as error:
        remedy = "write the plan with build_direct_ray_plan(..., runtime_image='repository@sha256:...').to_json()"
        yield Check("placement plan", False, f"{path}: {error}", remedy)
        return
    where = f"{plan.world_size} ranks on {len(plan.node_ips)} nodes of {plan.gpus_per_node} GPUs"
    yield Check("placement plan", True, f"run {plan.run_id}: {where}")
    try:
        with RayRuntime.connect(subject.ray_address, CONNECT_SECONDS) as runtime:
            facts = ClusterFacts.of(runtime.nodes())
    except (PlacementError, ConfigurationError) as error:
        yield Check("ray cluster", False, str(error), "start the cluster, or name its head (--ray-address ip:port)")
        return
    live = sorted(node.node_ip for node in facts.nodes if node.alive)
    yield Check("ray cluster", True, f"{subject.ray_address} answers; live nodes: {', '.join(live)}")
    for ip, wrong in faults_by_node(plan, facts).items():
        if wrong:
            yield Check(f"ray node {ip}", False, "; ".join(wrong), "mend it as said, then repeat")
        else:
            yield Check(f"ray node {ip}", True, "has the GPUs, CPUs and image of the plan")
