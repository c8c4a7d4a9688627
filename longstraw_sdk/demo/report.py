"""Pictures and the HTML page of a demo run."""

from __future__ import annotations

import platform
from importlib import metadata, resources
from pathlib import Path

from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from ..evidence.memory import MemoryTrace
from ..report.axes import GRID, INK, OURS, THEIRS, embedded, new_axes, png
from .run import GROUP, N_ANSWERS, TRL_PREFILL_TOKENS, TRL_SPARSE_ROWS, DemoResult
from .task import ANSWERS
from .warmup import STAGES


def write_report(result: DemoResult, output_dir: Path) -> Path:
    """Write reward_curve.png, memory.png, tokens.png and report.html, which holds the pictures; return its path."""
    pictures = {
        "reward_curve": _reward_curve(result),
        "memory": _memory(result),
        "tokens": _tokens(result),
    }
    encoded = {}
    for name, figure in pictures.items():
        picture = png(figure)
        (output_dir / f"{name}.png").write_bytes(picture)
        encoded[name] = embedded(picture)
    template = resources.files(__package__).joinpath("report.html.jinja").read_text()
    page = (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            result=result,
            config=result.config,
            group=GROUP,
            n_answers=len(ANSWERS),
            n_answers_each=N_ANSWERS,
            stages=STAGES,
            trl_sparse_rows=TRL_SPARSE_ROWS,
            trl_prefill_tokens=TRL_PREFILL_TOKENS,
            pictures=encoded,
            versions={
                name: metadata.version(name) for name in ("longstraw-sdk", "torch", "transformers", "trl", "peft")
            },
            machine=f"{platform.machine()}, Python {platform.python_version()}",
            ours_mib=result.memory.peak_bytes / 2**20,
            trl_mib=result.trl_memory.peak_bytes / 2**20,
            curve_gap=_curve_gap(result),
        )
    )
    path = output_dir / "report.html"
    path.write_text(page)
    return path


def _curve_gap(result: DemoResult) -> float | None:
    """Largest difference of the two reward curves over the steps that both ran."""
    pairs = list(zip(result.reward_curve, result.trl_reward_curve, strict=False))
    return max(abs(a - b) for a, b in pairs) if pairs else None


def _reward_curve(result: DemoResult) -> Figure:
    figure, axes = new_axes("Mean reward of the training prompts", "optimizer step", "mean reward")
    steps = range(1, len(result.reward_curve) + 1)
    axes.plot(steps, result.reward_curve, color=OURS, linewidth=2, label="LongStrawGRPOTrainer, full scope")
    if result.trl_reward_curve:
        steps = range(1, len(result.trl_reward_curve) + 1)
        axes.plot(
            steps, result.trl_reward_curve, color=THEIRS, linestyle="none", marker="o", markersize=8, fillstyle="none",
            markeredgewidth=2, label=f"TRL's GRPOTrainer, the first {len(result.trl_reward_curve)} steps",
        )  # fmt: skip
    for value, name in ((result.mean_reward_before, "before"), (result.mean_reward_after, "after")):
        axes.axhline(value, color=INK, linewidth=1, linestyle=":")
        axes.annotate(
            f" held-out\n {name}: {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_ylim(0, 1.08)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    return figure


def _memory(result: DemoResult) -> Figure:
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, trace, name, color in (
        (left, result.memory, "LongStraw", OURS),
        (right, result.trl_memory, "TRL", THEIRS),
    ):
        _memory_panel(axes, trace, name, color)
    left.set_ylabel("live tensor bytes (MiB, log scale)")
    left.set_ylim(1, 4 * max(result.memory.peak_bytes, result.trl_memory.peak_bytes) / 2**20)
    return figure


def _memory_panel(axes: Axes, trace: MemoryTrace, name: str, color: str) -> None:
    seconds = [s.seconds for s in trace.samples]
    mib = [max(s.live_bytes / 2**20, 1.0) for s in trace.samples]
    axes.step(seconds, mib, color=color, linewidth=0.9, where="post")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_title(f"{name}: peak {trace.peak_bytes / 2**20:.0f} MiB", loc="left", fontsize=11, color=INK)
    axes.set_xlabel("seconds (traced, so slower than a real step)")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    for phase, start, end in _phases(trace):
        if end - start > 0.04 * seconds[-1]:
            axes.annotate(
                phase, ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -10),
                textcoords="offset points", ha="center", fontsize=8, color=INK,
            )  # fmt: skip
        axes.axvline(start, color=GRID, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _phases(trace: MemoryTrace) -> list[tuple[str, float, float]]:
    """Runs of samples with one phase: (phase, first second, last second)."""
    runs: list[tuple[str, float, float]] = []
    for sample in trace.samples:
        if runs and runs[-1][0] == sample.phase:
            runs[-1] = (sample.phase, runs[-1][1], sample.seconds)
        else:
            runs.append((sample.phase, sample.seconds, sample.seconds))
    return [run for run in runs if run[0] != "start"]


def _tokens(result: DemoResult) -> Figure:
    figure, axes = new_axes("Prompt tokens forwarded in training", "million tokens", "")
    names = ["shared (LongStraw)", "not shared (TRL)"]
    values = [result.prompt_tokens_forwarded / 1e6, result.prompt_tokens_without_sharing / 1e6]
    bars = axes.barh(names[::-1], values[::-1], color=[THEIRS, OURS], height=0.55)
    axes.bar_label(bars, fmt=" %.2f", fontsize=9, color=INK)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    return figure
