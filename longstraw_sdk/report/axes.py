"""How our pictures look."""

from __future__ import annotations

import base64
import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

OURS, THEIRS, INK, GRID = "#1b6ca8", "#d1603d", "#333333", "#dddddd"
SERIES = (OURS, THEIRS, "#7a8b99", "#b8a13a", "#6aa5d1", "#5b8c5a", "#8e6c8a", "#333333")


def new_axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """A figure with one plot, quiet but for its data."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    return buffer.getvalue()


def embedded(picture: bytes) -> str:
    """For a `src` of HTML behind `data:image/png;base64,`."""
    return base64.b64encode(picture).decode()
