"""Context parallelism over 8 and 32 ranks on one device, which plays one rank of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..evidence.machine import describe_machine, version_of
from ..planner.geometry import GLM52, LORA_RANK, QWEN36_27B, TINY_GLM52, TINY_QWEN36, Geometry
from ..planner.links import Links
from .device import require_cuda
from .estimate import MeasuredCase, depths_of, estimate, scaled
from .result import Progress
from .simulated_rank import Cost, SimulatedRank, Workload
from .simulation_result import PHASES, Point, SimulationResult

NEEDED_BYTES = 64 * 2**30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a preset simulates: geometries, each split over so many ranks, behind prompts of all lengths."""

    preset: str
    contexts: tuple[tuple[Geometry, int], ...]
    lengths: tuple[int, ...]
    workload: Workload
    links: Links = field(default_factory=Links)


def simulated_ranks(progress: Progress) -> Iterator[SimulationResult]:
    """The preset for a GPU: Qwen3.6-27B over 8 ranks and GLM-5.2 over 32."""
    yield from simulate(
        Plan(
            preset="simulated-ranks",
            contexts=((QWEN36_27B, 8), (GLM52, 32)),
            lengths=(2_097_152, 4_456_448),
            workload=Workload(
                chunk_tokens=8192,
                page_tokens=4096,
                response_tokens=2048,
                max_runs=3,
                enough_seconds=3.0,
                device=require_cuda("simulated-ranks", NEEDED_BYTES, "cpu-simulated-ranks"),
            ),
        ),
        progress,
    )


def cpu_simulated_ranks(progress: Progress) -> Iterator[SimulationResult]:
    """The preset for a CPU: tiny models over 2 and 8 ranks."""
    yield from simulate(
        Plan(
            preset="cpu-simulated-ranks",
            contexts=((TINY_QWEN36, 8), (TINY_GLM52, 2)),
            lengths=(4096, 8192),
            workload=Workload(
                chunk_tokens=256,
                page_tokens=256,
                response_tokens=32,
                max_runs=2,
                enough_seconds=1.0,
                device=torch.device("cpu"),
            ),
        ),
        progress,
    )


def simulate(plan: Plan, progress: Progress) -> Iterator[SimulationResult]:
    """Run `plan`; yields what is known after every depth."""
    result = SimulationResult(preset=plan.preset, settings=settings_of(plan), machine=describe_machine())
    for geometry, size in plan.contexts:
        for n_units in (0, 1):
            for points in measure(geometry, size, n_units, plan):
                result = replace(result, points=(*result.points, *points))
                depth = f"{points[0].depth:,} tokens"
                progress(f"{geometry.name} CP{size}, {geometry.n_layers(n_units)} layers, behind {depth}")
                yield result
        measured = measured_case(result.points, geometry, size)
        whole = geometry.whole(size)
        estimates = (estimate(measured, whole, n, plan.workload, plan.links) for n in plan.lengths)
        result = replace(result, estimates=(*result.estimates, *estimates))
        yield result
    yield replace(result, complete=True)


def measure(geometry: Geometry, size: int, n_units: int, plan: Plan) -> Iterator[list[Point]]:
    """By depth, what one rank spends there. Where a chunk ends a prompt, replays follow it."""
    with SimulatedRank(geometry, size, n_units, max(plan.lengths), plan.workload) as rank:
        if rank.device.type == "cuda":
            rank.warm_up()  # kernels are loaded when they are first used

        def point(phase: str, depth: int, cost: Cost) -> Point:
            return Point(
                geometry=geometry.name,
                size=size,
                n_layers=geometry.n_layers(n_units),
                adapter_bytes=rank.adapter_bytes,
                phase=phase,
                depth=depth,
                cost=cost,
            )

        for depth in depths_of(plan.lengths, plan.workload.chunk_tokens):
            rank.fill(depth)
            points = [point("capture", depth, rank.capture_chunk()), point("sweep", depth, rank.sweep_chunk())]
            n_tokens = rank.state.n_tokens
            if n_tokens in plan.lengths:
                points.append(point("replay response", n_tokens, rank.replay(accumulate=False)))
                points.append(point("replay full", n_tokens, rank.replay(accumulate=True)))
            if n_tokens == max(plan.lengths):
                points.append(point("finalize", n_tokens, rank.finalize()))
            yield points


def measured_case(points: Sequence[Point], geometry: Geometry, size: int) -> MeasuredCase:
    """Costs of the whole model of `geometry`, from the points of its front and of one unit more."""
    front, longer = (
        [p for p in points if (p.geometry, p.size, p.n_layers) == (geometry.name, size, geometry.n_layers(n_units))]
        for n_units in (0, 1)
    )
    adapter_bytes = front[0].adapter_bytes + geometry.n_units * (longer[0].adapter_bytes - front[0].adapter_bytes)
    curves: dict[str, dict[int, Cost]] = {phase: {} for phase in PHASES}
    for p, more in zip(front, longer, strict=True):
        assert (p.phase, p.depth) == (more.phase, more.depth), "both are measured in one order"
        curves[p.phase][p.depth] = scaled(p.cost, more.cost, geometry.n_units)
    (finalize,) = curves["finalize"].values()
    return MeasuredCase(
        geometry=geometry.name,
        size=size,
        capture=curves["capture"],
        sweep=curves["sweep"],
        replay_response=curves["replay response"],
        replay_full=curves["replay full"],
        finalize=finalize,
        adapter_bytes=adapter_bytes,
    )


def settings_of(plan: Plan) -> dict[str, Any]:
    """Sizes, and in words how the figures came about."""
    links, work = plan.links, plan.workload
    layers = {
        f"{geometry.name} CP{size}": f"{geometry.n_layers(0)} and {geometry.n_layers(1)} of "
        f"{geometry.n_layers(geometry.n_units)} layers measured, {str(geometry.dtype).removeprefix('torch.')}, "
        + ("layers forwarded again in backward" if geometry.checkpointing else "activations kept for backward")
        for geometry, size in plan.contexts
    }
    return {
        **layers,
        "chunk_tokens": work.chunk_tokens,
        "page_tokens": work.page_tokens,
        "response_tokens": work.response_tokens,
        "lora_rank": LORA_RANK,
        "flash-linear-attention": version_of("flash-linear-attention")
        or "not installed: Gated DeltaNet in plain PyTorch",
        "simulated": "the last rank, whose causal part is the longest. What others would send is counted; copies stand "
        "in for it. Resident rows are random, so each query selects rows of its own, where those of a text share some",
        "whole model": "front + n * (front and one unit - front), so that embedding and head count once",
        "whole prompt": "sum over all chunks, on straight lines between the measured depths; bend is how far one of "
        "them lies from the line between its neighbours, at most",
        "seconds": "computing of one rank; communication is not timed. A step is capture + G replays + finalize, in "
        "full scope with the sweep",
        "links": f"received bytes, in equal parts from all ranks, at {links.within_node / 1e9:g} GB/s from the node of "
        f"{links.node_ranks} and at {links.between_nodes / 1e9:g} GB/s from outside, nothing overlapped",
        "experts": "a rank runs its own experts on as many rows as it would get. Their exchange is not run: tokens of "
        "a rank * top_k * hidden * bytes, there and back, (W-1)/W of it, per MoE layer, in backward again. Their LoRA "
        "is not reduced",
        "memory": "without optimizer state; workspace is the peak on top of what a phase finds",
    }
