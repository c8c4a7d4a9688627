"""One rank behind a long prompt that nobody had to forward: its pages hold random rows, its work is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from ..adapter import DecoderOutput, StateView, adapter_for
from ..bound import bind_model
from ..evidence.memory import trace_memory
from ..lora import base_model_of
from ..planner.geometry import Geometry
from ..replay import replay_rows
from ..state import Component, PagedSpec, PagePool, ResidentState, StateSpec
from ..sweep import sweep_chunk
from .device import seconds_of
from .simulated_context import SimulatedBackend


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one rank spends on something. `workspace_bytes` is the peak on top of what was allocated before."""

    seconds: float
    received_bytes: float
    workspace_bytes: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes that all measurements of a run share.

    Each is made `max_runs` times, but not again once its runs have taken `enough_seconds` together.
    """

    chunk_tokens: int
    page_tokens: int
    response_tokens: int
    max_runs: int
    enough_seconds: float
    device: torch.device


def fill_state(state: ResidentState, specs: Sequence[StateSpec], n_tokens: int, chunk_tokens: int) -> None:
    """Let `state` grow to `n_tokens`, chunk by chunk, with rows drawn from N(0, 1)."""

    def random(component: Component, n_rows: tuple[int, ...]) -> torch.Tensor:
        shape = (1, *component.leading, *n_rows, *component.trailing)
        return torch.randn(shape, dtype=component.dtype, device=state.prefix_ids.device)

    width = state.slice_of(chunk_tokens).width
    for _ in range(state.n_tokens, n_tokens, chunk_tokens):
        produced = {}
        for spec in specs:
            n_rows = (width,) if isinstance(spec, PagedSpec) else ()
            produced[spec.key] = {c.name: random(c, n_rows) for c in spec.components}
        state.append_chunk(chunk_tokens, produced, keep_boundaries=False)


class SimulatedRank:
    """The last rank of a context of `size`, whose causal part is the longest, with a few layers of a model.

    Phases may come in the order of a training step only: chunks behind each other, replays behind a whole prompt.

    Args:
        n_units: how many units of the geometry follow its front.
        max_tokens: the longest prefix, a multiple of the chunk.
    """

    def __init__(self, geometry: Geometry, size: int, n_units: int, max_tokens: int, workload: Workload):
        self.workload = workload
        self.size = size
        self.device = workload.device
        model = geometry.build(n_units, size, self.device)
        self.model = model
        self.bound = bind_model(model, adapter_for(base_model_of(model)))
        self.backend = SimulatedBackend(size - 1, size, workload.chunk_tokens)
        assert self.backend.context is not None
        self.context = self.backend.context
        self.ids = torch.randint(0, self.bound.vocab_size, (max_tokens,), device=self.device)
        self.pool = PagePool(workload.page_tokens)
        self.state = self._empty_state()

    def _empty_state(self) -> ResidentState:
        return ResidentState(self.bound.specs, self.ids, self.pool, "prompt", self.device, context=self.context)

    def fill(self, n_tokens: int) -> None:
        """Let the resident state grow to `n_tokens`, chunk by chunk, with random rows."""
        fill_state(self.state, self.bound.specs, n_tokens, self.workload.chunk_tokens)

    def capture_chunk(self) -> Cost:
        """Forward the next chunk and store it."""
        state, chunk = self.state, self.workload.chunk_tokens
        ids = self.ids[None, state.n_tokens : state.n_tokens + chunk]
        view = StateView(state, state.last_boundary, state_only=True)
        outputs: list[DecoderOutput] = []

        def forward() -> None:
            outputs[:] = [self.bound.adapter.forward(self.bound.base, ids, view)]

        with torch.no_grad():
            cost = self._measure(forward)
            append = seconds_of(
                lambda: state.append_chunk(chunk, outputs[0].produced, keep_boundaries=True), self.device
            )
        return replace(cost, seconds=cost.seconds + append)

    def sweep_chunk(self) -> Cost:
        """Sweep the last chunk, with gradients of everything that it left behind."""
        return self._measure(
            lambda: sweep_chunk(self.bound, self.state, self.state.last_boundary), self._collect_gradients
        )

    def replay(self, *, accumulate: bool) -> Cost:
        """Replay one response and its backward; `accumulate` collects gradients of the state, as full scope does."""
        row = torch.randint(0, self.bound.vocab_size, (self.workload.response_tokens,), device=self.device)

        def run() -> None:
            (out,) = replay_rows(self.bound, self.state, self.ids[-1], [row], accumulate=accumulate, temperature=1.0)
            out.logps.sum().backward()

        return self._measure(run, self._collect_gradients if accumulate else None)

    def finalize(self) -> Cost:
        """Sum the gradients over the context; those of routed experts stay with the rank that has the expert."""
        shared = [p for name, p in self.model.named_parameters() if p.requires_grad and ".experts." not in name]
        return self._measure(lambda: self.backend.reduce_gradients(shared, replayed=True))

    def warm_up(self) -> None:
        """Run every phase once behind a whole page, then start from an empty state."""
        chunk = self.workload.chunk_tokens
        n_chunks = -(-self.workload.page_tokens * self.size // chunk)
        self.fill(min(n_chunks, len(self.ids) // chunk - 1) * chunk)
        for phase in (self.capture_chunk, self.sweep_chunk, self.finalize):
            phase()
        for accumulate in (False, True):
            self.replay(accumulate=accumulate)
        self.state.release()
        self.state = self._empty_state()

    @property
    def adapter_bytes(self) -> int:
        """LoRA parameters and their gradients."""
        return 2 * sum(p.nbytes for p in self.bound.base.parameters() if p.requires_grad)

    def close(self) -> None:
        if not self.state.released:
            self.state.release()
        self.pool.trim()
        self.bound.unbind()

    def __enter__(self) -> SimulatedRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect_gradients(self) -> None:
        """Accumulators for all rows, and a gradient of the last boundary, as replays and later chunks leave them."""
        for paged in self.state.paged.values():
            with paged.accumulators(paged.n_tokens) as of_page:
                of_page(0)
        for recurrent in self.state.recurrent.values():
            leaves = recurrent.leaves(self.state.last_boundary) or {}
            torch.autograd.backward(list(leaves.values()), [torch.ones_like(leaf) for leaf in leaves.values()])

    def _measure(self, action: Callable[[], object], prepare: Callable[[], None] | None = None) -> Cost:
        """What `action` costs, by its fastest run; `prepare` goes before each. On a CPU one more run is traced."""
        runs = [self._run(action, prepare)]
        while len(runs) < self.workload.max_runs and sum(run.seconds for run in runs) < self.workload.enough_seconds:
            runs.append(self._run(action, prepare))
        if self.device.type == "cuda":
            return min(runs, key=lambda cost: cost.seconds)
        if prepare is not None:
            prepare()
        with trace_memory() as trace:  # slows what it watches
            action()
        return replace(min(runs, key=lambda cost: cost.seconds), workspace_bytes=trace.peak_bytes)

    def _run(self, action: Callable[[], object], prepare: Callable[[], None] | None) -> Cost:
        if prepare is not None:
            prepare()
        received, allocated = self.context.received_bytes, 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            allocated = torch.cuda.memory_allocated(self.device)
        seconds = seconds_of(action, self.device)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return Cost(
            seconds=seconds,
            received_bytes=self.context.received_bytes - received,
            workspace_bytes=peak - allocated,
        )
