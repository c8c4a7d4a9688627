"""The driver: takes a plan to a cluster, takes updates there, and leaves nothing behind, whatever happens."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..backends.ranks import check_sizes
from ..errors import ConfigurationError, NumericsError, PlacementError, RankLostError
from ..evidence.artifacts import file_sha256, write_json
from ..evidence.manifest import MANIFEST, read_manifest
from .checkpoint import prune_checkpoints, read_checkpoint, write_checkpoint
from .cleanup import recover, release
from .cluster import require_image
from .ownership import OwnershipJournal
from .plan import DirectRayPlan
from .program import PromptGroup, RankProgram
from .ranks import Advantages, Ranks, Timeouts
from .report import check_places, write_rank_sessions
from .runtime import RayRuntime, Release

logger = logging.getLogger(__name__)

PLAN, PROGRAM, ARTIFACTS, CHECKPOINTS = "plan.json", "program.json", "artifacts", "checkpoints"

Groups = Callable[[int], Sequence[PromptGroup]]


@dataclass(frozen=True)
class RunResult:
    """What `run` did: updates that are closed now, how often ranks were lost, and the last checkpoint."""

    n_closed: int
    n_lost: int
    checkpoint: Path


class DirectRayDriver:
    """Runs GRPO updates on the ranks of a plan.

    `run_dir / run_id` holds the ownership journal, plan and program, checkpoints, and artifacts. A driver on the same
    folder goes on from the last closed update, with the same program; its plan may name other nodes.

    Args:
        plan: with a runtime image.
        program: what the ranks run.
        groups: the prompt groups of an update, by how many are closed. Called again after a failure, it must give the
            same. Context c takes the groups c, c + contexts, ...
        advantages: one number per response of a group.
        address: of the cluster's head, `ip:port`, or "auto".
        max_lost: how often a lost rank may be answered by going on from the last closed update.

    Raises `ConfigurationError` before anything is written or connected if the plan is one to look at, or the program's
    sizes do not fit it.
    """

    def __init__(
        self,
        plan: DirectRayPlan,
        program: RankProgram,
        run_dir: Path,
        *,
        groups: Groups,
        advantages: Advantages,
        address: str = "auto",
        timeouts: Timeouts | None = None,
        max_lost: int = 1,
    ):
        require_image(plan)
        check_sizes(plan.world_size, program.context_parallel_size, program.expert_parallel_size)
        self.plan, self.program, self.address, self.max_lost = plan, program, address, max_lost
        self.folder = Path(run_dir) / plan.run_id
        self.timeouts = Timeouts() if timeouts is None else timeouts
        self._groups, self._advantages = groups, advantages

    def run(self, n_updates: int) -> RunResult:
        """Take updates until `n_updates` are closed, those of earlier drivers included.

        Raises what ended it: `PlacementError` for the cluster, `RankLostError` once ranks were lost more often than
        `max_lost`, or the error of a rank. Nothing of the run is on the cluster then, or the message says what is.
        """
        with OwnershipJournal(self.folder) as journal, _terminate_as_exit():
            journal.begin(self.plan, self.program)
            write_json(self.folder / PLAN, self.plan.as_dict())
            write_json(self.folder / PROGRAM, self.program.as_dict())
            n_lost = 0
            while True:
                try:
                    self._attempt(journal, n_updates)
                    break
                except RankLostError as error:
                    n_lost += 1
                    if n_lost > self.max_lost:
                        raise
                    logger.warning("%s; going on from update %d", error, _n_closed(journal))
            if journal.state != "ended":
                journal.write("ended", updates=_n_closed(journal))
            closed = journal.last_closed
            assert closed is not None
            return RunResult(_n_closed(journal), n_lost, self.folder / CHECKPOINTS / closed["checkpoint"])

    def _attempt(self, journal: OwnershipJournal, n_updates: int) -> None:
        if _n_closed(journal) >= n_updates and not journal.owned:
            return
        journal.write("connecting", address=self.address)
        with RayRuntime.connect(self.address, self.timeouts.connect) as runtime:
            if journal.owned:
                run_id = self.plan.run_id
                _removed(recover(journal, runtime, run_id, "driver", self.timeouts.release), run_id)
            if _n_closed(journal) >= n_updates:
                return
            node_ids = runtime.validate_cluster(self.plan).node_ids(self.plan)
            journal.write("validated", nodes=node_ids)
            try:
                ranks = self._create(journal, runtime, node_ids)
                journal.write("running", updates=_n_closed(journal))
                while _n_closed(journal) < n_updates:
                    self._update(journal, ranks)
                journal.write("ranks_closed", audit=ranks.close())
            except BaseException as error:
                try:
                    journal.write("failed", error=f"{type(error).__name__}: {error}")
                    self._release(journal, runtime)
                except Exception as second:  # the first one says why
                    error.add_note(f"and what it created could not be removed: {second}")
                raise
            self._release(journal, runtime)

    def _create(self, journal: OwnershipJournal, runtime: RayRuntime, node_ids: Mapping[str, str]) -> Ranks:
        plan, limits = self.plan, self.timeouts
        owned = journal.own(plan)
        assert owned.group is not None
        journal.write("creating_group", group=owned.group)
        group_id = runtime.create_group(plan, owned.group, limits.group)
        journal.write("group_created", group_id=group_id)
        journal.write("creating_actors", actors=list(owned.actors))
        names = dict(zip((spec.name for spec in (plan.coordinator, *plan.ranks)), owned.actors, strict=True))
        actors = runtime.create_actors(plan, names)
        ranks = Ranks(self.plan, self.program, runtime, actors, limits)
        check_places(plan, node_ids, ranks.places())
        journal.write("actors_created")
        closed = journal.last_closed
        states = None
        if closed is not None:
            states = read_checkpoint(self.folder / CHECKPOINTS / closed["checkpoint"], closed["manifest_sha256"])
        ranks.open(_n_closed(journal), states or {})
        return ranks

    def _update(self, journal: OwnershipJournal, ranks: Ranks) -> None:
        """One update, from the prompts to its `closed` entry."""
        n_closed = _n_closed(journal)
        groups = list(self._groups(n_closed))
        n_contexts = ranks.n_contexts
        if not groups or len(groups) % n_contexts:
            raise ConfigurationError(
                f"update {n_closed} has {len(groups)} prompt groups for {n_contexts} contexts; give a multiple, so "
                "that each has as many"
            )
        for first in range(0, len(groups), n_contexts):
            ranks.take(groups[first : first + n_contexts], self._advantages)
        finalized = ranks.everywhere("finalize")
        gradients = {found["gradient"]["sha256"] for found in finalized}
        if len(gradients) > 1 and self.program.expert_parallel_size == 1:
            raise NumericsError("ranks hold different gradients after finalize(); the update is not stepped")
        digests = set(ranks.everywhere("step"))
        if len(digests) != 1:
            raise NumericsError("ranks hold different LoRA weights after the step; the update is not closed")
        adapter_sha256 = digests.pop()
        states = ranks.states()
        reports = ranks.reports()
        facts = {"run_id": self.plan.run_id, "adapter_sha256": adapter_sha256}
        folder = write_checkpoint(self.folder / CHECKPOINTS, n_closed + 1, states, facts)
        ranks_sha256 = write_rank_sessions(self.folder / ARTIFACTS, self.plan, reports)
        journal.write(
            "closed",
            update=n_closed + 1,
            checkpoint=folder.name,
            manifest_sha256=file_sha256(folder / MANIFEST),
            adapter_sha256=adapter_sha256,
            ranks_sha256=ranks_sha256,
            gradient_norm=finalized[0]["gradient"]["norm"],
            gradient_sha256=finalized[0]["gradient"]["sha256"],
            reductions=finalized[0]["reductions"],
        )
        prune_checkpoints(folder.parent)
        write_json(self.folder / ARTIFACTS / MANIFEST, read_manifest(folder) | {"checkpoint": folder.name})

    def _release(self, journal: OwnershipJournal, runtime: RayRuntime) -> None:
        _removed(release(journal, runtime, self.plan.run_id, self.timeouts.release), self.plan.run_id)


def _removed(found: Release, run_id: str) -> None:
    """Raise `PlacementError` if something that was owned is still there."""
    if found.kept:
        raise PlacementError(
            f"not gone in time: {'; '.join(found.kept)}; run `longstraw cleanup --run {run_id}` when the cluster "
            "answers"
        )


def _n_closed(journal: OwnershipJournal) -> int:
    closed = journal.last_closed
    return 0 if closed is None else int(closed["update"])


@contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """SIGTERM, as schedulers send it, ends the block by `SystemExit`, so that what was created is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
