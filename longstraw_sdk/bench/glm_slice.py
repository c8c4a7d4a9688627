"""Some layers of the true GLM-5.2 geometry behind prompts that nobody had to forward, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..adapter import StateView, adapter_for
from ..bound import bind_model
from ..evidence.machine import describe_machine
from ..lora import base_model_of
from ..planner.geometry import GLM52, LORA_RANK, TINY_GLM52, Geometry
from ..state import PagePool, ResidentState
from ..types import CausalLM
from .device import GIB, require_cuda, synchronize
from .layer_result import LayerResult, LayerRow
from .result import Progress
from .roofline import product_ceiling
from .simulated_rank import fill_state

NEEDED_BYTES = 130 * GIB


@dataclass(frozen=True, kw_only=True)
class SlicePlan:
    """What a preset measures: a forward of `chunk_tokens` behind prompts of `depths`, in ascending order.

    Args:
        n_units: how many units of the geometry follow its front.
        expert_ranks: of so many equal parts of the experts one is there.
        stock_depth: where transformers' own layers are measured too.
    """

    preset: str
    geometry: Geometry
    n_units: int
    expert_ranks: int
    depths: tuple[int, ...]
    stock_depth: int
    chunk_tokens: int
    page_tokens: int
    n_runs: int
    device: torch.device


def h200_glm_slice(progress: Progress) -> Iterator[LayerResult]:
    """Ten layers behind up to 1,048,576 tokens on one H200, with 8 of 256 experts."""
    yield from measure_slice(
        SlicePlan(
            preset="h200-glm-slice",
            geometry=GLM52,
            n_units=1,
            expert_ranks=32,
            depths=(8192, 131_072, 1_048_576),
            stock_depth=8192,
            chunk_tokens=8192,
            page_tokens=4096,
            n_runs=2,
            device=require_cuda("h200-glm-slice", NEEDED_BYTES, "cpu-glm-slice"),
        ),
        progress,
    )


def cpu_glm_slice(progress: Progress) -> Iterator[LayerResult]:
    """The same of a tiny model on a CPU."""
    yield from measure_slice(
        SlicePlan(
            preset="cpu-glm-slice",
            geometry=TINY_GLM52,
            n_units=1,
            expert_ranks=1,
            depths=(256, 4096),
            stock_depth=256,
            chunk_tokens=256,
            page_tokens=256,
            n_runs=2,
            device=torch.device("cpu"),
        ),
        progress,
    )


def measure_slice(plan: SlicePlan, progress: Progress) -> Iterator[LayerResult]:
    """Yields the result after every depth."""
    model = plan.geometry.build(plan.n_units, plan.expert_ranks, plan.device)
    base = base_model_of(model)
    ceiling = product_ceiling(base.config, plan.geometry.dtype, plan.device, plan.chunk_tokens)
    settings: dict[str, Any] = {
        "geometry": plan.geometry.name,
        "layers": base.config.num_hidden_layers,
        "dtype": str(plan.geometry.dtype),
        "lora_rank": LORA_RANK,
        "chunk_tokens": plan.chunk_tokens,
        "page_tokens": plan.page_tokens,
        "experts": f"one of {plan.expert_ranks} equal parts",
        "product_ceiling": ceiling,
        "resident rows": "random, so that each query selects rows of its own, where those of a text share some",
        "roofline_share": "products of the layer at the measured speed of a large one, divided by its time; gathering "
        "selected rows and finding the best scores count as nothing",
    }
    result = LayerResult(preset=plan.preset, settings=settings, machine=describe_machine(), layers=())
    for system, depth, run in _runs(model, plan):
        rows = _rows(system, depth, _measured(base, run, plan), base, plan, ceiling)
        result = replace(result, layers=(*result.layers, *rows))
        progress(f"{system} behind {depth:,} tokens")
        yield result


Run = Callable[[], object]


def _runs(model: CausalLM, plan: SlicePlan) -> Iterator[tuple[str, int, Run]]:
    """System, depth and the forward of a chunk behind it."""
    base = base_model_of(model)
    ids = torch.randint(0, base.config.vocab_size, (max(plan.depths) + plan.chunk_tokens,), device=plan.device)
    bound = bind_model(model, adapter_for(base))
    state = ResidentState(bound.specs, ids, PagePool(plan.page_tokens), "prompt", plan.device)
    try:
        for depth in plan.depths:
            fill_state(state, bound.specs, depth, plan.chunk_tokens)
            new = ids[None, depth : depth + plan.chunk_tokens]
            view = StateView(state, state.last_boundary)
            yield "longstraw", depth, partial(bound.adapter.forward, base, new, view)
    finally:
        state.release()
        bound.unbind()
    new = ids[None, plan.stock_depth : plan.stock_depth + plan.chunk_tokens]
    yield "transformers", plan.stock_depth, partial(_stock_forward, base, new, plan.stock_depth)


def _stock_forward(base: Any, new: torch.Tensor, depth: int) -> None:
    config, dtype = base.config, base.dtype

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, dtype=dtype, device=new.device)

    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(rows(1, depth, config.kv_lora_rank), rows(1, depth, config.qk_rope_head_dim), layer)
        if config.indexer_types[layer] == "full":
            cache.update_indexer(rows(depth, config.index_head_dim), layer)
    base.base_model(input_ids=new, cache=cache, use_cache=True)


@dataclass
class _Found:
    """Of the fastest run: seconds by layer, and of all runs the largest memory. Empty if it did not fit."""

    seconds: list[float]
    peak_bytes: int | None = None


@torch.no_grad()
def _measured(base: CausalLM, run: Run, plan: SlicePlan) -> _Found:
    """By runs with a clock around every layer, whose waiting for the device costs less than a layer by far."""
    cuda = plan.device.type == "cuda"
    try:
        run()  # kernels are loaded and tuned when they are first used
        if cuda:
            torch.cuda.reset_peak_memory_stats(plan.device)
        runs = []
        for _ in range(plan.n_runs):
            with _timed_layers(base, plan.device) as seconds:
                run()
            runs.append(seconds)
        return _Found(min(runs, key=sum), torch.cuda.max_memory_allocated(plan.device) if cuda else None)
    except torch.cuda.OutOfMemoryError:
        return _Found([])


@contextmanager
def _timed_layers(base: CausalLM, device: torch.device) -> Iterator[list[float]]:
    seconds: list[float] = []
    began = 0.0

    def enter(*args: Any) -> None:
        nonlocal began
        synchronize(device)
        began = time.perf_counter()

    def leave(*args: Any) -> None:
        synchronize(device)
        seconds.append(time.perf_counter() - began)

    hooks = [layer.register_forward_pre_hook(enter) for layer in _layers(base)]
    hooks += [layer.register_forward_hook(leave) for layer in _layers(base)]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def _layers(base: Any) -> list[nn.Module]:
    return list(base.base_model.layers)


def _rows(system: str, depth: int, found: _Found, base: Any, plan: SlicePlan, ceiling: float) -> Iterator[LayerRow]:
    """One row for each kind of layer: the mean of its layers."""
    config = base.config
    kinds = list(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    for kind in dict.fromkeys(kinds):
        places = [i for i, other in enumerate(kinds) if other == kind]
        seconds = sum(found.seconds[i] for i in places) / len(places) if found.seconds else None
        least = layer_flops(config, _layers(base)[places[0]], kind, depth, plan.chunk_tokens) / ceiling
        yield LayerRow(
            system=system,
            layer_kind=f"{_KINDS[kind[0]]}, {_KINDS[kind[1]]}",
            n_layers=len(places),
            prompt_tokens=depth,
            new_tokens=plan.chunk_tokens,
            layer_seconds=seconds,
            chunk_seconds=sum(found.seconds) if found.seconds else None,
            roofline_share=None if seconds is None else least / seconds,
            peak_gib=None if found.peak_bytes is None else found.peak_bytes / GIB,
        )


_KINDS = {"full": "selecting", "shared": "sharing", "sparse": "MoE", "dense": "dense"}


def layer_flops(config: Any, layer: nn.Module, kind: tuple[str, str], depth: int, n_new: int) -> float:
    """Products of a forward of `n_new` tokens behind `depth` others; each attends to `index_topk` tokens at most."""
    linears = sum(
        module.weight.numel()
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name and ".experts" not in name
    )
    if kind[1] == "sparse":
        linears += 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    seen = depth + n_new / 2
    scored = config.index_n_heads * config.index_head_dim * seen if kind[0] == "full" else 0.0
    widths = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    attended = config.num_attention_heads * widths * min(config.index_topk, seen)
    return 2.0 * n_new * (linears + scored + attended)
