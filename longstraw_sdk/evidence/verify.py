"""Re-checking a run folder: every file against the journal, and the journal against what an update must consist of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .artifacts import file_sha256, inside, read_json
from .digests import row_identity
from .journal import Entry, read_journal
from .manifest import MANIFEST, problems_of
from .run_folder import GRADIENT, JOURNAL, MEMORY, METRICS, MODEL, RANKS, REQUEST, ROLLOUTS

_TOLERANCE = 1e-4
"""Of advantages, which TRL computes in float32."""


class Broken(InputError):
    """The first thing in a run folder that is not as it must be."""


def verify_run(folder: Path, *, checkpoints: bool = True) -> list[str]:
    """What was found right, a sentence each. Raises `InputError` at the first break.

    Args:
        folder: the `run` folder, or the output folder that has one.
        checkpoints: also re-hash the checkpoints beside it that are still there.
    """
    folder = folder if (folder / JOURNAL).is_file() else folder / "run"
    path = folder / JOURNAL
    if path.is_symlink() or not path.is_file():
        raise Broken(f"{path} is missing: this is no run folder")
    entries, n_bytes = read_journal(path)
    if not entries:
        raise Broken(f"{path} is empty")
    found = [f"{len(entries)} journal entries seal each other"]
    if n_bytes < path.stat().st_size:
        found.append("the journal ends in the middle of an entry: the run was cut off there, or writes it now")
    state = _Run(folder)
    for entry in entries:
        state.take(entry)
    found += state.summary()
    last = max(i for i, entry in enumerate(entries) if entry["stage"] == "began")
    read_json(folder / REQUEST, entries[last]["request_sha256"])
    read_json(folder / MODEL, entries[last]["model_sha256"])
    found.append(f"{REQUEST} and {MODEL} are those that the run began with")
    found += _last_update(folder, entries)
    if checkpoints:
        found += _checkpoints(folder, entries)
    if entries[-1]["stage"] == "ended":
        found += _end(folder, entries[-1])
    else:
        found.append(f"the run did not end; its last stage is {entries[-1]['stage']!r}")
    return found


class _Run:
    """Takes a journal entry by entry; what an update may consist of, and in which order."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.policy: str | None = None
        """sha256 of the LoRA weights as the last closed update left them."""
        self.policies: dict[int, str] = {}
        """The same by update."""
        self.update = 0
        self.rows: set[str] = set()
        self.n_rows = 0
        self.tools = False
        self.closed: dict[int, tuple[set[str], bool]] = {}
        """By closed update, responses of the generation batches that it was made of: the next may go on with them."""
        self.since_step: list[str] = []
        self.began = False
        self.n_updates = self.n_generations = self.n_reused = self.n_replayed = 0

    def take(self, entry: Entry) -> None:
        stage = entry["stage"]
        handler = getattr(self, f"_{stage}", None)
        if handler is None:
            raise Broken(f"entry {entry['seq']}: stage {stage!r} is not known")
        if not self.began and stage != "began":
            raise Broken(f"entry {entry['seq']}: {stage!r} before the run began")
        try:
            handler(entry)
        except KeyError as error:
            raise Broken(f"entry {entry['seq']} ({stage}) lacks {error}") from error
        except InputError as error:
            raise Broken(f"entry {entry['seq']} ({stage}, update {entry.get('update')}): {error}") from error

    def summary(self) -> list[str]:
        reused = f", {self.n_reused} of them used again after an interruption" if self.n_reused else ""
        return [
            f"{self.n_updates} updates in order, each with one finalize and one step",
            f"{self.n_generations} drawings of rollouts are what was written{reused}; {self.n_replayed} replayed rows "
            "are among them, and advantages follow from the rewards",
        ]

    def _began(self, entry: Entry) -> None:
        """A first start, or one from a checkpoint, which rolls back what came after it."""
        update = entry["update"]
        if self.began and entry["checkpoint"] is None:
            raise Broken("a journal holds one run, but a second one began without a checkpoint")
        if self.began and update not in self.closed:
            raise Broken(f"it goes on from update {update}, which was never closed")
        self.began, self.update = True, update
        self.policy = self.policies.get(update)
        self.rows, self.tools = self.closed.setdefault(update, (set(), False))
        self.since_step = []

    def _same_update(self, entry: Entry) -> None:
        if entry["update"] != self.update:
            raise Broken(f"it belongs to update {entry['update']}, but {self.update} are closed")

    def _sampled(self, entry: Entry) -> None:
        self._same_update(entry)
        if self.policy is not None and entry["adapter_sha256"] != self.policy:
            raise Broken("responses were drawn from other LoRA weights than the last update left")
        self.policy = self.policies[self.update] = entry["adapter_sha256"]
        content = read_json(inside(self.folder / ROLLOUTS, entry["rollouts"]), entry["file_sha256"])
        self.tools = entry["drawing"] > 0  # a conversation went on: its responses hold what tools said, too
        if "sampled" not in self.since_step:
            self.rows = set()
        if not self.tools:
            self.n_rows = 0
        for row in content["rows"]:
            ids = row["token_ids"]
            if not ids or (row["logprobs"] is not None and len(row["logprobs"]) != len(ids)):
                raise Broken(f"{entry['rollouts']} holds a response with {len(ids)} ids and other log-probs")
            self.rows.add(row_identity(row["prompt_sha256"], ids))
        self.n_rows += len(content["rows"])
        self.n_generations += 1
        self.n_reused += bool(entry["reused"])
        self.since_step.append("sampled")

    def _scored(self, entry: Entry) -> None:
        self._same_update(entry)
        self._needs("sampled")

    def _rewarded(self, entry: Entry) -> None:
        self._same_update(entry)
        self._needs("sampled")
        content = read_json(inside(self.folder / ROLLOUTS, entry["rewards"]), entry["file_sha256"])
        _check_advantages(content)
        if not self.tools and len(content["advantages"]) != self.n_rows:
            raise Broken(f"{len(content['advantages'])} advantages of {self.n_rows} responses")
        self.since_step.append("rewarded")

    def _replayed(self, entry: Entry) -> None:
        self._same_update(entry)
        if "finalized" in self.since_step:
            raise Broken("responses were replayed after the gradient was finalized")
        unknown = [row for row in entry["rows"] if row not in self.rows]
        if unknown and not self.tools:
            raise Broken(f"{len(unknown)} replayed responses are not among those that were drawn")
        self.n_replayed += len(entry["rows"])
        self.since_step.append("replayed")

    def _finalized(self, entry: Entry) -> None:
        self._same_update(entry)
        if "finalized" in self.since_step:
            raise Broken("the gradient was finalized twice before a step")
        self.since_step.append("finalized")

    def _stepped(self, entry: Entry) -> None:
        if entry["update"] != self.update + 1:
            raise Broken(f"update {entry['update']} follows update {self.update}")
        if "finalized" not in self.since_step:
            raise Broken("the optimizer stepped on a gradient that was not finalized")
        self.update = entry["update"]
        self.policy = self.policies[self.update] = entry["adapter_sha256"]
        self.closed[self.update] = (self.rows, self.tools)
        self.since_step = []
        self.n_updates += 1

    def _saved(self, entry: Entry) -> None:
        self._same_update(entry)

    def _ended(self, entry: Entry) -> None:
        self._same_update(entry)

    def _needs(self, stage: str) -> None:
        if stage not in self.since_step:
            raise Broken(f"nothing was {stage} before it")


def _check_advantages(content: Mapping[str, Any]) -> None:
    """That advantages are those that TRL makes of the rewards, for its "sum_then_normalize"."""
    if content["aggregation"] != "sum_then_normalize":
        return
    n, scale = content["num_generations"], content["scale_rewards"]
    totals = [_total(row, content["weights"]) for row in content["rewards"]]
    wanted: list[float] = []
    rounding: list[float] = []
    for start in range(0, len(totals), n):
        group = totals[start : start + n]
        spread = _spread(totals if scale == "batch" else group)
        mean = _mean(group)
        scaled = 1.0 if scale == "none" else spread + 1e-4
        wanted += [0.0 if math.isnan(t) else (t - mean) / scaled for t in group]
        # A float32 mean of equal rewards is off by its rounding, which is then divided by the same.
        rounding += [2.0**-22 * n * max((abs(t) for t in group if not math.isnan(t)), default=0.0) / scaled] * len(
            group
        )
    first = content["first_row"]
    found = content["advantages"]
    own, allowed = wanted[first : first + len(found)], rounding[first : first + len(found)]
    if len(own) != len(found) or any(
        not abs(a - b) <= _TOLERANCE * max(1.0, abs(b)) + c for a, b, c in zip(found, own, allowed, strict=True)
    ):
        raise Broken("the advantages do not follow from the rewards")


def _total(row: Sequence[float | None], weights: Sequence[float]) -> float:
    known = [r * w for r, w in zip(row, weights, strict=True) if r is not None]
    return sum(known) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def _spread(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    if len(known) < 2:
        return math.nan if not known else 0.0
    mean = sum(known) / len(known)
    return math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1))


def _last_update(folder: Path, entries: Sequence[Entry]) -> list[str]:
    finalized = [entry for entry in entries if entry["stage"] == "finalized"]
    if not finalized:
        return []
    last = finalized[-1]
    witness = read_json(folder / GRADIENT, last["witness_sha256"])
    if witness["sha256"] != last["gradient_sha256"] or witness["update"] != last["update"]:
        raise Broken(f"{GRADIENT} is not of the last gradient in the journal")
    return [f"{GRADIENT} is of update {last['update'] + 1}, gradient scope {witness['gradient_scope']}"]


def _checkpoints(folder: Path, entries: Sequence[Entry]) -> Iterator[str]:
    saved: dict[str, set[str]] = {}
    for entry in entries:
        # A run that dies between a manifest and its entry goes on from that checkpoint all the same.
        if entry["stage"] in ("saved", "began") and entry["checkpoint"] is not None:
            saved.setdefault(entry["checkpoint"], set()).add(entry["manifest_sha256"])
    present = 0
    for name, manifests in saved.items():
        path = inside(folder.parent, name)
        if not path.is_dir():
            continue  # rotated away, or moved
        if problems := problems_of(path):
            raise Broken(f"{name}: {'; '.join(problems)}")
        if file_sha256(path / MANIFEST) not in manifests:
            raise Broken(f"{name} is whole, but it is not the one that this run saved")
        present += 1
    last = next((entry for entry in reversed(entries) if entry["stage"] == "saved"), None)
    if last is not None and entries[-1]["stage"] == "ended":
        read_json(folder / MANIFEST, last["copy_sha256"])
    yield f"{present} of {len(saved)} saved checkpoints are there, whole and unchanged"
    others = sorted(p.name for p in folder.parent.glob("checkpoint-*") if p.is_dir() and p.name not in saved)
    if others:
        yield f"not of this run: {', '.join(others)}"


def _end(folder: Path, entry: Entry) -> Iterator[str]:
    ranks = read_json(folder / RANKS, entry["ranks_sha256"])["ranks"]
    if [rank["rank"] for rank in ranks] != list(range(len(ranks))):
        raise Broken(f"{RANKS} does not list every rank once")
    uuids = [rank["observed"]["uuid"] for rank in ranks if rank["observed"]["uuid"] is not None]
    if len(set(uuids)) != len(uuids):
        raise Broken(f"{RANKS}: two ranks had the same accelerator")
    for name, sha256 in ((MEMORY, entry["memory_sha256"]), (METRICS, entry["metrics_sha256"])):
        path = folder / name
        if sha256 is not None:
            if path.is_symlink() or not path.is_file() or file_sha256(path) != sha256:
                raise Broken(f"{name} is missing or not what was written: its sha256 differs")
            for line in path.read_text(encoding="utf-8").splitlines():
                json.loads(line)
    yield f"{len(ranks)} ranks, {len(uuids)} accelerators, {MEMORY} and {METRICS} are as at the end of the run"
