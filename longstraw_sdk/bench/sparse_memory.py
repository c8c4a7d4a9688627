"""Extra memory of one sparse layer behind ever longer prompts, beside transformers' own layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from ..adapter import StateView
from ..evidence.machine import describe_machine
from ..evidence.memory import trace_memory
from ..models.glm52 import GLM52Adapter
from ..state import PagePool, ResidentState
from .result import Measurement, PeakResult, Progress

N_NEW_TOKENS = 64
PAGE_TOKENS = 1024
VOCAB_SIZE = 97
RESIDENT_LENGTHS = (2**14, 2**16, 2**18)
STOCK_LENGTHS = (2**12, 2**14, 2**16)


def one_sparse_layer(seed: int = 0) -> GlmMoeDsaForCausalLM:
    """One GLM-5.2 layer with random weights in float32, 4 heads on latents of 16 numbers, selecting 128 tokens."""
    config = GlmMoeDsaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        index_topk=128,
        index_n_heads=4,
        index_head_dim=16,
        index_topk_pattern="F",
        first_k_dense_replace=1,
        max_position_embeddings=2**19,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    return GlmMoeDsaForCausalLM(config).float().eval().requires_grad_(False)


def resident_layer(model: GlmMoeDsaForCausalLM, n_tokens: int) -> Measurement:
    """A forward of `N_NEW_TOKENS` behind `n_tokens` resident ones."""
    adapter = GLM52Adapter()
    state = ResidentState(
        adapter.state_specs(model),
        torch.zeros(n_tokens, dtype=torch.long),
        PagePool(PAGE_TOKENS),
        "prompt",
        torch.device("cpu"),
    )
    latent, rope, keys = _rows(model.config, n_tokens)
    produced = {(0, "mla_latent"): {"latent": latent, "k_rope": rope}, (0, "indexer_key"): {"key": keys}}
    state.append_chunk(n_tokens, produced, keep_boundaries=False)
    unbind = adapter.bind(model)
    try:
        return _measure("longstraw", n_tokens, lambda: adapter.forward(model, _new_tokens(), StateView(state, 1)))
    finally:
        unbind()
        state.release()


def stock_layer(model: GlmMoeDsaForCausalLM, n_tokens: int) -> Measurement:
    """The same with transformers' own cache and layer."""
    latent, rope, keys = _rows(model.config, n_tokens)

    def forward() -> None:
        cache = DynamicCache(config=model.config)
        cache.update(latent[:, None], rope[:, None], 0)
        cache.update_indexer(keys, 0)
        model(input_ids=_new_tokens(), cache=cache, use_cache=True, logits_to_keep=1)

    return _measure("transformers", n_tokens, forward)


def sparse_memory(progress: Progress) -> Iterator[PeakResult]:
    """The preset: both systems at their lengths. transformers is not taken further, for its memory grows."""
    model = one_sparse_layer()
    measurements = []
    for measure, lengths in ((resident_layer, RESIDENT_LENGTHS), (stock_layer, STOCK_LENGTHS)):
        for n_tokens in lengths:
            measurements.append(measure(model, n_tokens))
            progress(f"{measurements[-1].system} behind {n_tokens:,} tokens")
    config = model.config
    settings: dict[str, Any] = {
        "dtype": "float32",
        "layers": 1,
        "heads": config.num_attention_heads,
        "latent_dim": config.kv_lora_rank,
        "rope_dim": config.qk_rope_head_dim,
        "index_heads": config.index_n_heads,
        "index_topk": config.index_topk,
        "page_tokens": PAGE_TOKENS,
        "attention of transformers": config._attn_implementation,
    }
    yield PeakResult(
        preset="cpu-glm-memory", settings=settings, machine=describe_machine(), measurements=tuple(measurements)
    )


def _rows(config: GlmMoeDsaConfig, n_tokens: int) -> list[torch.Tensor]:
    """Latents, rotary keys and indexer keys of a prompt that nobody had to forward."""
    widths = (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n_tokens, width, generator=generator) for width in widths]


def _new_tokens() -> torch.Tensor:
    return torch.arange(N_NEW_TOKENS)[None] % VOCAB_SIZE


@torch.no_grad()
def _measure(system: str, n_tokens: int, forward: Callable[[], object]) -> Measurement:
    with trace_memory() as trace:
        forward()
    began = time.perf_counter()  # again without the trace, which slows every operation
    forward()
    return Measurement(
        system=system,
        phase="forward",
        prompt_tokens=n_tokens,
        new_tokens=N_NEW_TOKENS,
        seconds=time.perf_counter() - began,
        peak_bytes=trace.peak_bytes,
    )
