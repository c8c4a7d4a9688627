"""What the planner tries, the preferred first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TypeVar

from ..errors import ConfigurationError
from ..state import min_forward_tokens
from .model_facts import ModelFacts
from .request import Options, PlanRequest, Tier

T = TypeVar("T")

CHUNKS = (8192, 16384, 32768, 4096, 2048, 1024)
"""8,192 is what was measured. Larger ones leave fewer recurrent states behind, smaller ones need less at once."""

PAGES = (4096,)

PACKS = (4096, 2048, 1024)
"""Response tokens of a pack; small ones waste the device (benchmarks/README.md)."""

TIERS: tuple[Tier, ...] = ("cuda", "split", "cpu")


def grain(request: PlanRequest) -> int:
    """The step in which prompts are searched: the smallest chunk that may be chosen."""
    return request.chunk_tokens or min(CHUNKS)


def candidates(request: PlanRequest, facts: ModelFacts) -> Iterator[Options]:
    """Every combination that the session would accept."""
    chunks = _or_given(request.chunk_tokens, CHUNKS)
    pages = _or_given(request.page_tokens, PAGES)
    tiers = _or_given(request.tier, TIERS if request.host_bytes else ("cuda",))
    for context, experts in _sizes(request, facts):
        for tier, chunk, page, pack in product(tiers, chunks, pages, _packs(request)):
            yield Options(
                chunk_tokens=max(chunk, min_forward_tokens(facts.specs)),
                page_tokens=page,
                replay_tokens=pack,
                tier=tier,
                context_parallel_size=context,
                expert_parallel_size=experts,
            )


def _or_given(given: T | None, choices: tuple[T, ...]) -> tuple[T, ...]:
    return choices if given is None else (given,)


def _packs(request: PlanRequest) -> tuple[int | None, ...]:
    """Packs that differ in how many responses they hold; None is one at a time."""
    if request.replay_tokens is not None:
        return (request.replay_tokens,)
    found: dict[int, int | None] = {}
    for tokens in PACKS:
        n_rows = min(request.group, tokens // request.response_tokens)
        if n_rows > 1:
            found.setdefault(n_rows, tokens)
    return (*found.values(), None)


def _sizes(request: PlanRequest, facts: ModelFacts) -> list[tuple[int, int]]:
    """Context and expert sizes: powers of two that divide the GPUs, the one dividing the other or a multiple of it."""
    powers = [2**i for i in range(request.gpus.bit_length()) if request.gpus % 2**i == 0]
    contexts = _or_given(request.context_parallel_size, tuple(powers) if facts.context_parallel else (1,))
    spread = facts.expert_parallel and facts.n_experts
    experts = _or_given(request.expert_parallel_size, tuple(powers) if spread else (1,))
    found = [
        (context, size)
        for context, size in product(contexts, experts)
        if (context % size == 0 or size % context == 0) and (size == 1 or (spread and facts.n_experts % size == 0))
    ]
    if not found or (max(contexts) > 1 and not facts.context_parallel):
        raise ConfigurationError(
            f"context_parallel_size={request.context_parallel_size} and expert_parallel_size="
            f"{request.expert_parallel_size} cannot run {facts.name}: the one must divide the other, and the experts "
            f"({facts.n_experts or 'none'}) must spread evenly"
        )
    return found
