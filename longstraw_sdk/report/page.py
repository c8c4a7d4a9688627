"""Pictures of a run and the HTML page that holds them."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from jinja2 import Environment
from matplotlib.figure import Figure

from ..errors import InputError
from ..evidence.verify import verify_run
from .axes import OURS, SERIES, embedded, new_axes, png
from .recorded import Recorded

DRIFT = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "kl", "approx_kl")
"""Metrics that say how far the policy is from what drew the responses, or from the reference."""


def write_page(run: Recorded, output_dir: Path) -> Path:
    """Write report.html and its pictures as PNG into `output_dir`, and return the page's path."""
    output_dir.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, figure in (
        ("rewards", _rewards(run)),
        ("drift", _drift(run)),
        ("memory", _memory(run)),
        ("time", _time(run)),
    ):
        if figure is not None:
            picture = png(figure)
            (output_dir / f"{name}.png").write_bytes(picture)
            pictures[name] = embedded(picture)
    checked, broken = _checked(run)
    template = resources.files(__package__).joinpath("page.html.jinja").read_text()
    path = output_dir / "report.html"
    path.write_text(
        Environment(autoescape=True)
        .from_string(template)
        .render(run=run, pictures=pictures, checked=checked, broken=broken, totals=_totals(run), drift=DRIFT),
        encoding="utf-8",
    )
    return path


def _checked(run: Recorded) -> tuple[list[str], str | None]:
    """What `verify-run` says without the checkpoints, which may be large."""
    try:
        return verify_run(run.folder, checkpoints=False), None
    except InputError as error:
        return [], str(error)


def _totals(run: Recorded) -> list[tuple[str, float, int | None]]:
    """(phase, seconds, peak bytes) of the slowest and fullest rank."""
    phases = dict.fromkeys(phase for of_rank in run.seconds.values() for phase in of_rank)
    found = []
    for phase in phases:
        seconds = max(sum(of_rank.get(phase, {}).values()) for of_rank in run.seconds.values())
        peak = max((of_rank.get(phase, 0) for of_rank in run.peaks.values()), default=0)
        found.append((phase, seconds, peak or None))
    return found


def _rewards(run: Recorded) -> Figure | None:
    updates, rewards = run.series("reward")
    if not updates:
        return None
    figure, axes = new_axes("Mean reward", "update", "reward")
    axes.plot(updates, rewards, color=OURS, linewidth=2, marker="o" if len(updates) < 30 else None, markersize=4)
    spread = dict(zip(*run.series("reward_std"), strict=True))
    low = [r - spread.get(u, 0.0) for u, r in zip(updates, rewards, strict=True)]
    high = [r + spread.get(u, 0.0) for u, r in zip(updates, rewards, strict=True)]
    axes.fill_between(updates, low, high, color=OURS, alpha=0.15, linewidth=0, label="reward_std")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _drift(run: Recorded) -> Figure | None:
    found = {name: run.series(name) for name in DRIFT}
    found = {name: series for name, series in found.items() if series[0]}
    if not found:
        return None
    figure, axes = new_axes("Log-prob drift", "update", "nats per token")
    for color, (name, (updates, values)) in zip(SERIES, found.items(), strict=False):
        axes.plot(updates, values, color=color, linewidth=1.5, label=name)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _memory(run: Recorded) -> Figure | None:
    if not run.peaks:
        return None
    phases = list(dict.fromkeys(phase for of_rank in run.peaks.values() for phase in of_rank))
    what = "peak on the device" if run.on_device else "peak of the process"
    figure, axes = new_axes(f"Memory by phase and rank: {what} so far", "", "GiB")
    width = 0.8 / len(run.peaks)
    for i, (rank, of_rank) in enumerate(run.peaks.items()):
        places = [j + (i - (len(run.peaks) - 1) / 2) * width for j in range(len(phases))]
        heights = [of_rank.get(phase, 0) / 2**30 for phase in phases]
        axes.bar(places, heights, width=width, color=SERIES[i % len(SERIES)], label=f"rank {rank}")
    axes.set_xticks(range(len(phases)), phases)
    if len(run.peaks) > 1:
        axes.legend(frameon=False, fontsize=9, ncols=min(8, len(run.peaks)))
    return figure


def _time(run: Recorded) -> Figure | None:
    if not run.seconds:
        return None
    rank, of_rank = next(iter(run.seconds.items()))
    updates = sorted({update for by_update in of_rank.values() for update in by_update})
    figure, axes = new_axes(f"Seconds by phase, rank {rank}", "updates closed when the phase ran", "seconds")
    bottom = [0.0] * len(updates)
    for color, (phase, by_update) in zip(SERIES * 2, of_rank.items(), strict=False):
        heights = [by_update.get(update, 0.0) for update in updates]
        axes.bar(updates, heights, bottom=bottom, color=color, label=phase, width=0.8)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.2))
    return figure
