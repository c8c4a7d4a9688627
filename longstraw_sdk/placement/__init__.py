"""Runs on a Ray cluster: the plan, the check of the cluster, the driver and what it owns. Holds no mathematics.

The names are loaded on first use; importing this package imports neither Ray nor the session.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .cluster import ClusterFacts, validate_cluster
    from .driver import DirectRayDriver, RunResult, Timeouts
    from .plan import DirectRayPlan, build_direct_ray_plan
    from .program import PromptGroup, RankProgram
    from .runtime import RayRuntime

__all__ = [
    "build_direct_ray_plan",
    "DirectRayPlan",
    "validate_cluster",
    "ClusterFacts",
    "RayRuntime",
    "RankProgram",
    "PromptGroup",
    "DirectRayDriver",
    "Timeouts",
    "RunResult",
]

_MODULE_OF = {
    "build_direct_ray_plan": "plan",
    "DirectRayPlan": "plan",
    "validate_cluster": "cluster",
    "ClusterFacts": "cluster",
    "RayRuntime": "runtime",
    "RankProgram": "program",
    "PromptGroup": "program",
    "DirectRayDriver": "driver",
    "Timeouts": "driver",
    "RunResult": "driver",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
