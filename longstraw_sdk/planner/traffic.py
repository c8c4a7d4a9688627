"""Bytes that one rank of a context receives, as `ops/prefix_attention.py` and its neighbours send them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .model_facts import ModelFacts
from .passes import Numbers, Pass
from .sparse_layers import distinct_rows


def received(facts: ModelFacts, run: Pass, num: Numbers, *, backward: bool, again: bool) -> float:
    """Of one pass through all layers; with `backward` of its backward too, `again` if that forwards layers again."""
    if run.ranks == 1 and run.expert_ranks == 1:
        return 0.0
    config, total = facts.config, 0.0
    kinds = [
        (states, facts.is_sparse and config.mlp_layer_types[layer] == "sparse")
        for layer, states in enumerate(facts.layers)
    ]
    if run.state_only and kinds[-1][0] == ("kv",):
        del kinds[-1]  # a last layer that only fills a state does not attend
    for (states, experts), n_layers in Counter(kinds).items():
        if "mla_latent" in states:
            selects = "indexer_key" in states
            each = _sparse(config, run, num, selects=selects, experts=experts, backward=backward, again=again)
        elif "recurrent" in states:
            heads = config.linear_num_value_heads
            dim_k, dim_v = config.linear_key_head_dim, config.linear_value_head_dim
            maps = run.n_rows * heads * dim_k * (dim_k + dim_v) * num.sums
            each = (run.ranks - 1) * maps * (1.0 + backward + (backward and again))
        else:
            each = _attention(config, run, num, backward=backward)
        total += n_layers * each
    return total


def _attention(config: Any, run: Pass, num: Numbers, *, backward: bool) -> float:
    """Queries go to the pages and results come back; new keys and values go to the ranks behind."""
    n_heads: int = config.num_attention_heads
    n_kv: int = config.num_key_value_heads
    hidden: int = config.hidden_size
    dim = getattr(config, "head_dim", None) or hidden // n_heads
    q, kv = n_heads * dim, 2 * n_kv * dim
    per_token = (q + kv) * num.model + (q + n_heads) * num.sums
    if backward:
        with_out = num.fused and run.accumulate
        per_token += (2 + with_out) * q * num.model + 2 * n_heads * num.sums + q * num.sums
        per_token += kv * (num.model + num.sums)
    return (run.ranks - 1) * run.n_tokens * float(per_token)


def _sparse(
    config: Any, run: Pass, num: Numbers, *, selects: bool, experts: bool, backward: bool, again: bool
) -> float:
    c, n, others = config, run.n_tokens, run.ranks - 1
    width = c.kv_lora_rank + c.qk_rope_head_dim
    top_k = min(c.index_topk, run.prefix + run.width * run.ranks)
    asked = distinct_rows(n * top_k, run.prefix) * others / run.ranks
    rows = asked * (width * num.model + 8)
    new = others * n * width
    forward = rows + new * num.model
    total = forward * (1 + (backward and again))
    if selects:
        heads, dim = c.index_n_heads, c.index_head_dim
        total += others * n * (heads * (dim * num.model + 4) + dim * num.model + top_k * 8)
    if backward:
        total += forward + new * num.sums + (asked * width * num.sums if run.accumulate else 0)
    if experts and run.expert_ranks > 1:
        sent = n * c.num_experts_per_tok * c.hidden_size
        once = sent * (num.model + num.sums) * (run.expert_ranks - 1) / run.expert_ranks
        total += once * (1 + backward + (backward and again))
    return float(total)
