"""One optimizer step on a GRPO group by every system, on one model in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

import torch

from ..evidence.machine import describe_machine
from ..evidence.parity import randomize_lora
from ..lora import base_model_of
from ..planner.geometry import CHECKPOINTING, LORA_RANK, QWEN36_27B, TINY_QWEN3, TINY_QWEN36, Geometry
from ..planner.work import ModelWork
from ..types import CausalLM, GradientScope
from .device import GIB, require_cuda
from .result import Progress
from .roofline import measure_ceilings
from .step_result import StepResult, StepRow
from .systems import (
    Group,
    Measured,
    Options,
    Step,
    longstraw_step,
    measure,
    prefix_grouper_step,
    transformers_step,
)


@dataclass(frozen=True)
class Run:
    """How a system takes a step. Peers differentiate the whole text and have no packs."""

    scope: GradientScope = "full"
    replay_tokens: int | None = None
    checkpointing: bool = True
    """Whether backward forwards each layer again, or the activations of a whole pack stay."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a preset measures.

    Args:
        models: the geometries, each with the names of the systems that run on it.
        groups: measured in this order; peers are measured on the first.
        runs: our own measurements of each group.
        warm_up: a group before each measurement, which compiles and plans kernels; peers take one response of it.
        ceiling_tokens: size of the products and of the attention that the roofline is measured with.
    """

    preset: str
    models: tuple[tuple[Geometry, tuple[str, ...]], ...]
    groups: tuple[Group, ...]
    runs: tuple[Run, ...]
    options: Options
    warm_up: Group
    ceiling_tokens: int
    device: torch.device


PEERS: dict[str, Step] = {"transformers": transformers_step, "prefix-grouper": prefix_grouper_step}
NEEDED_BYTES = 130 * GIB


def cpu_small(progress: Progress) -> Iterator[StepResult]:
    """A small hybrid and a small dense model on a CPU."""
    yield from run_steps(
        StepPlan(
            preset="cpu-small",
            models=((TINY_QWEN36, ("transformers",)), (TINY_QWEN3, ("transformers", "prefix-grouper"))),
            groups=(Group(prompt_tokens=1024, size=4, response_tokens=32),),
            runs=(Run("response", 128), Run("response", 128, checkpointing=False), Run("full", 128)),
            options=Options(chunk_tokens=256, page_tokens=256),
            warm_up=Group(prompt_tokens=64, size=2, response_tokens=8),
            ceiling_tokens=512,
            device=torch.device("cpu"),
        ),
        progress,
    )


def h200_27b_32k(progress: Progress) -> Iterator[StepResult]:
    """Qwen3.6-27B behind 32,768 tokens, G=8 and G=2, beside conventional transformers."""
    groups = tuple(Group(prompt_tokens=32_768, size=n, response_tokens=1024) for n in (8, 2))
    # One response at a time makes groups of 2 and of 8 differ in nothing but their number: gradients are there from the
    # second pack on.
    runs = (Run("response", 4096), Run("response", 1024), Run("full", 4096))
    yield from _on_h200("h200-27b-32k", groups, runs, 32_768, progress)


def h200_27b_128k(progress: Progress) -> Iterator[StepResult]:
    """The same behind 131,072 tokens."""
    groups = (Group(prompt_tokens=131_072, size=8, response_tokens=1024),)
    runs = (Run("response", 4096), Run("response", 4096, checkpointing=False))
    yield from _on_h200("h200-27b-128k", groups, runs, 131_072, progress)


def h200_27b_1m(progress: Progress) -> Iterator[StepResult]:
    """The same behind 1,048,576 tokens in response scope, 32 tokens of each response sampled from the state."""
    groups = (Group(prompt_tokens=1_048_576, size=8, response_tokens=1024),)
    # 262,144 tokens meet every size that a call of the attention kernel has behind more.
    yield from _on_h200("h200-27b-1m", groups, (Run("response", 4096),), 262_144, progress, sampled_tokens=32)


def _on_h200(
    preset: str,
    groups: tuple[Group, ...],
    runs: tuple[Run, ...],
    warm_up_tokens: int,
    progress: Progress,
    sampled_tokens: int = 0,
) -> Iterator[StepResult]:
    yield from run_steps(
        StepPlan(
            preset=preset,
            models=((QWEN36_27B, ("transformers",)),),
            groups=groups,
            runs=runs,
            options=Options(chunk_tokens=8192, page_tokens=4096, sampled_tokens=sampled_tokens),
            warm_up=Group(prompt_tokens=warm_up_tokens, size=4, response_tokens=1024),
            ceiling_tokens=16_384,
            device=require_cuda(preset, NEEDED_BYTES, "cpu-small"),
        ),
        progress,
    )


def run_steps(plan: StepPlan, progress: Progress) -> Iterator[StepResult]:
    """Yields the result after every measurement."""
    rows: list[StepRow] = []
    settings: dict[str, object] = {
        "options": asdict(plan.options),
        "warm_up": asdict(plan.warm_up),
        "lora_rank": LORA_RANK,
        "tokens": "random",
        "peak_gib": "weights, LoRA, gradients and everything else that the step allocates; no optimizer state",
        "roofline_share": "least work of the step at the measured ceilings, divided by its time without sampling",
    }
    for geometry, peers in plan.models:
        model = geometry.build(geometry.n_units, 1, plan.device)
        randomize_lora(model)
        model.train()
        config = base_model_of(model).config
        ceilings = measure_ceilings(config, geometry.dtype, plan.device, plan.ceiling_tokens)
        work = ModelWork.of(model)
        settings[geometry.name] = {"dtype": str(geometry.dtype), "ceilings": asdict(ceilings)} | asdict(work)
        for i, group in enumerate(plan.groups):
            steps: list[tuple[str, Run, Step]] = [
                ("longstraw", run, longstraw_step(run.scope, run.replay_tokens, plan.options)) for run in plan.runs
            ]
            if i == 0:
                steps += [(name, Run(), PEERS[name]) for name in peers]
            for system, run, step in steps:
                if system == "prefix-grouper" and find_spec("prefix_grouper") is None:
                    progress('prefix-grouper is not installed: pip install "longstraw-sdk[bench]"')
                    continue
                warm_up = plan.warm_up if system == "longstraw" else replace(plan.warm_up, size=1)
                with _checkpointing(model, run.checkpointing):
                    found = measure(model, step, warm_up, group)
                least = work.step(group.prompt_tokens, group.response_tokens, group.size, run.scope).seconds(ceilings)
                capture = work.capture(group.prompt_tokens).seconds(ceilings)
                rows.append(_row(geometry, system, run, group, found, least, capture))
                progress(rows[-1].summary)
                yield StepResult(preset=plan.preset, settings=settings, machine=describe_machine(), steps=tuple(rows))
        del model


@contextmanager
def _checkpointing(model: CausalLM, wanted: bool) -> Iterator[None]:
    base = base_model_of(model)
    was = base.is_activation_checkpointing
    if was and not wanted:
        base.activation_checkpointing_disable()
    try:
        yield
    finally:
        if was and not wanted:
            base.activation_checkpointing_enable(CHECKPOINTING)


def _row(
    geometry: Geometry,
    system: str,
    run: Run,
    group: Group,
    found: Measured,
    least_seconds: float,
    least_capture_seconds: float,
) -> StepRow:
    seconds = found.seconds
    step = sum(seconds.values()) if found.peak_bytes is not None else None
    return StepRow(
        model=geometry.name,
        system=system,
        gradient_scope=run.scope,
        prompt_tokens=group.prompt_tokens,
        group=group.size,
        response_tokens=group.response_tokens,
        replay_tokens=run.replay_tokens,
        checkpointing=geometry.checkpointing and run.checkpointing,
        capture_seconds=seconds.get("capture"),
        sample_seconds=seconds.get("sample"),
        replay_seconds=seconds.get("replay"),
        sweep_seconds=seconds.get("sweep"),
        finalize_seconds=seconds.get("finalize"),
        step_seconds=step,
        peak_gib=None if found.peak_bytes is None else found.peak_bytes / GIB,
        weights_gib=found.weights_bytes / GIB,
        state_gib=None if found.state_bytes is None else found.state_bytes / GIB,
        roofline_share=None if step is None else least_seconds / (step - seconds.get("sample", 0.0)),
        capture_roofline_share=least_capture_seconds / seconds["capture"] if "capture" in seconds else None,
    )
