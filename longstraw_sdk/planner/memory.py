"""Bytes of one GPU, phase by phase and term by term."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..capture import chunk_bounds
from ..ops.logprobs import MAX_TILE_ELEMENTS
from ..state import KEPT_FREE, PagedSpec, StateBytes, min_forward_tokens, spread_over_host
from .activations import capture_peak, replay_peak, score_peak, sweep_peak
from .layers import attention_layer, delta_layer
from .ledger import Ledger
from .model_facts import ModelFacts
from .passes import Numbers, Pass
from .request import Options, PlanRequest
from .sparse_layers import sparse_layer

TERMS = {
    "fixed": "base weights, and LoRA masters, their gradients and both of AdamW's states in float32",
    "prompt state": "pages of all paged layers (rows of this rank, last page whole), recurrent states at chunk "
    "boundaries: all in full scope, one otherwise; pages in host memory visit two layers at a time",
    "gradient accumulators": "full scope: float32 sums for every differentiable row, one set of recurrent states",
    "branch": "what layers hold at once: of a chunk in capture and sweep, of a pack of responses in replay",
    "scoring": "tile of logits in the model's dtype and three times in float32, and the last hidden state twice",
    "communication": "context parallelism: queries, partial results and fetched rows of other ranks",
    "reserve": "CUDA context, libraries and what the allocator's blocks leave unused",
}
"""Every term and its formula in words."""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Bytes per term at the fullest moment of one phase."""

    phase: str
    terms: dict[str, float]

    @property
    def n_bytes(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All phases of a step on one GPU, and the pages in host memory, those of `host_layers` of `n_layers` layers."""

    phases: tuple[PhaseMemory, ...]
    host_bytes: float
    host_layers: int
    n_layers: int

    @property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.n_bytes)


def memory_plan(
    request: PlanRequest, facts: ModelFacts, options: Options, num: Numbers, *, reserve: float
) -> MemoryPlan:
    """Of a step in its steady state, when gradients and optimizer states are there."""
    fixed = fixed_bytes(request, facts, options.expert_parallel_size)
    schedule = Schedule.of(request, facts, options)
    held = StateBytes.of(facts.specs, schedule.own_rows, options.page_tokens)
    boundaries = (schedule.n_chunks if request.collects else 1) * held.boundary
    work = {phase: _work(phase, schedule, facts, request, num, held) for phase in schedule.phases}
    sizes = {n: (pages, sums if request.collects else 0) for n, (pages, sums) in held.by_layer.items()}
    away: frozenset[int] = frozenset()
    if options.tier == "cpu":
        away = frozenset(sizes)
    elif options.tier == "split":
        # The session decides by what it keeps free, whatever its passes turn out to take.
        free = max(KEPT_FREE[request.scope], *(sum(terms.values()) for terms in work.values()))
        away = spread_over_host(sizes, int(request.gpu_bytes - reserve - fixed - boundaries - free))
    pages, sums = (sum(n[i] for layer, n in sizes.items() if layer not in away) for i in (0, 1))
    if away:
        pages += 2 * max(sizes[layer][0] for layer in away)
        sums += max(sizes[layer][1] for layer in away)
    accumulators = sums + held.boundary_gradients if request.collects else 0

    def phase(name: str) -> PhaseMemory:
        own = work[name]
        state = float(pages + boundaries)
        if name == "capture" and schedule.n_chunks == 1:  # pages come when the only chunk is stored
            state = max(0.0, state + schedule.stored(facts, num) - own["branch"])
        arrived = name in ("replay", "sweep", "sample", "score") and not (name == "replay" and schedule.n_packs == 1)
        gradients = accumulators if arrived and name in ("replay", "sweep") else 0
        terms = {"fixed": fixed, "prompt state": state, "gradient accumulators": gradients, **own, "reserve": reserve}
        return PhaseMemory(phase=name, terms={term: float(terms[term]) for term in TERMS})

    return MemoryPlan(
        phases=tuple(phase(name) for name in schedule.phases),
        host_bytes=pinned_bytes(facts, away, schedule.own_rows, options.page_tokens, with_sums=request.collects),
        host_layers=len(away),
        n_layers=len(sizes),
    )


def fixed_bytes(request: PlanRequest, facts: ModelFacts, expert_ranks: int) -> float:
    """Base weights on one rank, LoRA, its gradients and, if asked for, AdamW's states."""
    copies = 4 if request.optimizer else 2
    lora = facts.lora_parameters(expert_ranks) * facts.sum_bytes
    return facts.base_bytes(expert_ranks, nf4=request.base_weights == "nf4") + copies * lora


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The passes of a step.

    Args:
        phases: in their order.
        chunk: capture's last chunk, behind the rest of the prompt; a sweep runs it with gradients.
        pack: the largest pack of responses.
    """

    phases: tuple[str, ...]
    n_chunks: int
    n_packs: int
    own_rows: int
    chunk: Pass
    pack: Pass
    pack_tokens: int

    @classmethod
    def of(cls, request: PlanRequest, facts: ModelFacts, options: Options) -> Schedule:
        ranks, prefix = options.context_parallel_size, request.prompt_tokens - 1
        least = min_forward_tokens(facts.specs)
        bounds = chunk_bounds(prefix, options.chunk_tokens, least)
        before = bounds[-2]
        n_rows = max(1, min(request.group, (options.replay_tokens or 0) // request.response_tokens))
        responses = max(request.response_tokens, least)

        def run(n_rows: int, width: int, n_before: int, *, accumulate: bool, state_only: bool) -> Pass:
            return Pass(
                n_rows=n_rows,
                width=max(least, -(-width // ranks)),
                resident=-(-n_before // ranks),
                prefix=n_before,
                page_tokens=options.page_tokens,
                accumulate=accumulate,
                state_only=state_only,
                ranks=ranks,
                expert_ranks=options.expert_parallel_size,
            )

        widest = max(end - start for start, end in pairwise(bounds))
        phases = ["capture", *(["sample"] if request.sampled else []), "score", "replay"]
        return cls(
            phases=(*phases, "sweep") if request.collects else tuple(phases),
            n_chunks=len(bounds) - 1,
            n_packs=-(-request.group // n_rows),
            own_rows=-(-prefix // ranks),
            chunk=run(1, widest, before, accumulate=False, state_only=True),
            pack=run(n_rows, responses, prefix, accumulate=request.collects, state_only=False),
            pack_tokens=n_rows * responses,
        )

    def stored(self, facts: ModelFacts, num: Numbers) -> float:
        """Bytes that a chunk's forward hands to the state."""
        books = ledgers(facts, self.chunk, num)
        return sum(book.produced for book in books) + books[-1].y.n_bytes


def ledgers(facts: ModelFacts, run: Pass, num: Numbers) -> list[Ledger]:
    """One per decoder layer; layers of a kind share theirs."""
    config, made = facts.config, {}
    kinds = []
    for layer, states in enumerate(facts.layers):
        experts = facts.is_sparse and config.mlp_layer_types[layer] == "sparse"
        unused = states == ("kv",) and run.state_only and layer == len(facts.layers) - 1
        kinds.append((states, experts, unused))
    for kind in dict.fromkeys(kinds):
        states, experts, unused = kind
        if "mla_latent" in states:
            made[kind] = sparse_layer(config, run, num, selects="indexer_key" in states, experts=experts)
        elif "recurrent" in states:
            made[kind] = delta_layer(config, run, num)
        else:
            made[kind] = attention_layer(config, run, num, unused=unused)
    return [made[kind] for kind in kinds]


def _work(
    phase: str, schedule: Schedule, facts: ModelFacts, request: PlanRequest, num: Numbers, held: StateBytes
) -> dict[str, float]:
    """Branch, scoring and communication of one phase."""
    run = schedule.chunk if phase in ("capture", "sweep") else schedule.pack
    head = 0.0 if phase in ("capture", "sweep") else head_bytes(facts, run.n_tokens, num)
    whole = _peak(phase, schedule, facts, request, num, held, run, head)
    scored = whole - _peak(phase, schedule, facts, request, num, held, run, 0.0) if head else 0.0
    alone = whole
    if run.ranks > 1:
        alone = _peak(phase, schedule, facts, request, num, held, replace(run, ranks=1, expert_ranks=1), head)
    return {"branch": alone - scored, "scoring": scored, "communication": max(0.0, whole - alone)}


def head_bytes(facts: ModelFacts, n_tokens: int, num: Numbers) -> float:
    """Of the LM head on `n_tokens`, beside their hidden state."""
    vocab, hidden = facts.config.vocab_size, facts.config.hidden_size
    tile = min(n_tokens, max(1, MAX_TILE_ELEMENTS // vocab))
    return 2.0 * n_tokens * hidden * num.model + tile * vocab * (num.model + 3.0 * num.sums)


def _peak(
    phase: str,
    schedule: Schedule,
    facts: ModelFacts,
    request: PlanRequest,
    num: Numbers,
    held: StateBytes,
    run: Pass,
    head: float,
) -> float:
    if phase == "sample":
        return _sampling_bytes(facts, request, held, num)
    if phase == "sweep":
        run = replace(run, accumulate=True)
    books = ledgers(facts, run, num)
    if phase == "capture":
        return capture_peak(books)
    if phase == "sweep":
        paged = [spec for spec in facts.specs if isinstance(spec, PagedSpec)]
        cotangents = run.width * sum(spec.accumulator_bytes_per_token for spec in paged) + held.boundary
        return sweep_peak(books, cotangents, checkpointing=request.checkpointing)
    copies = run.n_rows * held.boundary if run.n_rows > 1 else 0
    if phase == "score":
        return copies + score_peak(books, head)
    arriving = None
    if request.collects and schedule.n_packs == 1:
        arriving = _accumulators_by_layer(facts, schedule, held)
    return copies + replay_peak(books, head, checkpointing=request.checkpointing, arriving=arriving)


def _accumulators_by_layer(facts: ModelFacts, schedule: Schedule, held: StateBytes) -> Sequence[float]:
    n_recurrent = sum(states == ("recurrent",) for states in facts.layers)
    return [
        float(held.by_layer[layer][1]) if layer in held.by_layer else held.boundary_gradients / n_recurrent
        for layer in range(len(facts.layers))
    ]


def _sampling_bytes(facts: ModelFacts, request: PlanRequest, held: StateBytes, num: Numbers) -> float:
    """What the group decodes is kept per row; logits are float32 in a few copies."""
    rows = sum(spec.bytes_per_token for spec in facts.specs if isinstance(spec, PagedSpec))
    decoded = request.group * (request.response_tokens * rows + held.boundary)
    return decoded + 4.0 * request.group * facts.config.vocab_size * num.sums


def pinned_bytes(facts: ModelFacts, layers: Iterable[int], n_rows: int, page_tokens: int, *, with_sums: bool) -> float:
    """Host memory of the pages of `layers`: PyTorch rounds each pinned allocation up to a power of two."""
    n_pages, away = -(-n_rows // page_tokens), set(layers)
    total = 0
    for spec in facts.specs:
        if isinstance(spec, PagedSpec) and spec.layer in away:
            sizes = [c.n_bytes for c in spec.components]
            sizes += [c.accumulator_bytes for c in spec.components if c.differentiable and with_sums]
            total += sum(n_pages * (1 << (page_tokens * size - 1).bit_length()) for size in sizes)
    return float(total)
