"""From the measured costs of a few layers and chunks to those of a whole model and prompt. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from ..planner.geometry import WholeModel
from ..planner.links import Links
from ..state import StateBytes
from .simulated_rank import Cost, Workload

Curve = Mapping[int, Cost]
"""Cost of one forward by the prefix tokens before it."""


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """One phase on one rank: computing takes `seconds`, communication, which was not timed, `link_seconds` more.

    `received_bytes` were counted, `expert_bytes` come from the formula of the exchange between expert ranks.
    """

    seconds: float
    received_bytes: float
    expert_bytes: float
    link_seconds: float
    workspace_bytes: float


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank. Response scope keeps one boundary of recurrent layers, full scope keeps all."""

    weights: int
    adapter: int
    resident_response: int
    resident_full: int
    accumulators: int
    peak_response: float
    peak_full: float


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Seconds of computing, and of communication beside it."""

    seconds: float
    link_seconds: float


@dataclass(frozen=True, kw_only=True)
class CaseEstimate:
    """A training step of one geometry, context size and prompt, on one rank.

    `bend_capture` and `bend_sweep` are the largest relative distances of a measured point from the straight line
    between its neighbours: what interpolation may be wrong by.
    """

    geometry: str
    size: int
    positions: int
    phases: dict[str, PhaseEstimate]
    memory: MemoryEstimate
    bend_capture: float
    bend_sweep: float

    def step(self, n_responses: int, scope: str) -> StepEstimate:
        """A step with a group of `n_responses`; `scope` is "response" or "full"."""
        times = {"capture": 1, f"replay {scope}": n_responses, "sweep": int(scope == "full"), "finalize": 1}
        return StepEstimate(
            seconds=sum(n * self.phases[name].seconds for name, n in times.items()),
            link_seconds=sum(n * self.phases[name].link_seconds for name, n in times.items()),
        )


def scaled(front: Cost, longer: Cost, n_units: int) -> Cost:
    """Of the front and `n_units` units, from the front alone and the front with one unit behind it."""
    return Cost(**{f.name: _extended(getattr(front, f.name), getattr(longer, f.name), n_units) for f in fields(Cost)})


def summed(curve: Curve, n_tokens: int, chunk_tokens: int) -> Cost:
    """Of all chunks of `n_tokens`, on straight lines between the measured depths; the peak is the largest one's."""
    chunks = [asdict(_at(curve, depth)) for depth in range(0, n_tokens, chunk_tokens)]
    return Cost(
        seconds=sum(chunk["seconds"] for chunk in chunks),
        received_bytes=sum(chunk["received_bytes"] for chunk in chunks),
        workspace_bytes=max(chunk["workspace_bytes"] for chunk in chunks),
    )


def bend(curve: Curve, n_tokens: int) -> float:
    """Largest |seconds - line| / seconds of the measured depths between the first and the last below `n_tokens`."""
    depths = [depth for depth in sorted(curve) if depth < n_tokens]
    found = [0.0]
    for before, depth, after in zip(depths, depths[1:], depths[2:], strict=False):
        line = _at({before: curve[before], after: curve[after]}, depth).seconds
        found.append(abs((curve[depth].seconds - line) / curve[depth].seconds))
    return max(found)


def depths_of(lengths: Sequence[int], chunk_tokens: int) -> list[int]:
    """Depths to measure at: 0, where the last chunk of each length begins, and halfway between."""
    ends = [0, *(length - chunk_tokens for length in sorted(lengths))]
    halves = [(low + high) // 2 // chunk_tokens * chunk_tokens for low, high in pairwise(ends)]
    return sorted({*ends, *halves})


@dataclass(frozen=True, kw_only=True)
class MeasuredCase:
    """What one rank of `size` spends with the whole model: curves over depth, and replays by the prompt before them."""

    geometry: str
    size: int
    capture: Curve
    sweep: Curve
    replay_response: Curve
    replay_full: Curve
    finalize: Cost
    adapter_bytes: int


def estimate(
    measured: MeasuredCase, whole: WholeModel, positions: int, workload: Workload, links: Links
) -> CaseEstimate:
    """A step behind a prompt of `positions`, one of the lengths that were measured."""
    size = measured.size
    routed = 2 * whole.routed_bytes_per_token / size * (size - 1) / size  # per token of all ranks, there and back

    def phase(cost: Cost, n_tokens: int, n_passes: int) -> PhaseEstimate:
        expert_bytes = n_passes * n_tokens * routed
        return PhaseEstimate(
            seconds=cost.seconds,
            received_bytes=cost.received_bytes,
            expert_bytes=expert_bytes,
            link_seconds=links.seconds(cost.received_bytes + expert_bytes, size),
            workspace_bytes=cost.workspace_bytes,
        )

    backward = 2 if whole.checkpointing else 1  # what a pass sent goes the other way round
    phases = {
        "capture": phase(summed(measured.capture, positions, workload.chunk_tokens), positions, 1),
        "replay response": phase(measured.replay_response[positions], workload.response_tokens, 1 + backward),
        "replay full": phase(measured.replay_full[positions], workload.response_tokens, 1 + backward),
        "sweep": phase(summed(measured.sweep, positions, workload.chunk_tokens), positions, 1 + backward),
        "finalize": phase(measured.finalize, 0, 0),
    }
    return CaseEstimate(
        geometry=measured.geometry,
        size=size,
        positions=positions,
        phases=phases,
        memory=memory(
            whole,
            phases,
            measured.adapter_bytes,
            positions // size,
            positions // workload.chunk_tokens,
            workload.page_tokens,
        ),
        bend_capture=bend(measured.capture, positions),
        bend_sweep=bend(measured.sweep, positions),
    )


def memory(
    whole: WholeModel,
    phases: Mapping[str, PhaseEstimate],
    adapter_bytes: int,
    n_rows: int,
    n_boundaries: int,
    page_tokens: int,
) -> MemoryEstimate:
    """Bytes of one rank that keeps `n_rows` of the prompt and every boundary of recurrent layers."""
    held = StateBytes.of(whole.specs, n_rows, page_tokens)
    fixed = whole.weights_bytes + adapter_bytes
    workspace = {name: phase.workspace_bytes for name, phase in phases.items()}
    response, full = held.resident(1), held.resident(n_boundaries)
    return MemoryEstimate(
        weights=whole.weights_bytes,
        adapter=adapter_bytes,
        resident_response=response,
        resident_full=full,
        accumulators=held.accumulators,
        peak_response=fixed + response + max(workspace["capture"], workspace["replay response"], workspace["finalize"]),
        peak_full=fixed
        + full
        + max(
            workspace["capture"],
            workspace["finalize"],
            held.accumulators + max(workspace["replay full"], workspace["sweep"]),
        ),
    )


def _extended(front: float, longer: float, n_units: int) -> float:
    return front + n_units * (longer - front)


def _at(curve: Curve, depth: int) -> Cost:
    """On the straight line between the measured depths around `depth`."""
    depths = sorted(curve)
    high = next(d for d in depths if d >= depth)
    low = max(d for d in depths if d <= depth)
    part = (depth - low) / (high - low) if high > low else 0.0
    values = {f.name: (getattr(curve[low], f.name), getattr(curve[high], f.name)) for f in fields(Cost)}
    return Cost(**{name: below + part * (above - below) for name, (below, above) in values.items()})
