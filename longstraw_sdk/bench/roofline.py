"""The fastest that a device does the work of a GRPO group: what a measured time is a share of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..planner.work import Ceilings
from .device import fastest_attention, seconds_of


def measure_ceilings(config: Any, dtype: torch.dtype, device: torch.device, n_tokens: int) -> Ceilings:
    """Of products [n, hidden] x [hidden, intermediate] and of `n` tokens of one layer's attention."""
    products = product_ceiling(config, dtype, device, n_tokens)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads
    q, k, v = (
        torch.randn(1, n, n_tokens, head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    with torch.no_grad():
        forward = best_seconds(lambda: _attention(q, k, v), device)
    out = _attention(q, k, v)
    d_out = torch.randn_like(out)
    backward = best_seconds(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), device)
    pairs = heads * head_dim * n_tokens**2 / 2
    return Ceilings(products, 4.0 * pairs / forward, 10.0 * pairs / backward)


def product_ceiling(config: Any, dtype: torch.dtype, device: torch.device, n_tokens: int) -> float:
    """FLOP/s of a product [n, hidden] x [hidden, intermediate]."""
    hidden, wide = config.hidden_size, config.intermediate_size
    a, b = (torch.randn(s, device=device, dtype=dtype) for s in ((n_tokens, hidden), (hidden, wide)))
    return 2.0 * n_tokens * hidden * wide / best_seconds(lambda: a @ b, device)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with fastest_attention():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def best_seconds(run: Callable[[], object], device: torch.device, n_runs: int = 5) -> float:
    run()
    return min(seconds_of(run, device) for _ in range(n_runs))
