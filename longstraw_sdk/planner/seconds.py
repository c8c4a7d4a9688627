"""Seconds of a step by phase: least work over what a device reached on it. Estimates, and they say of what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..state import StateBytes
from .devices import DeviceProfile
from .links import Links
from .memory import MemoryPlan, Schedule
from .model_facts import ModelFacts
from .passes import Numbers
from .request import Options, PlanRequest
from .traffic import received

SPARSE_TOKENS = 8192
"""Tokens of the forward that `SparseSeconds` are of."""


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """One phase on one rank: `compute`, or `staging` of pages from host memory if that takes longer, and then `links`,
    nothing of which is taken to overlap with computing."""

    phase: str
    compute: float
    staging: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.staging) + self.links


@dataclass(frozen=True, kw_only=True)
class SecondsPlan:
    """A step on one group, without the optimizer's own step."""

    phases: tuple[PhaseSeconds, ...]
    source: str
    assumptions: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def seconds_plan(
    request: PlanRequest,
    facts: ModelFacts,
    options: Options,
    num: Numbers,
    memory: MemoryPlan,
    device: DeviceProfile,
    links: Links,
) -> SecondsPlan:
    schedule = Schedule.of(request, facts, options)
    ranks = options.context_parallel_size
    compute = (_sparse if facts.is_sparse else _dense)(request, facts, schedule, device)
    if request.sampled:
        held = StateBytes.of(facts.specs, schedule.own_rows, options.page_tokens)
        read = held.pages / (device.host_bytes if memory.host_layers else device.decode_bytes)
        compute["sample"] = ranks * request.response_tokens * (len(facts.layers) * device.decode_seconds + read)
    traffic = _traffic(request, facts, schedule, num)
    traffic["finalize"] = facts.lora_shared * num.sums * 2 * (ranks - 1) / ranks
    passes = {"capture": schedule.n_chunks / 2, "score": schedule.n_packs, "replay": 2 * schedule.n_packs}
    passes["sweep"] = 2 * schedule.n_chunks / 2  # half of all pages are before a chunk, on average
    size = max(ranks, options.expert_parallel_size)
    phases = tuple(
        PhaseSeconds(
            phase=phase,
            compute=compute.get(phase, 0.0) / ranks,
            staging=passes.get(phase, 0.0) * memory.host_bytes / device.host_bytes,
            links=links.seconds(traffic.get(phase, 0.0), size),
        )
        for phase in (*schedule.phases, "finalize")
    )
    return SecondsPlan(phases=phases, source=device.source, assumptions=tuple(_assumptions(request, facts, options)))


def _dense(request: PlanRequest, facts: ModelFacts, schedule: Schedule, device: DeviceProfile) -> dict[str, float]:
    """Of all ranks together."""
    work, top = facts.work, device.ceilings
    prompt, response, group = request.prompt_tokens, request.response_tokens, request.group
    capture = work.capture(prompt)
    forward = capture.products / (top.products * device.products) + capture.attention / (
        top.attention * device.attention
    )
    again = 2.0 * work.layer_parameters * response if request.checkpointing else 0.0
    replay = work.replay(prompt, response, "full" if request.collects else "response")
    gradient_share = device.all_gradients if request.collects else device.query_gradient
    attended = group * replay.attention / (top.attention * device.attention)
    replays = (
        group * (replay.products + again) / (top.products * device.training_products)
        + attended
        + group * replay.attention_backward / (top.attention_backward * gradient_share)
    )
    least = schedule.n_packs * len(facts.layers) * device.launch_seconds
    scores = group * replay.products / 2 / (top.products * device.products) + attended
    found = {"capture": forward, "score": max(scores, least / 3), "replay": max(replays, least)}
    if request.collects:
        sweep = work.sweep(prompt)
        n_forwards = 2 if request.checkpointing else 1
        found["sweep"] = (
            (n_forwards * capture.products + sweep.products) / (top.products * device.products)
            + capture.attention / (top.attention * device.attention)
            + sweep.attention_backward / (top.attention_backward * device.all_gradients)
        )
    return found


def _sparse(request: PlanRequest, facts: ModelFacts, schedule: Schedule, device: DeviceProfile) -> dict[str, float]:
    """From measured forwards of single layers."""
    kinds = [
        (mlp == "sparse", "indexer_key" in states)
        for mlp, states in zip(facts.config.mlp_layer_types, facts.layers, strict=True)
    ]

    def forward(n_tokens: int, prefix: float) -> float:
        layers = (device.sparse.layer(experts=e, selects=s, n_prefix=prefix) for e, s in kinds)
        return n_tokens / SPARSE_TOKENS * sum(layers)

    prompt, responses = request.prompt_tokens, request.group * request.response_tokens
    backward = 3 if request.checkpointing else 2
    found = {"capture": forward(prompt, prompt / 2), "score": forward(responses, prompt)}
    selected_once = forward(responses, 0)
    found["replay"] = found["score"] + backward * selected_once
    if request.collects:
        found["sweep"] = found["capture"] + backward * forward(prompt, 0)
    return found


def _traffic(request: PlanRequest, facts: ModelFacts, schedule: Schedule, num: Numbers) -> dict[str, float]:
    """Bytes that a rank receives."""
    pack, again = schedule.pack, request.checkpointing
    chunk = replace(schedule.chunk, prefix=schedule.chunk.prefix // 2, resident=schedule.chunk.resident // 2)
    swept = replace(chunk, accumulate=True)
    n_chunks, n_packs = request.prompt_tokens / (chunk.width * chunk.ranks), schedule.n_packs
    found = {
        "capture": n_chunks * received(facts, chunk, num, backward=False, again=False),
        "score": n_packs * received(facts, pack, num, backward=False, again=False),
        "replay": n_packs * received(facts, pack, num, backward=True, again=again),
    }
    if request.collects:
        found["sweep"] = n_chunks * received(facts, swept, num, backward=True, again=again)
    return found


def _assumptions(request: PlanRequest, facts: ModelFacts, options: Options) -> list[str]:
    told = ["seconds are estimates of one group on one context, without the optimizer's step"]
    if facts.is_sparse:
        told.append(
            "GLM-5.2 is planned from forwards of 8,192 tokens through single layers on one H200 (8 of 256 experts); a "
            "backward is taken as two forwards, and its selection as made once"
        )
    elif request.collects:
        told.append("the sweep's speed comes from one measured row (32,768 tokens, full scope)")
    if facts.config.model_type not in ("qwen3_5_text", "glm_moe_dsa"):
        told.append("shares were measured on Qwen3.6-27B and are taken for this model too")
    if request.sampled:
        told.append("sampling was timed once: 32 tokens of 8 rows behind 1,048,576")
    if request.base_weights == "nf4":
        told.append("NF4 products are taken to be as fast as bfloat16's; they are slower, which nobody measured here")
    if max(options.context_parallel_size, options.expert_parallel_size) > 1:
        told.append("ranks divide work evenly; links add to computing, with no overlap, at nominal speeds")
    if options.tier != "cuda":
        told.append("copies from host memory at 51 GB/s overlap with computing")
    return told
