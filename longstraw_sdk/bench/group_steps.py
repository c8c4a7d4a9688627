"""One optimizer step on a GRPO group by every system, on one model in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import get_args

import torch

from ..backends.ranks import n_processes
from ..errors import ConfigurationError
from ..evidence.machine import describe_machine
from ..evidence.parity import randomize_lora
from ..lora import base_model_of
from ..planner.geometry import CHECKPOINTING, LORA_RANK, QWEN36_27B, TINY_QWEN3, TINY_QWEN36, Geometry
from ..planner.work import ModelWork
from ..types import CausalLM, GradientScope
from .context_bytes import replay_bytes
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
    slowest_rank,
    transformers_step,
)


@dataclass(frozen=True)
class Run:
    """How a system takes a step. Peers differentiate the whole text and have no packs."""

    scope: GradientScope = "full"
    replay_tokens: int | None = None
    checkpointing: bool = True
    """Whether backward forwards each layer again, or the activations of a whole pack stay."""
    ranks: int = 1
    """Ranks of a context that take the step together; with 1 each process takes it by itself."""
    chunk_tokens: int | None = None
    """In place of the plan's."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a preset measures.

    Args:
        models: the geometries, each with the names of the systems that run on it.
        groups: measured in this order; peers are measured on the first.
        runs: our own measurements of each group.
        warm_up: a group before each measurement, which compiles and plans kernels; peers take one response of it.
        ceiling_tokens: size of the products and of the attention that the roofline is measured with.
        n_processes: how many of them a launcher has to start.
    """

    preset: str
    models: tuple[tuple[Geometry, tuple[str, ...]], ...]
    groups: tuple[Group, ...]
    runs: tuple[Run, ...]
    options: Options
    warm_up: Group
    ceiling_tokens: int
    device: torch.device
    n_processes: int = 1


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


def h200_27b_cp2(progress: Progress) -> Iterator[StepResult]:
    """Qwen3.6-27B behind 131,072 tokens on two H200: each by itself, and as the ranks of one context."""
    groups = (Group(prompt_tokens=131_072, size=8, response_tokens=1024),)
    together = Run("response", 4096, ranks=2)
    runs = (
        Run("response", 4096),
        replace(together, chunk_tokens=16_384),  # as many tokens per rank and forward as one GPU has
        together,
        Run("full", 4096),
        replace(together, scope="full"),
    )
    yield from _on_h200("h200-27b-cp2", groups, runs, 32_768, progress, n_processes=2)


def cpu_cp2(progress: Progress) -> Iterator[StepResult]:
    """The same of a small model and two processes on a CPU, which share its cores."""
    yield from run_steps(
        StepPlan(
            preset="cpu-cp2",
            models=((TINY_QWEN36, ()),),
            groups=(Group(prompt_tokens=1024, size=4, response_tokens=32),),
            runs=tuple(Run(scope, 128, ranks=n) for scope in get_args(GradientScope) for n in (1, 2)),
            options=Options(chunk_tokens=256, page_tokens=128),
            warm_up=Group(prompt_tokens=64, size=2, response_tokens=8),
            ceiling_tokens=512,
            device=torch.device("cpu"),
            n_processes=2,
        ),
        progress,
    )


def _on_h200(
    preset: str,
    groups: tuple[Group, ...],
    runs: tuple[Run, ...],
    warm_up_tokens: int,
    progress: Progress,
    sampled_tokens: int = 0,
    n_processes: int = 1,
) -> Iterator[StepResult]:
    yield from run_steps(
        StepPlan(
            preset=preset,
            models=((QWEN36_27B, ("transformers",) if n_processes == 1 else ()),),
            groups=groups,
            runs=runs,
            options=Options(chunk_tokens=8192, page_tokens=4096, sampled_tokens=sampled_tokens),
            warm_up=Group(prompt_tokens=warm_up_tokens, size=4, response_tokens=1024),
            ceiling_tokens=16_384,
            device=require_cuda(preset, NEEDED_BYTES, "cpu-small" if n_processes == 1 else "cpu-cp2"),
            n_processes=n_processes,
        ),
        progress,
    )


def run_steps(plan: StepPlan, progress: Progress) -> Iterator[StepResult]:
    """Yields the result after every measurement.

    Raises `ConfigurationError` unless as many processes run as the plan asks for.
    """
    _check_processes(plan)
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
                ("longstraw", run, longstraw_step(run.scope, run.replay_tokens, _options(plan, run)))
                for run in plan.runs
            ]
            if i == 0:
                steps += [(name, Run(), PEERS[name]) for name in peers]
            for system, run, step in steps:
                if system == "prefix-grouper" and find_spec("prefix_grouper") is None:
                    progress('prefix-grouper is not installed: pip install "longstraw-sdk[bench]"')
                    continue
                warm_up = plan.warm_up if system == "longstraw" else replace(plan.warm_up, size=1)
                with _checkpointing(model, run.checkpointing):
                    found = slowest_rank(measure(model, step, warm_up, group))
                least = work.step(group.prompt_tokens, group.response_tokens, group.size, run.scope).seconds(ceilings)
                capture = work.capture(group.prompt_tokens).seconds(ceilings)
                row = _row(geometry, system, run, group, found, least / run.ranks, capture / run.ranks)
                if system == "longstraw":
                    row = replace(row, chunk_tokens=_options(plan, run).chunk_tokens)
                if run.ranks > 1:
                    row = replace(
                        row, received_bytes=found.received_bytes, replay_bytes=_replay_bytes(model, run, group)
                    )
                rows.append(row)
                progress(rows[-1].summary)
                yield StepResult(preset=plan.preset, settings=settings, machine=describe_machine(), steps=tuple(rows))
        del model


def _check_processes(plan: StepPlan) -> None:
    if n_processes() != plan.n_processes:
        one = plan.n_processes == 1
        raise ConfigurationError(
            f"{plan.preset} runs on {plan.n_processes} process{'' if one else 'es'}, and {n_processes()} run; "
            + ("start it without a launcher" if one else _LAUNCH.format(plan.n_processes, plan.preset))
        )


_LAUNCH = "start it with torchrun --nproc-per-node {} -m longstraw_sdk.cli bench --preset {}"


def _options(plan: StepPlan, run: Run) -> Options:
    return replace(plan.options, ranks=run.ranks, chunk_tokens=run.chunk_tokens or plan.options.chunk_tokens)


def _replay_bytes(model: CausalLM, run: Run, group: Group) -> int:
    """What `context_bytes` says of all packs; cuDNN's operator runs on CUDA."""
    n_packed = max(1, (run.replay_tokens or 0) // group.response_tokens)
    sizes = [min(n_packed, group.size - start) for start in range(0, group.size, n_packed)]
    on_cuda = base_model_of(model).get_input_embeddings().weight.is_cuda
    return sum(
        replay_bytes(
            model,
            run.ranks,
            group.response_tokens,
            n,
            checkpointing=base_model_of(model).is_activation_checkpointing and run.checkpointing,
            output_travels=on_cuda and run.scope == "full",
        )
        for n in sizes
    )


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
        ranks=run.ranks,
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
