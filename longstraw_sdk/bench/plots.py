"""Pictures of benchmark results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .result import BenchResult

_COLORS = {"longstraw": "#1b6ca8"}
_OTHER = "#d1603d"


def plot_peaks(result: BenchResult, output_dir: Path) -> Path:
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
    axes.grid(color="#dddddd", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path = output_dir / f"{result.preset}.png"
    figure.savefig(path, dpi=150)
    return path
