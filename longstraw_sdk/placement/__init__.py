"""Runs on a Ray cluster: the plan, the check of the cluster, the driver and what it owns. Holds no mathematics.

The names are loaded on first use; importing this package imports neither Ray nor the session.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
