"""What a training run leaves in `run/` below its output folder, so that anyone can check what happened.

The journal names every stage of every update as it ends, and seals the other files by their sha256. The main process
writes; its own context's rows stand for the rollouts, each rank writes its own memory trace. Stages of one generation
batch: "sampled", "scored" (old and reference log-probs, where the objective needs them), "rewarded"; of each update on
it: "replayed" (once per micro-batch), "finalized", "stepped". TRL takes rewards after log-probs; neither needs the
other.
"""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longstraw_sdk.errors import InputError
from longstraw_sdk.evidence.artifacts import file_sha256, free_path, read_json, write_json
from longstraw_sdk.evidence.journal import Journal
from longstraw_sdk.evidence.manifest import MANIFEST, read_manifest
from longstraw_sdk.evidence.run_folder import (
    GRADIENT,
    JOURNAL,
    MEMORY,
    METRICS,
    MODEL,
    RANKS,
    REQUEST,
    ROLLOUTS,
    RUN,
)

from .rollout_store import Stored
from .run_facts import finite

logger = logging.getLogger(__name__)


class RunRecord:
    """Writes the run folder of one process. On all but the main process only the memory trace."""

    def __init__(self, output_dir: str, rank: int, *, writes: bool):
        self.folder = Path(output_dir) / RUN
        self.rank = rank
        self.writes = writes
        self.active = False
        """While `train()` runs: steps that someone takes by hand outside of `train()` leave nothing behind."""
        self.journal: Journal | None = None
        self.step = 0
        """TRL's `global_step`, the updates that are closed."""

    def open(self, request: Mapping[str, Any], model: Mapping[str, Any], checkpoint: str | None, step: int) -> None:
        """Begin the folder, or go on in the one of the run whose `checkpoint` lies beside it.

        An old folder of a run that is not continued is moved aside, not deleted.
        """
        manifest = None if checkpoint is None else Path(checkpoint, MANIFEST)
        goes_on = checkpoint is not None and Path(checkpoint).resolve().parent == self.folder.parent.resolve()
        if not goes_on and self.folder.exists():
            n = 1
            while (aside := self.folder.with_name(f"{RUN}-{n}")).exists():
                n += 1
            self.folder.rename(aside)
            logger.warning("%s is of an earlier run and was moved to %s", self.folder, aside)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.folder / JOURNAL)
        self._append(
            "began",
            request_sha256=write_json(self.folder / REQUEST, request),
            model_sha256=write_json(self.folder / MODEL, model),
            checkpoint=None if checkpoint is None else Path(checkpoint).name,
            manifest_sha256=file_sha256(manifest) if manifest is not None and manifest.exists() else None,
            update=step,
        )

    def _append(self, stage: str, **facts: Any) -> None:
        if self.journal is not None:
            self.journal.append(stage, **facts)

    def sampled(self, stored: Stored, drawing: int, sampler: Mapping[str, Any], adapter_sha256: str) -> None:
        """`drawing` counts those of one generation batch: tool calls need several."""
        self._append(
            "sampled",
            update=self.step,
            drawing=drawing,
            rollouts=stored.path.name,
            file_sha256=stored.sha256,
            reused=stored.reused,
            sampler=dict(sampler),
            adapter_sha256=adapter_sha256,
        )

    def scored(self, what: str, n_rows: int) -> None:
        self._append("scored", update=self.step, what=what, n_rows=n_rows)

    def rewarded(self, name: str, content: Mapping[str, Any]) -> None:
        """Rewards [N, F] of all processes, and the advantages that TRL made of them."""
        if self.journal is not None:
            path = free_path(self.folder / ROLLOUTS / name)
            self._append("rewarded", update=self.step, rewards=path.name, file_sha256=write_json(path, content))

    def replayed(self, rows: Sequence[str]) -> None:
        self._append("replayed", update=self.step, rows=list(rows))

    def finalized(self, scope: str, witness: Mapping[str, Any], reductions: Sequence[str]) -> None:
        if self.journal is not None:
            content = {"update": self.step, "gradient_scope": scope} | dict(witness)
            sha256 = write_json(self.folder / GRADIENT, content)
            facts = {"gradient_sha256": witness["sha256"], "norm": witness["norm"]}
            self._append("finalized", update=self.step, witness_sha256=sha256, reductions=list(reductions), **facts)

    def stepped(self, adapter_sha256: str, step: int) -> None:
        self._append("stepped", update=step, adapter_sha256=adapter_sha256)

    def saved(self, checkpoint: Path) -> None:
        """After the manifest of `checkpoint` was written; a copy of it lies in the run folder."""
        if self.journal is not None:
            content = read_manifest(checkpoint) | {"checkpoint": checkpoint.name}
            sha256 = write_json(self.folder / MANIFEST, content)
            manifest = file_sha256(checkpoint / MANIFEST)
            self._append(
                "saved", update=self.step, checkpoint=checkpoint.name, manifest_sha256=manifest, copy_sha256=sha256
            )

    def ended(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        if self.journal is not None:
            sha256 = write_json(self.folder / RANKS, {"ranks": list(ranks)})
            traces = {"memory_sha256": memory_name(self.rank), "metrics_sha256": METRICS}
            found = {name: self.folder / file for name, file in traces.items()}
            hashes = {name: file_sha256(path) if path.exists() else None for name, path in found.items()}
            self._append("ended", update=self.step, ranks_sha256=sha256, **hashes)

    def close(self) -> None:
        self.active, self.journal = False, None

    @contextmanager
    def memory(self, phase: str, device: torch.device) -> Iterator[None]:
        """Around a phase of a session: a line of the memory trace when it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            entry: dict[str, Any] = {
                "update": self.step,
                "phase": phase,
                "seconds": round(time.perf_counter() - start, 6),
                "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
            if device.type == "cuda":
                entry |= {
                    "allocated_bytes": torch.cuda.memory_allocated(device),
                    "peak_bytes": torch.cuda.max_memory_allocated(device),
                }
            self._trace(memory_name(self.rank), entry)

    def metrics(self, logs: Mapping[str, Any]) -> None:
        """What the trainer logged, as a line. A run that goes on may repeat updates: then the last line counts."""
        if self.journal is not None:
            self._trace(METRICS, {"update": self.step} | finite(dict(logs)))

    def _trace(self, name: str, entry: Mapping[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # of another node
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, default=str) + "\n")
        except OSError as error:
            logger.warning("%s is not complete: %s", name, error)


def memory_name(rank: int) -> str:
    stem, dot, suffix = MEMORY.partition(".")
    return MEMORY if rank == 0 else f"{stem}-rank{rank}{dot}{suffix}"


def earlier_model(folder: Path) -> dict[str, Any] | None:
    """The model snapshot in a run folder, if it can be read."""
    try:
        found: dict[str, Any] = read_json(folder / MODEL)
    except InputError:
        return None
    return found
