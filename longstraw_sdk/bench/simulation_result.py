"""What a simulation of single ranks found, as a table beside the paper's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..planner.paper import PAPER, PAPER_SETTING
from .estimate import CaseEstimate
from .result import BenchResult
from .simulated_rank import Cost

SCOPES = ("response", "full")
GROUPS = (2, 8)
PHASES = {
    "capture": "capture",
    "replay response": "replay, response scope",
    "replay full": "replay, full scope",
    "sweep": "sweep",
    "finalize": "finalize",
}
"""Keys of `CaseEstimate.phases` and what the table calls them."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: `phase` on one rank of `size` behind `depth` prefix tokens, with `n_layers` layers.

    `adapter_bytes` are of their LoRA and its gradients.
    """

    geometry: str
    size: int
    n_layers: int
    adapter_bytes: int
    phase: str
    depth: int
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class SimulationResult(BenchResult):
    """Every measurement, and what they say about whole models; `complete` says that none is missing."""

    points: tuple[Point, ...] = ()
    estimates: tuple[CaseEstimate, ...] = ()
    complete: bool = False

    @property
    def note(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.settings.items())

    def table(self) -> Table:
        title = f"{self.preset} on {self.machine['device']}"
        table = Table("one rank (seconds are of computing)", title=title, caption=PAPER_SETTING, caption_justify="left")
        table.add_column("simulated", justify="right")
        table.add_column("paper", justify="right")
        for case in self.estimates:
            table.add_section()
            table.add_row(f"[bold]{case.geometry} CP{case.size}, {case.positions:,} positions[/]")
            published = PAPER.get((case.geometry, case.size, case.positions), {})
            for key, label, value in table_rows(case):
                table.add_row(label, value, published.get(key, ""))
        return table

    def plot(self, output_dir: Path) -> Path:
        from .plots import plot_simulation

        return plot_simulation(self, output_dir)

    def measured(self) -> Iterator[dict[str, Any]]:
        """Estimated steps, each with all that it is made of, and then the measurements behind them."""
        for case in self.estimates:
            for scope in SCOPES:
                for n in GROUPS:
                    yield self._step_row(case, scope, n)
        for point in self.points:
            phase = point.phase.split()[0]
            yield {
                "system": f"longstraw, one rank of {point.size}",
                "prompt_tokens": point.depth,
                f"{phase}_seconds": point.cost.seconds,
                "measurement": asdict(point),
            }

    def _step_row(self, case: CaseEstimate, scope: str, group: int) -> dict[str, Any]:
        peak = case.memory.peak_response if scope == "response" else case.memory.peak_full
        step = case.step(group, scope)
        return {
            "system": f"longstraw, one rank of {case.size}, simulated",
            "model": case.geometry,
            "gradient_scope": scope,
            "prompt_tokens": case.positions,
            "group": group,
            "capture_seconds": case.phases["capture"].seconds,
            "replay_seconds": group * case.phases[f"replay {scope}"].seconds,
            "sweep_seconds": case.phases["sweep"].seconds if scope == "full" else None,
            "step_seconds": step.seconds,
            "peak_gib": peak / 2**30,
            "step": asdict(step),
            "estimate": asdict(case),
            "paper": PAPER.get((case.geometry, case.size, case.positions), {}),
            "settings": self.settings,
            "complete": self.complete,
        }


def table_rows(case: CaseEstimate) -> Iterator[tuple[str, str, str]]:
    """(key in the paper's figures, label, value) of every row of the table."""
    for name, label in PHASES.items():
        yield name, label, f"{case.phases[name].seconds:,.2f} s"
    for scope in SCOPES:
        for n in GROUPS:
            step = case.step(n, scope)
            value = f"{step.seconds:,.1f} s, links {step.link_seconds:,.1f} s"
            yield f"step {scope} {n}", f"step, {scope} scope, G={n}", value
    yield "bend", "bend of capture, of sweep", f"{case.bend_capture:.1%}, {case.bend_sweep:.1%}"
    for name, label in PHASES.items():
        phase = case.phases[name]
        experts = f" + {_size(phase.expert_bytes)} of experts" if phase.expert_bytes else ""
        yield f"received {name}", f"{label}: received", _size(phase.received_bytes) + experts
        yield f"links {name}", f"{label}: links", f"{phase.link_seconds:,.2f} s"
    for name, label in PHASES.items():
        yield f"workspace {name}", f"{label}: workspace", _size(case.phases[name].workspace_bytes)
    held = case.memory
    yield "weights", "weights", _size(held.weights)
    yield "adapter", "LoRA and its gradients", _size(held.adapter)
    yield "resident response", "resident state, response scope", _size(held.resident_response)
    yield "resident full", "resident state, full scope", _size(held.resident_full)
    yield "accumulators", "accumulators, full scope", _size(held.accumulators)
    yield "peak response", "peak, response scope", _size(held.peak_response)
    yield "peak full", "peak, full scope", _size(held.peak_full)


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.3f} GB" if abs(n_bytes) >= 1e8 else f"{n_bytes / 1e6:,.3f} MB"
