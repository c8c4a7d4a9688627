"""The planner's answer, and how it gets there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import ConfigurationError
from .devices import H200, DeviceProfile
from .links import Links
from .memory import TERMS, MemoryPlan, fixed_bytes, memory_plan
from .model_facts import ModelFacts, model_facts
from .paper import PAPER
from .passes import Numbers
from .request import Options, PlanRequest
from .search import candidates, grain
from .seconds import SecondsPlan, seconds_plan

GIB = 2**30

RESERVED_BYTES, RESERVED_SHARE = 2 * GIB, 0.02
"""CUDA context, libraries and blocks of the allocator that stay unused: an assumption, which no result measured."""

LONGEST_PROMPT = 2**26
"""The search for the largest prompt ends here."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the request runs on, beside its sizes. `reserve` are bytes per GPU, None for the default."""

    device: DeviceProfile = H200
    links: Links = field(default_factory=Links)
    reserve: float | None = None
    kernels: bool = True
    """Whether fused kernels compute where there are some; False plans for plain PyTorch."""

    def reserve_of(self, gpu_bytes: int) -> float:
        return RESERVED_BYTES + RESERVED_SHARE * gpu_bytes if self.reserve is None else self.reserve


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Whether a request fits, how, and how long a step takes.

    Args:
        advice: if it does not fit, what would help, largest effect first.
        searched_prompt: the request asked for the largest prompt, and this plan is of it.
    """

    request: PlanRequest
    facts: ModelFacts
    options: Options
    memory: MemoryPlan
    seconds: SecondsPlan
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    searched_prompt: bool = False

    @property
    def peak_bytes(self) -> float:
        """Of one GPU in the fullest phase."""
        return self.memory.fullest.n_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest phase fits a GPU, and the pages beside it the host."""
        return fits(self.request, self.memory)

    @property
    def short_bytes(self) -> float:
        """By how much a GPU is too small; negative is what is left."""
        return self.peak_bytes - self.request.gpu_bytes

    @property
    def config_arguments(self) -> dict[str, Any]:
        """Arguments of `LongStrawGRPOConfig` that run this plan."""
        return {
            "gradient_scope": self.request.scope,
            "prefix_adapter": self.request.prefix_adapter,
            "num_generations": self.request.group,
            "max_completion_length": self.request.response_tokens,
            "chunk_tokens": self.options.chunk_tokens,
            "page_tokens": self.options.page_tokens,
            "replay_tokens": self.options.replay_tokens,
            "state_device": {"cuda": "cuda", "split": "auto", "cpu": "cpu"}[self.options.tier],
            "context_parallel_size": self.options.context_parallel_size,
            "expert_parallel_size": self.options.expert_parallel_size,
            "gradient_checkpointing": self.request.checkpointing,
        }

    @property
    def paper(self) -> list[dict[str, Any]]:
        """The published rows of this model, each with its ranks and prompt; none of other models."""
        name = published_name(self.facts.config)
        return [
            {"gpus": size, "prompt_tokens": prompt, "figures": figures}
            for (model, size, prompt), figures in PAPER.items()
            if model == name
        ]

    def to_json(self) -> dict[str, Any]:
        fullest = self.memory.fullest
        return {
            "fits": self.fits,
            "peak_gib_per_gpu": self.peak_bytes / GIB,
            "short_gib_per_gpu": max(0.0, self.short_bytes / GIB),
            "host_gib_per_gpu": self.memory.host_bytes / GIB,
            "terms": {
                name: {"gib": fullest.terms[name] / GIB, "bytes": round(fullest.terms[name]), "formula": formula}
                for name, formula in TERMS.items()
            },
            "fullest_phase": fullest.phase,
            "phases": {
                phase.phase: {"gib": phase.n_bytes / GIB, "terms": {n: b / GIB for n, b in phase.terms.items()}}
                for phase in self.memory.phases
            },
            "seconds": {phase.phase: phase.seconds for phase in self.seconds.phases} | {"total": self.seconds.total},
            "seconds_of": {phase.phase: asdict(phase) for phase in self.seconds.phases},
            "seconds_source": self.seconds.source,
            "assumptions": list(self.seconds.assumptions),
            "options": self.config_arguments,
            "host_layers": self.memory.host_layers,
            "prompt_tokens": self.request.prompt_tokens,
            "largest_prompt": self.searched_prompt,
            "advice": list(self.advice),
            "notes": list(self.notes),
            "paper": self.paper,
            "request": asdict(self.request),
        }


def published_name(config: Any) -> str | None:
    """The built-in geometry that a config has the shapes of."""
    from .geometry import GEOMETRIES

    for name, geometry in GEOMETRIES.items():
        shapes = {n: geometry.options[n] for n in ("hidden_size", "intermediate_size", "vocab_size")}
        shapes |= {"model_type": geometry.model_type, "num_hidden_layers": geometry.n_layers(geometry.n_units)}
        if all(getattr(config, n) == value for n, value in shapes.items()):
            return name
    return None


def plan(request: PlanRequest, machine: Machine | None = None, facts: ModelFacts | None = None) -> Plan:
    """The fastest way to run `request` that fits, or else the one that misses by least, with advice.

    Fastest means the fewest seconds for one group. Pure: equal requests get equal plans. `facts` of a model at hand
    take the place of what `request.model` names.
    """
    machine = machine or Machine()
    facts = facts or model_facts(request.model, request.lora_rank)
    best = _best(request, facts, machine)
    if not best.fits:
        best = replace(best, advice=tuple(_advice(best, machine)))
    return replace(best, notes=tuple(_notes(best)))


def largest_prompt(request: PlanRequest, machine: Machine | None = None) -> Plan:
    """The plan of the longest prompt that fits, in steps of the smallest chunk; `prompt_tokens` of `request` is unused.

    Raises `ConfigurationError` if not even one chunk fits.
    """
    machine = machine or Machine()
    facts = model_facts(request.model, request.lora_rank)
    step = grain(request)

    def at(n_steps: int) -> Plan:
        return _best(replace(request, prompt_tokens=n_steps * step), facts, machine, any_that_fits=True)

    low, high = 1, LONGEST_PROMPT // step
    first = at(low)
    if not first.fits:
        raise ConfigurationError(
            f"not even a prompt of {step:,} tokens fits: {first.short_bytes / GIB:.1f} GiB are missing per GPU, and "
            f"{_dominant(first)} takes {first.memory.fullest.terms[_dominant(first)] / GIB:.1f} GiB. "
            + " ".join(_advice(first, machine))
        )
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).fits else (low, middle)
    found = plan(replace(request, prompt_tokens=low * step), machine)
    return replace(found, searched_prompt=True)


def fits(request: PlanRequest, memory: MemoryPlan) -> bool:
    """Whether GPU and host are large enough."""
    return memory.fullest.n_bytes <= request.gpu_bytes and memory.host_bytes <= request.host_bytes


def numbers_of(facts: ModelFacts, request: PlanRequest, machine: Machine) -> Numbers:
    return Numbers(
        model=facts.element_bytes,
        sums=facts.sum_bytes,
        lora_rank=request.lora_rank,
        fused=machine.kernels and facts.element_bytes < facts.sum_bytes,
        on_gpu=True,
    )


def _best(request: PlanRequest, facts: ModelFacts, machine: Machine, *, any_that_fits: bool = False) -> Plan:
    num, reserve = numbers_of(facts, request, machine), machine.reserve_of(request.gpu_bytes)
    best: Plan | None = None
    settled: set[tuple[int, int, int | None]] = set()
    for options in candidates(request, facts):
        # Later tiers and chunks of the same ranks and packs are no faster.
        ranks = (options.context_parallel_size, options.expert_parallel_size, options.replay_tokens)
        least = reserve + fixed_bytes(request, facts, options.expert_parallel_size) - request.gpu_bytes
        if ranks in settled or (best is not None and least > _missing(best)):
            continue
        memory = memory_plan(request, facts, options, num, reserve=reserve)
        if fits(request, memory):
            settled.add(ranks)
        elif best is not None and best.fits:
            continue
        seconds = seconds_plan(request, facts, options, num, memory, machine.device, machine.links)
        found = Plan(request=request, facts=facts, options=options, memory=memory, seconds=seconds)
        if best is None or _better(found, best):
            best = found
        if any_that_fits and best.fits:
            break
    assert best is not None, "there is a candidate for every request"
    return best


WORTH_CHANGING = 0.98
"""A later candidate must take less than this part of the seconds: estimates are not finer, and the first ones are those
that were measured."""


def _better(found: Plan, best: Plan) -> bool:
    """What fits is better than what does not; then what is clearly faster, or what misses by less."""
    if found.fits and best.fits:
        return found.seconds.total < WORTH_CHANGING * best.seconds.total
    if found.fits or best.fits:
        return found.fits
    return _missing(found) < _missing(best)


def _missing(found: Plan) -> float:
    return max(0.0, found.short_bytes) + max(0.0, found.memory.host_bytes - found.request.host_bytes)


def _dominant(found: Plan) -> str:
    terms = found.memory.fullest.terms
    return max((name for name in terms if name != "reserve"), key=lambda name: terms[name])


def _advice(found: Plan, machine: Machine) -> Iterator[str]:
    """Changes of the request, one at a time, that were planned and fit; and what they would cost."""
    request = found.request
    tried: list[tuple[str, PlanRequest]] = []
    if not request.checkpointing:
        tried.append(("gradient checkpointing", replace(request, checkpointing=True)))
    if request.collects:
        tried.append(('gradient_scope="response" (a different gradient)', replace(request, scope="response")))
        tried.append(('prefix_adapter="frozen"', replace(request, prefix_adapter="frozen")))
    if request.base_weights != "nf4":
        tried.append(("NF4 base weights (QLoRA)", replace(request, base_weights="nf4")))
    if request.host_bytes == 0:
        tried.append(("256 GiB of host memory per GPU for pages", replace(request, host_bytes=256 * GIB)))
    for factor in (2, 4, 8):
        sizes = replace(request, context_parallel_size=None, expert_parallel_size=None)
        tried.append((f"{factor * request.gpus} GPUs", replace(sizes, gpus=factor * request.gpus)))
    helps = []
    for what, changed in tried:
        better = _best(changed, found.facts, machine, any_that_fits=True)
        if better.fits:
            helps.append((better.peak_bytes, what))
            if what.endswith("GPUs"):
                break
    for peak, what in helps:
        yield f"{what}: fits with {peak / GIB:.1f} GiB per GPU."
    if not helps:
        yield "None of response scope, a frozen prefix, NF4, host memory or eight times the GPUs alone makes it fit."


def _notes(found: Plan) -> Iterator[str]:
    limit = getattr(found.facts.config, "max_position_embeddings", None)
    longest = found.request.prompt_tokens + found.request.response_tokens
    if limit is not None and longest > limit:
        yield (
            f"the model has {limit:,} positions and the text {longest:,}: extend them (PositionConfig), whose quality "
            "nobody vouches for"
        )
    contexts = found.request.gpus // found.options.context_parallel_size
    if contexts > 1:
        yield f"{contexts} contexts take {contexts} groups at a time"
    if found.options.tier == "split":
        yield (
            f'state_device="auto" puts pages of {found.memory.host_layers} of {found.memory.n_layers} layers into host '
            "memory"
        )
