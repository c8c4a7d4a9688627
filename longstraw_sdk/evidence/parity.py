"""Parity: replay against conventional autograd, gradient by gradient.

Each gradient mode has its own conventional reference, one forward of the whole sequence with the whole graph:
`full` plain autograd; `response` the same with the output of every LoRA linear detached at prefix positions; `frozen`
the same with LoRA off at prefix positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..adapter import ResidentStateAdapter
from ..errors import ConfigurationError
from ..hf.positions import extend_as_asked
from ..lora import adapters_disabled, base_model_of, is_lora_parameter, lora_layers
from ..session import LongStrawSession
from ..types import CausalLM, GradientScope, PrefixAdapter
from .float64 import float64_contexts, float64_upcasts

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
GRADIENT_TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
"""Relative L2 over all LoRA gradients. float64 leaves four digits above its rounding for reordered sums; float32
likewise. bfloat16 has no absolute bound: it is held to a multiple of conventional bfloat16's own error."""
BFLOAT16_RATIO = 1.5
BFLOAT16_DRAWS = 8
"""Draws of prompt, responses and weights whose squared errors are averaged on both sides: of one draw, the quotient of
the two errors scattered between 0.5 and 2.3 over 48 draws on a 3-layer Llama, of eight together from 0.8 to 1.3."""


@dataclass(frozen=True)
class ParityCase:
    """One comparison. With `context_parallel_size` every rank calls, and each compares with a reference of its own.

    A model whose experts are spread over ranks has no reference there: compare `replay_run` with that of the whole one.
    """

    dtype: str = "float32"
    gradient_scope: GradientScope = "full"
    prefix_adapter: PrefixAdapter = "live"
    prompt_tokens: int = 100
    response_tokens: tuple[int, ...] = (7, 23, 12, 1)
    chunk_tokens: int = 16
    page_tokens: int = 8
    replay_tokens: int | None = None
    gradient_checkpointing: bool = False
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    seed: int = 0


@dataclass(frozen=True)
class ParityResult:
    """What a comparison found.

    Args:
        logp_error: largest absolute difference of a response log-prob, in nats.
        gradient_error: relative L2 over all LoRA gradients; for bfloat16, of ours to float32, the root mean square over
            `BFLOAT16_DRAWS` draws. The other figures are of the draw with the largest error.
        worst_parameter, worst_error: the LoRA tensor with the largest relative L2 of its own, among those whose
            gradient is not negligible.
        cosine: of the two LoRA gradients.
        allowed: bound on `gradient_error`; for bfloat16 `BFLOAT16_RATIO` times conventional bfloat16's error.
    """

    case: ParityCase
    logp_error: float
    gradient_error: float
    worst_parameter: str
    worst_error: float
    cosine: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.gradient_error <= self.allowed and (
            self.case.dtype == "bfloat16" or self.logp_error <= GRADIENT_TOLERANCE[self.case.dtype]
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


@dataclass(frozen=True)
class _Run:
    logps: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def check_parity(model: CausalLM, case: ParityCase, adapter: ResidentStateAdapter | None = None) -> ParityResult:
    """Compare replay with its conventional reference on a copy of `model` (a LoRA model, any dtype).

    Prompt, responses and the weight of each log-prob in the loss are drawn from `case.seed`. LoRA B matrices must not
    be zero, or half of the gradients are zero on both sides: see `randomize_lora`.

    Replay runs first, so that an adapter that remembers discrete choices has them for the references.
    """
    if case.dtype not in DTYPES:
        raise ConfigurationError(f"dtype {case.dtype!r} is not known; allowed: {', '.join(DTYPES)}")
    if case.dtype != "bfloat16":
        return _check_draw(model, case, adapter)
    draws = [replace(case, seed=case.seed + i) for i in range(BFLOAT16_DRAWS)]
    results = [_check_draw(model, draw, adapter) for draw in draws]
    worst = max(results, key=lambda r: r.gradient_error)
    error, allowed = (_rms(values) for values in zip(*((r.gradient_error, r.allowed) for r in results), strict=True))
    return replace(worst, case=case, gradient_error=error, allowed=allowed)


def _check_draw(model: CausalLM, case: ParityCase, adapter: ResidentStateAdapter | None) -> ParityResult:
    if adapter is not None:
        adapter.forget()
    ours, theirs = _cast(model, case.dtype), _cast(model, case.dtype)
    with float64_upcasts() if case.dtype == "float64" else nullcontext():
        replayed = replay_run(ours, case, adapter)
        reference = conventional_run(theirs, case, adapter)
    if case.dtype != "bfloat16":
        return _compare(case, replayed, reference, GRADIENT_TOLERANCE[case.dtype])
    truth = conventional_run(_cast(_cast(model, "bfloat16"), "float32"), case, adapter)
    own_error = _compare(case, reference, truth, float("inf")).gradient_error
    return _compare(case, replayed, truth, BFLOAT16_RATIO * own_error)


def randomize_lora(model: CausalLM, seed: int = 0, std: float = 0.1) -> None:
    """Fill every LoRA B with noise: PEFT starts at zero, where LoRA A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
            parameter.data.copy_(noise)


def conventional_run(model: CausalLM, case: ParityCase, adapter: ResidentStateAdapter | None = None) -> _Run:
    """Log-probs and LoRA gradients of one full-sequence forward and backward per response.

    With `adapter`, the stock model makes the discrete choices that the adapter remembers.
    """
    prompt, rows, weights = _draw(model, case)
    n_prefix = len(prompt) - 1
    base = base_model_of(model)
    if case.prefix_adapter == "frozen":
        mode = "frozen"
    else:
        mode = case.gradient_scope
    logps = []
    for row, weight in zip(rows, weights, strict=True):
        choices = nullcontext() if adapter is None else adapter.reference(base, torch.cat([prompt, row]))
        with choices, _at_prefix(model, mode, n_prefix):
            if mode != "full" and getattr(base.config, "kv_lora_rank", None):
                logits = _continued_logits(model, mode, prompt, row)
            else:
                logits = base(input_ids=torch.cat([prompt, row])[None], use_cache=False).logits[:, n_prefix:]
            scores = torch.log_softmax(logits[0, :-1].float(), -1).gather(-1, row[:, None])[:, 0]
            (scores * weight.to(scores.dtype)).sum().backward()
        logps.append(scores.detach())
    return _Run(logps, _gradients(model))


def replay_run(
    model: CausalLM,
    case: ParityCase,
    adapter: ResidentStateAdapter | None = None,
    order: Callable[[int], Sequence[int]] = range,
) -> _Run:
    """The same through a session. `order` permutes the responses before they are replayed."""
    prompt, rows, weights = _draw(model, case)
    rows, weights = [rows[i] for i in order(len(rows))], [weights[i] for i in order(len(weights))]
    if case.gradient_checkpointing:
        options = {"use_reentrant": False} | ({"context_fn": float64_contexts} if case.dtype == "float64" else {})
        base_model_of(model).activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    model.train()
    session = LongStrawSession(
        model,
        adapter,
        gradient_scope=case.gradient_scope,
        prefix_adapter=case.prefix_adapter,
        chunk_tokens=case.chunk_tokens,
        page_tokens=case.page_tokens,
        replay_tokens=case.replay_tokens,
        context_parallel_size=case.context_parallel_size,
        expert_parallel_size=case.expert_parallel_size,
        poison=True,
        verify_content=True,
    )
    with session:
        with session.capture(prompt) as prefix:
            outs = prefix.replay_packed(rows)
            losses = [(out.logps * w.to(out.logps.dtype)).sum() for out, w in zip(outs, weights, strict=True)]
            torch.stack(losses).sum().backward()
        session.finalize()
        if session.backend.context is not None:
            session.adapter.share_choices(session.backend.context)  # for the references, which run all tokens
    return _Run([out.logps.detach() for out in outs], _gradients(model))


def _draw(model: CausalLM, case: ParityCase) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(case.seed)
    embeddings = base_model_of(model).get_input_embeddings()
    vocab, device = embeddings.num_embeddings, embeddings.weight.device
    prompt = torch.randint(0, vocab, (case.prompt_tokens,), generator=generator).to(device)
    rows = [torch.randint(0, vocab, (n,), generator=generator).to(device) for n in case.response_tokens]
    weights = [torch.randn(n, generator=generator).to(device) for n in case.response_tokens]
    return prompt, rows, weights


@contextmanager
def _at_prefix(model: CausalLM, mode: str, n_prefix: int) -> Iterator[None]:
    """Hooks that make a full-sequence forward treat prefix positions as `mode` asks."""

    def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        before = output[:, :n_prefix].detach() if mode == "response" else module.base_layer(args[0])[:, :n_prefix]
        return torch.cat([before, output[:, n_prefix:]], 1)

    latent = getattr(base_model_of(model).config, "kv_lora_rank", None)
    handles = [] if mode == "full" or latent else [layer.register_forward_hook(hook) for layer in lora_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _continued_logits(model: CausalLM, mode: str, prompt: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Logits [1, 1 + R, V] of `[prompt[-1]] + row` behind a stock cache that was filled without a graph.

    For latent attention, whose `kv_b_proj` reads the prompt's latents again in every response: there the LoRA layers'
    outputs at prefix positions are not the prompt's state, the cache is.
    """
    from transformers import DynamicCache

    base = base_model_of(model)
    cache = DynamicCache(config=base.config)
    if len(prompt) > 1:
        with torch.no_grad(), adapters_disabled(model) if mode == "frozen" else nullcontext():
            base(input_ids=prompt[None, :-1], cache=cache, use_cache=True)
    return base(input_ids=torch.cat([prompt[-1:], row])[None], cache=cache, use_cache=True).logits


def _cast(model: CausalLM, dtype: str) -> CausalLM:
    """A copy with weights in `dtype`; under bfloat16 LoRA stays in float32, as PEFT keeps it.

    Positions are as the environment asks: it would extend those of a session, and so must those of the reference be.
    """
    clone = copy.deepcopy(model)
    extend_as_asked(clone)
    if dtype != "bfloat16":
        return clone.to(DTYPES[dtype])
    for name, tensor in [*clone.named_parameters(), *clone.named_buffers()]:
        if tensor.is_floating_point() and not is_lora_parameter(name):
            tensor.data = tensor.data.to(torch.bfloat16)
    return clone


def _gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad.detach()).double()
        for name, p in model.named_parameters()
        if is_lora_parameter(name) and p.requires_grad
    }


def _compare(case: ParityCase, found: _Run, wanted: _Run, allowed: float) -> ParityResult:
    logp_error = max(float((a - b).abs().max()) for a, b in zip(found.logps, wanted.logps, strict=True))
    names = list(wanted.gradients)
    ours = torch.cat([found.gradients[n].flatten() for n in names])
    theirs = torch.cat([wanted.gradients[n].flatten() for n in names])
    norm = float(theirs.norm())
    errors = {
        n: relative_l2(found.gradients[n], wanted.gradients[n])
        for n in names
        if float(wanted.gradients[n].norm()) > 1e-6 * norm
    }
    worst = max(errors, key=lambda n: errors[n])
    cosine = float(torch.dot(ours, theirs) / (ours.norm() * theirs.norm()))
    return ParityResult(case, logp_error, relative_l2(ours, theirs), worst, errors[worst], cosine, allowed)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return float((found - wanted).norm() / wanted.norm())


def worst_of(results: Sequence[ParityResult]) -> ParityResult:
    """The result that comes closest to, or passes furthest over, what is allowed."""
    return max(results, key=lambda r: r.gradient_error / r.allowed)
