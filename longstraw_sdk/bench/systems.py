"""Systems that take one optimizer step on a GRPO group: ours, and what people run today."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ..backends.ranks import n_processes, start_processes
from ..evidence.memory import trace_memory
from ..lora import base_model_of
from ..ops import selective_log_probs
from ..session import LongStrawSession
from ..state import ContextGroup
from ..types import CausalLM, GradientScope
from .device import fastest_attention, synchronize


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt of `prompt_tokens` and `size` responses of `response_tokens` each, with their advantages."""

    prompt_tokens: int
    size: int
    response_tokens: int
    seed: int = 0

    def draw(self, model: CausalLM) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Random ids [P] and `size` times [R], and advantages [G]."""
        embeddings = base_model_of(model).get_input_embeddings()
        generator = torch.Generator().manual_seed(self.seed)

        def ids(n: int) -> torch.Tensor:
            return torch.randint(0, embeddings.num_embeddings, (n,), generator=generator).to(embeddings.weight.device)

        rows = [ids(self.response_tokens) for _ in range(self.size)]
        return ids(self.prompt_tokens), rows, torch.randn(self.size, generator=generator).to(embeddings.weight.device)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How our own steps run."""

    chunk_tokens: int
    page_tokens: int
    sampled_tokens: int = 0
    """Tokens that a step samples of each response before it scores and replays the drawn ones; 0 samples none."""
    ranks: int = 1
    """Ranks of a context. 1 under a launcher lets every rank take the step by itself."""


@dataclass
class Phases:
    """Seconds by phase, what came from other ranks in it, and bytes of the resident state after capture."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    state_bytes: int | None = None
    context: ContextGroup | None = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        context = self.context
        if context is not None:
            context.agree(True)  # all begin together
        received = 0 if context is None else context.received_bytes
        synchronize(self.device)
        began = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        if context is not None:
            received = context.received_bytes - received
            self.received_bytes[name] = self.received_bytes.get(name, 0) + received


Step = Callable[[CausalLM, Group, Phases], None]
"""Accumulates the gradient of one group in the LoRA weights of the model."""


def longstraw_step(scope: GradientScope, replay_tokens: int | None, options: Options) -> Step:
    """Capture, replays of `replay_tokens` at a time (None: one response), sweep in full scope."""

    def run(model: CausalLM, group: Group, phases: Phases) -> None:
        prompt, rows, advantages = group.draw(model)
        n_packed = max(1, (replay_tokens or 0) // group.response_tokens)
        with LongStrawSession(
            model,
            gradient_scope=scope,
            chunk_tokens=options.chunk_tokens,
            page_tokens=options.page_tokens,
            replay_tokens=replay_tokens,
            context_parallel_size=options.ranks,
            probe=False,
        ) as session:
            phases.context = session.backend.context
            with phases.timed("capture"):
                prefix = session.capture(prompt)
            phases.state_bytes = prefix.n_bytes
            if options.sampled_tokens:
                with phases.timed("sample"):
                    prefix.sample(group.size, max_new_tokens=options.sampled_tokens, seed=group.seed)
            with phases.timed("replay"):
                for start in range(0, group.size, n_packed):
                    outs = prefix.replay_packed(rows[start : start + n_packed])
                    weights = advantages[start : start + n_packed]
                    torch.stack([-w * out.logps.mean() for w, out in zip(weights, outs, strict=True)]).sum().backward()
                    del outs
            if scope == "full":
                with phases.timed("sweep"):
                    prefix.sweep()
            prefix.release()
            with phases.timed("finalize"):
                session.finalize()

    return run


def transformers_step(model: CausalLM, group: Group, phases: Phases) -> None:
    """Each response behind the whole prompt, one at a time, with the checkpointing that the model has switched on."""
    prompt, rows, advantages = group.draw(model)
    base = base_model_of(model)
    with phases.timed("replay"), fastest_attention():
        for row, advantage in zip(rows, advantages, strict=True):
            hidden = base.base_model(input_ids=torch.cat([prompt, row])[None], use_cache=False).last_hidden_state
            _weighted(base, hidden[0, len(prompt) - 1 : -1], row, advantage).backward()
            del hidden


def prefix_grouper_step(model: CausalLM, group: Group, phases: Phases) -> None:
    """PrefixGrouper 0.0.1: the prompt and all responses as one sequence, the prompt's keys repeated per response."""
    from prefix_grouper import PrefixGrouper
    from transformers import AttentionInterface

    AttentionInterface.register(_GROUPED, _grouped_attention)
    prompt, rows, advantages = group.draw(model)
    base = base_model_of(model)
    n_prompt, n_response, device = len(prompt), group.response_tokens, prompt.device
    masks = [torch.ones(shape, dtype=torch.long, device=device) for shape in ((1, n_prompt), (group.size, n_response))]
    grouper = PrefixGrouper.from_ungrouped_masks(*masks, group_sizes=group.size, padding_mode="right", device=device)
    behind = torch.arange(n_prompt, n_prompt + n_response, device=device).repeat(group.size)
    positions = torch.cat([torch.arange(n_prompt, device=device), behind])[None]
    stock = base.config._attn_implementation
    base.set_attn_implementation(_GROUPED)
    try:
        with phases.timed("replay"), fastest_attention():
            hidden = base.base_model(
                input_ids=torch.cat([prompt, *rows])[None],
                position_ids=positions,
                attention_mask={"full_attention": None},
                use_cache=False,
                prefix_grouper=grouper,
            ).last_hidden_state[0]
            own = hidden[n_prompt:].unflatten(0, (group.size, n_response))
            last = hidden[n_prompt - 1 : n_prompt]
            losses = [
                _weighted(base, torch.cat([last, h[:-1]]), row, advantage)
                for h, row, advantage in zip(own, rows, advantages, strict=True)
            ]
            torch.stack(losses).sum().backward()
    finally:
        base.set_attn_implementation(stock)


_GROUPED = "longstraw_bench_prefix_grouper"


def _grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    prefix_grouper: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Its own registered function passes padding masks to FlashAttention 2; rows are unpadded here, so PyTorch's do."""
    from prefix_grouper import AttentionForward

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = None if q.shape[2] == k.shape[2] else _lower_right(q, k)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    return AttentionForward(causal)(prefix_grouper, query, key, value), None


def _lower_right(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The causal mask whose last query sees every key: on CUDA one that fused kernels know."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if q.is_cuda:
        return causal_lower_right(n_queries, n_keys)
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)


def _weighted(base: Any, hidden: torch.Tensor, row: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    head = base.get_output_embeddings()
    logps, _ = selective_log_probs(hidden, row, head, head.weight.shape[0], 1.0)
    return -advantage * logps.mean()


@dataclass(frozen=True)
class Measured:
    """Seconds by phase, and the largest memory of a step with weights, LoRA and gradients; None if it did not fit.

    `weights_bytes` are those of the model with LoRA, `state_bytes` those of a captured prompt on this rank,
    `received_bytes` came from other ranks, by phase.
    """

    seconds: dict[str, float]
    peak_bytes: int | None
    weights_bytes: int
    state_bytes: int | None = None
    received_bytes: dict[str, int] = field(default_factory=dict)


def measure(model: CausalLM, step: Step, warm_up: Group, group: Group) -> Measured:
    """Take `step` after a warm-up, with memory watched: in the same run on CUDA, in one of its own on a CPU."""
    device = base_model_of(model).get_input_embeddings().weight.device
    weights = sum(p.nbytes for p in model.parameters())
    try:
        _clean(model)
        step(model, warm_up, Phases(device))
        _clean(model)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            phases = Phases(device)
            step(model, group, phases)
            peak = torch.cuda.max_memory_allocated(device)
            return Measured(phases.seconds, peak, weights, phases.state_bytes, phases.received_bytes)
        with trace_memory() as trace:
            step(model, group, Phases(device))
        _clean(model)
        phases = Phases(device)  # again without the trace, which slows every operation
        step(model, group, phases)
        peak = weights + trace.peak_bytes
        return Measured(phases.seconds, peak, weights, phases.state_bytes, phases.received_bytes)
    except torch.cuda.OutOfMemoryError:
        return Measured({}, None, weights)
    finally:
        _clean(model)


def slowest_rank(found: Measured) -> Measured:
    """The most that any process measured, by phase and of memory. Every process calls it."""
    if n_processes() == 1:
        return found
    start_processes()
    ranks: list[Any] = [None] * n_processes()
    dist.all_gather_object(ranks, found)
    if any(rank.peak_bytes is None for rank in ranks):
        return replace(found, seconds={}, peak_bytes=None)

    def most(name: str) -> dict[str, Any]:
        return {phase: max(getattr(rank, name)[phase] for rank in ranks) for phase in getattr(found, name)}

    return replace(
        found,
        seconds=most("seconds"),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        received_bytes=most("received_bytes"),
    )


def _clean(model: CausalLM) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
