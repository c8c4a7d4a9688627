"""What systems took for one optimizer step on a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from .result import BenchResult

PHASES = ("capture", "sample", "replay", "sweep", "finalize")


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One system and group. None are phases that a system does not have, and everything if it ran out of memory."""

    model: str
    system: str
    gradient_scope: str
    prompt_tokens: int
    group: int
    response_tokens: int
    replay_tokens: int | None
    """Response tokens that our replays pack at most; None of peers."""
    checkpointing: bool
    """Whether layers were forwarded again in backward."""
    capture_seconds: float | None
    sample_seconds: float | None
    replay_seconds: float | None
    sweep_seconds: float | None
    finalize_seconds: float | None
    step_seconds: float | None
    peak_gib: float | None
    weights_gib: float
    state_gib: float | None
    """The resident state after capture; None of peers."""
    roofline_share: float | None
    capture_roofline_share: float | None
    chunk_tokens: int | None = None
    """Prompt tokens per forward; None of peers."""
    ranks: int = 1
    """Processes that took the step together; seconds and memory are the most of any."""
    received_bytes: dict[str, int] | None = None
    """What a rank received from the others, by phase."""
    replay_bytes: int | None = None
    """What `context_bytes` says that it receives in the replays."""

    @property
    def heading(self) -> str:
        return f"{self.model}, {self.prompt_tokens:,}, G={self.group}"

    @property
    def run(self) -> str:
        packs = "" if self.replay_tokens is None else f", {self.replay_tokens}"
        kept = "" if self.checkpointing else ", kept"
        ranks = f" on {self.ranks} ranks, chunk {self.chunk_tokens}" if self.ranks > 1 else ""
        return f"{self.system} ({self.gradient_scope}{packs}{kept}){ranks}"

    @property
    def summary(self) -> str:
        what = f"{self.heading}, {self.run}"
        if self.step_seconds is None:
            return f"{what}: out of memory"
        received = "" if self.received_bytes is None else f", received in replays {self.received_bytes['replay']:,} B"
        expected = "" if self.replay_bytes is None else f" (formula {self.replay_bytes:,})"
        return f"{what}: {self.step_seconds:.2f} s, {self.peak_gib:.3f} GiB{received}{expected}"


@dataclass(frozen=True, kw_only=True)
class StepResult(BenchResult):
    """Steps of all systems."""

    steps: tuple[StepRow, ...]

    @property
    def note(self) -> str:
        return (
            "One group in an open session, forward and backward, without the optimizer's step. GiB is the peak with "
            "weights. Roofline is the least work at speeds measured in the same run, as a share of the time without "
            "sampling. A dash: the system has no such phase, and all that it does counts as replay. The number beside "
            "our scope is replay_tokens, what a pack of responses may hold; kept: no layer is checkpointed."
        )

    def table(self) -> Table:
        table = Table(
            "seconds of",
            title=f"{self.preset} on {self.machine['device']}",
            box=SIMPLE,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        phases = [name for name in PHASES if any(getattr(row, f"{name}_seconds") for row in self.steps)]
        for name in (*phases, "step", "GiB", "roofline"):
            table.add_column(name, justify="right")
        heading = ""
        for row in self.steps:
            if row.heading != heading:
                heading = row.heading
                table.add_section()
                table.add_row(f"[bold]{heading}[/]")
            found = [getattr(row, f"{name}_seconds") for name in phases]
            fits = row.step_seconds is not None
            table.add_row(
                row.run,
                *("-" if seconds is None else f"{seconds:.2f}" for seconds in found),
                f"{row.step_seconds:.2f}" if fits else "no memory",
                f"{row.peak_gib:.3f}" if fits else "-",
                f"{row.roofline_share:.0%}" if fits else "-",
            )
        return table

    def plot(self, output_dir: Path) -> Path:
        from .plots import plot_steps

        return plot_steps(self, output_dir)

    def measured(self) -> Iterator[dict[str, Any]]:
        for step in self.steps:
            yield asdict(step) | {"settings": self.settings}
