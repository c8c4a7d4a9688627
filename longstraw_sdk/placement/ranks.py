"""The ranks of one attempt, asked together, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, LifecycleError, NumericsError, PlacementError, RankLostError
from .plan import DirectRayPlan
from .program import PromptGroup, RankProgram
from .report import check_reports
from .runtime import Actors, RayRuntime

Advantages = Callable[[PromptGroup, Sequence[Sequence[int]]], Sequence[float]]
"""One number per response of a group."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that each thing may take.

    Args:
        connect: until the cluster answers.
        group: until the bundles are reserved.
        actors: until the actors run, and once more until every rank has its model.
        phase: one phase of all ranks, as the capture of a prompt.
        grace: what the others get once a rank has failed.
        release: until what is removed is gone.
    """

    connect: float = 60.0
    group: float = 120.0
    actors: float = 900.0
    phase: float = 3600.0
    grace: float = 60.0
    release: float = 60.0


class Ranks:
    """`asked` is what each rank was asked for since its last report, by phase and closed updates."""

    def __init__(
        self, plan: DirectRayPlan, program: RankProgram, runtime: RayRuntime, actors: Actors, limits: Timeouts
    ):
        self.plan, self.program, self.runtime, self.actors, self.limits = plan, program, runtime, actors, limits
        self.n_closed = 0
        self.asked: list[list[tuple[str, int]]] = [[] for _ in plan.ranks]

    @property
    def n_contexts(self) -> int:
        return self.plan.world_size // self.program.context_parallel_size

    def context_of(self, rank: int) -> int:
        return rank // self.program.context_parallel_size

    def places(self) -> list[dict[str, Any]]:
        """Where each rank is, once all actors run."""
        calls = {f"rank {i}": actor.place.remote() for i, actor in enumerate(self.actors.ranks)}
        calls["the coordinator"] = self.actors.coordinator.place.remote()
        try:
            found = self.runtime.call(calls, "its start", self.limits.actors, self.limits.grace)
        except RankLostError as error:
            raise PlacementError(f"the actors did not start; does the image hold longstraw-sdk? {error}") from error
        del found["the coordinator"]
        return [found[f"rank {i}"] for i in range(self.plan.world_size)]

    def open(self, n_closed: int, states: Mapping[str, bytes]) -> None:
        """Join all ranks and give them the model, and what a checkpoint holds."""
        listening = {"the coordinator": self.actors.coordinator.listen.remote(self.limits.actors)}
        port = self.runtime.call(listening, "listen", self.limits.actors)["the coordinator"]
        self.n_closed = n_closed
        arguments = []
        for rank in self.plan.ranks:
            names = ("adapter", f"experts-{rank.rank % self.program.expert_parallel_size}")
            own = [states[f"{name}.safetensors"] for name in names if f"{name}.safetensors" in states]
            arguments.append((_environment(self.plan, rank.rank, port), self.program, n_closed, own))
        self.everywhere("open", arguments, timeout_s=self.limits.actors)

    def everywhere(
        self,
        phase: str,
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        timeout_s: float | None = None,
        counted: bool = True,
    ) -> list[Any]:
        """What `phase` gives on every rank, in rank order."""
        given = {rank: arguments[rank] if arguments is not None else () for rank in range(self.plan.world_size)}
        found = self.on(phase, given, timeout_s=timeout_s, counted=counted)
        if phase == "step":
            self.n_closed += 1
        return [found[rank] for rank in range(self.plan.world_size)]

    def on(
        self,
        phase: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        timeout_s: float | None = None,
        counted: bool = True,
        **options: Any,
    ) -> dict[int, Any]:
        """The same on the ranks that `arguments` names."""
        calls = {}
        for rank, given in arguments.items():
            calls[f"rank {rank}"] = getattr(self.actors.ranks[rank], phase).remote(*given, **options)
            if counted:
                self.asked[rank].append((phase, self.n_closed))
        what = f"{phase} of update {self.n_closed}"
        found = self.runtime.call(calls, what, timeout_s or self.limits.phase, self.limits.grace)
        return {rank: found[f"rank {rank}"] for rank in arguments}

    def take(self, groups: Sequence[PromptGroup], advantages: Advantages) -> None:
        """Capture, draw, score, replay and sweep one group per context."""
        group_of = {rank: groups[self.context_of(rank)] for rank in range(self.plan.world_size)}
        self.on("capture", {rank: (group.prompt_ids,) for rank, group in group_of.items()})
        drawing = {
            rank: (group.n_samples, group.max_new_tokens, group.seed)
            for rank, group in group_of.items()
            if group.n_samples
        }
        drawn = self.on("sample", drawing) if drawing else {}
        responses = [self._agreed(context, group, drawn) for context, group in enumerate(groups)]
        weights = [_checked(advantages(group, rows), rows) for group, rows in zip(groups, responses, strict=True)]
        self.on("score", {rank: (responses[self.context_of(rank)],) for rank in group_of})
        for index in range(max(len(rows) for rows in responses)):
            given = {
                rank: (index, weights[self.context_of(rank)][index])
                for rank in group_of
                if index < len(responses[self.context_of(rank)])
            }
            self.on("replay", given)
        self.on("sweep", dict.fromkeys(group_of, ()))

    def _agreed(self, context: int, group: PromptGroup, drawn: Mapping[int, list[list[int]]]) -> list[list[int]]:
        if not group.n_samples:
            return [list(row) for row in group.responses]
        found = [rows for rank, rows in drawn.items() if self.context_of(rank) == context]
        if any(rows != found[0] for rows in found):
            raise NumericsError(f"the ranks of context {context} drew different responses; nothing was replayed")
        return found[0]

    def reports(self) -> list[dict[str, Any]]:
        """What each rank says of its phases since the last time, which must be those that it was asked for."""
        reports = self.everywhere("report", counted=False)
        check_reports(self.asked, reports)
        self.asked = [[] for _ in self.plan.ranks]
        return reports

    def close(self) -> list[list[str]]:
        """What each rank found wrong with its pages when it closed its session: nothing, or this raises."""
        audits = self.everywhere("close", timeout_s=self.limits.grace, counted=False)
        if any(audits):
            raise LifecycleError(f"pages of resident state are left after all updates, by rank: {audits}")
        return audits

    def states(self) -> dict[str, bytes]:
        """What a checkpoint holds, by file name."""
        found = {"adapter.safetensors": self.on("state", {0: ()}, shared=True)[0]}
        n_parts = self.program.expert_parallel_size
        if n_parts > 1:
            parts = self.on("state", dict.fromkeys(range(n_parts), ()), shared=False)
            found |= {f"experts-{rank}.safetensors": data for rank, data in parts.items()}
        return found


def _environment(plan: DirectRayPlan, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set. Its agent, too, holds the store, so that no rank starts one.

    LOCAL_RANK is what programs take as the index of their GPU, and Ray shows an actor no GPU but its own.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": plan.coordinator.node_ip,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _checked(advantages: Sequence[float], rows: Sequence[Sequence[int]]) -> list[float]:
    if len(advantages) != len(rows):
        raise InputError(f"{len(advantages)} advantages were given for {len(rows)} responses; give one each")
    return [float(a) for a in advantages]
