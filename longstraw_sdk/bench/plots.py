"""Pictures of benchmark results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .layer_result import LayerResult
from .result import BenchResult, PeakResult
from .simulation_result import SimulationResult
from .step_result import PHASES, StepResult

_COLORS = {"longstraw": "#1b6ca8"}
_OTHER = "#d1603d"
_STEP_COLORS = ("#1b6ca8", "#b8a13a", "#6aa5d1", "#7a8b99", "#333333")


def plot_peaks(result: PeakResult, output_dir: Path) -> Path:
    """Write `<preset>.png`: peak bytes over prompt tokens, both axes logarithmic, one line per system."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for system in dict.fromkeys(m.system for m in result.measurements):
        rows = [m for m in result.measurements if m.system == system]
        axes.plot(
            [m.prompt_tokens for m in rows],
            [m.peak_bytes / 2**20 for m in rows],
            marker="o",
            linewidth=2,
            color=_COLORS.get(system, _OTHER),
        )
        last = rows[-1]
        axes.annotate(
            f"{system}: {last.peak_bytes / 2**20:.1f} MiB",
            (last.prompt_tokens, last.peak_bytes / 2**20),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}K"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda mib, _: f"{mib:g}"))
    axes.margins(x=0.08, y=0.12)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("peak of a forward (MiB, log scale)")
    axes.set_title(f"{result.preset}: memory on top of weights and resident state", loc="left", fontsize=11)
    _quiet(axes)
    return _written(figure, result, output_dir)


def plot_simulation(result: SimulationResult, output_dir: Path) -> Path:
    """Write `<preset>.png`: seconds of a step with two responses, and memory of full scope, per simulated rank."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    steps, held = figure.subplots(1, 2, sharey=True)
    names = [f"{case.geometry} CP{case.size}\n{case.positions:,}" for case in result.estimates]
    for axes, parts in ((steps, _step_parts(result)), (held, _memory_parts(result))):
        left = [0.0] * len(names)
        for label, color, widths in parts:
            axes.barh(names, widths, left=left, label=label, color=color)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
        _quiet(axes)
    steps.invert_yaxis()
    steps.set_xlabel("seconds of a step with G=2, full scope")
    held.set_xlabel("GB, full scope")
    held.xaxis.set_major_locator(MaxNLocator(5))
    figure.suptitle(f"{result.preset}: one rank", x=0.01, ha="left", fontsize=11)
    return _written(figure, result, output_dir)


def plot_steps(result: StepResult, output_dir: Path) -> Path:
    """Write `<preset>.png`: seconds of a step by phase, and its peak; one bar per row."""
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(result.steps)), layout="constrained")
    seconds, peak = figure.subplots(1, 2, sharey=True)
    names = [f"{row.heading}\n{row.run}" for row in result.steps]
    peaks = [row.peak_gib or 0.0 for row in result.steps]
    left = [0.0] * len(names)
    for phase, color in zip(PHASES, _STEP_COLORS, strict=True):
        widths = [getattr(row, f"{phase}_seconds") or 0.0 for row in result.steps]
        if any(widths):
            label = "replay, or forward and backward" if phase == "replay" else phase
            seconds.barh(names, widths, left=left, label=label, color=color)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    peak.barh(names, peaks, color="#7a8b99")
    for axes, found in ((seconds, left), (peak, peaks)):
        for i, (row, value) in enumerate(zip(result.steps, found, strict=True)):
            axes.annotate(
                "out of memory" if row.step_seconds is None else f"{value:.3g}",
                (value, i),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.margins(x=0.15)
        _quiet(axes)
    seconds.invert_yaxis()
    seconds.set_xlabel("seconds of a step")
    peak.set_xlabel("peak, GiB")
    seconds.legend(fontsize=8, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    figure.suptitle(f"{result.preset} on {result.machine['device']}", x=0.01, ha="left", fontsize=11)
    return _written(figure, result, output_dir)


def plot_layers(result: LayerResult, output_dir: Path) -> Path:
    """Write `<preset>.png`: seconds of a layer by kind, system and prompt, with their share of the roofline."""
    rows = result.layers
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.system}, {row.prompt_tokens:,}: {row.layer_kind}" for row in rows]
    colors = [_COLORS.get(row.system, _OTHER) for row in rows]
    axes.barh(names, [row.layer_seconds or 0.0 for row in rows], color=colors)
    for i, row in enumerate(rows):
        known = row.layer_seconds is not None and row.roofline_share is not None
        text = f"{row.layer_seconds:.3g} ({row.roofline_share:.0%})" if known else "out of memory"
        axes.annotate(
            text, (row.layer_seconds or 0.0, i), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a layer (share of the roofline)")
    axes.set_title(f"{result.preset} on {result.machine['device']}", loc="left", fontsize=11)
    _quiet(axes)
    return _written(figure, result, output_dir)


Parts = list[tuple[str, str, list[float]]]
"""(label, colour, one width per case)"""


def _step_parts(result: SimulationResult) -> Parts:
    colors = {"capture": _COLORS["longstraw"], "replay full": "#6aa5d1", "sweep": "#7a8b99"}
    parts = []
    for name, color in colors.items():
        n = 2 if name == "replay full" else 1
        parts.append((name, color, [n * case.phases[name].seconds for case in result.estimates]))
    parts.append(("links", _OTHER, [case.step(2, "full").link_seconds for case in result.estimates]))
    return parts


def _memory_parts(result: SimulationResult) -> Parts:
    held = [case.memory for case in result.estimates]
    known = {
        "weights and LoRA": ("#7a8b99", [m.weights + m.adapter for m in held]),
        "resident": (_COLORS["longstraw"], [m.resident_full for m in held]),
        "accumulators": ("#6aa5d1", [m.accumulators for m in held]),
    }
    rest = [m.peak_full - sum(n_bytes) for m, *n_bytes in zip(held, *(n for _, n in known.values()), strict=True)]
    parts = known | {"workspace": (_OTHER, rest)}
    return [(label, color, [n / 1e9 for n in n_bytes]) for label, (color, n_bytes) in parts.items()]


def _written(figure: Figure, result: BenchResult, output_dir: Path) -> Path:
    path = output_dir / f"{result.preset}.png"
    figure.savefig(path, dpi=150)
    return path


def _quiet(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
