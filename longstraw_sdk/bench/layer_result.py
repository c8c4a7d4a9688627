"""What a forward of a chunk took, layer kind by layer kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from .result import BenchResult


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Layers of one kind behind one prompt; None is what did not fit. `chunk_seconds` are of all layers together."""

    system: str
    layer_kind: str
    n_layers: int
    prompt_tokens: int
    new_tokens: int
    layer_seconds: float | None
    chunk_seconds: float | None
    roofline_share: float | None
    peak_gib: float | None


@dataclass(frozen=True, kw_only=True)
class LayerResult(BenchResult):
    """Layers of all systems and prompts."""

    layers: tuple[LayerRow, ...]

    @property
    def note(self) -> str:
        return (
            "Seconds of one layer, without a graph, for the new tokens. Roofline is the layer's products at the speed "
            "of a large one that was measured in the same run, as a share of its time. GiB is the peak of the whole "
            "slice with weights and resident state."
        )

    def table(self) -> Table:
        title = f"{self.preset} on {self.machine['device']}"
        table = Table("layer", title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("seconds", "roofline", "GiB"):
            table.add_column(name, justify="right")
        heading = ""
        for row in self.layers:
            if (found := f"{row.system}, {row.new_tokens:,} behind {row.prompt_tokens:,}") != heading:
                heading = found
                table.add_section()
                table.add_row(f"[bold]{heading}[/]")
            table.add_row(
                row.layer_kind,
                "no memory" if row.layer_seconds is None else f"{row.layer_seconds:.4f}",
                "-" if row.roofline_share is None else f"{row.roofline_share:.0%}",
                "-" if row.peak_gib is None else f"{row.peak_gib:.1f}",
            )
        return table

    def plot(self, output_dir: Path) -> Path:
        from .plots import plot_layers

        return plot_layers(self, output_dir)

    def measured(self) -> Iterator[dict[str, Any]]:
        for row in self.layers:
            known = {"gradient_scope": "response", "capture_seconds": row.layer_seconds}
            yield asdict(row) | known | {"settings": self.settings}
