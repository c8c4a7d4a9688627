"""The attention layer that reads resident latents, and the reversible swap that puts it in place.

Without a resident cache a swapped layer is the stock layer. With one it selects from the pages, gathers what was
selected and attends in latent space, so that neither scores nor keys of the whole prefix ever exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaIndexer,
    apply_rotary_pos_emb_interleave,
)

from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.hf.swap import swap_classes
from longstraw_sdk.ops import select_top_k, select_top_k_over_ranks, sparse_latent_attention
from longstraw_sdk.types import accumulation_dtype

from .cache import LatentCache, LatentLayer
from .tape import DecisionTape


class ResidentGlmMoeDsaAttention(GlmMoeDsaAttention):
    """`GlmMoeDsaAttention` that can continue a resident prefix."""

    tape: DecisionTape

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        prev_topk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if not isinstance(cache, LatentCache):
            self.tape.current = self.tape.stock_pass
            return super().forward(
                hidden_states,
                position_embeddings,
                attention_mask,
                cache=cache,
                position_ids=position_ids,
                prev_topk_indices=prev_topk_indices,
                **kwargs,
            )
        self.tape.current = cache.tape_pass
        layer: LatentLayer = cache.layers[self.layer_idx]
        heads = (*hidden_states.shape[:2], self.num_heads, -1)
        residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query, query_rope = (
            self.q_b_proj(residual).view(heads).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        )
        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        query_rope, key_rope = apply_rotary_pos_emb_interleave(
            query_rope, key_rope.unsqueeze(2), *position_embeddings, unsqueeze_dim=2
        )
        first = layer.get_seq_length()
        latents, keys_rope = layer.append(
            layer.latent_key, latent=self.kv_a_layernorm(latent), k_rope=key_rope.squeeze(2)
        )
        if self.indexer is None:
            assert prev_topk_indices is not None, "the first layer has an indexer: checked at construction"
            selected = prev_topk_indices
        elif layer.selected is not None:
            selected = layer.selected
        else:
            first += 0 if cache.part is None else cache.part.start
            selected = _select(self.indexer, hidden_states, residual, position_embeddings, layer, first)
            if cache.tape_pass is not None:
                selected = cache.tape_pass.decide("selection", self.layer_idx, selected)
            if torch.is_grad_enabled():
                layer.selected = selected
        w_key, w_value, factors = _absorbed(self, query.dtype)
        attended = sparse_latent_attention(
            _into_latent(query, w_key, [(scale, a, b[:, : self.qk_nope_head_dim]) for scale, a, b in factors]),
            query_rope,
            latents,
            keys_rope,
            selected,
            layer.latents,
            self.scaling,
        )
        out = _out_of_latent(attended, w_value, [(scale, a, b[:, self.qk_nope_head_dim :]) for scale, a, b in factors])
        return self.o_proj(out.to(hidden_states.dtype).flatten(2)), None, selected


@torch.no_grad()
def _select(
    indexer: GlmMoeDsaIndexer,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    layer: LatentLayer,
    first: int,
) -> torch.Tensor:
    """Selected positions [B, S, K] by the layer's own indexer, as `GlmMoeDsaIndexer.forward` computes them."""
    query, key, weights = indexer_projections(indexer, hidden, residual, position_embeddings)
    (keys,) = layer.append(layer.indexer_key, key=key)
    assert layer.index is not None, "the layer has an indexer"
    asked = (query, weights, torch.arange(first, first + hidden.shape[1], device=hidden.device))
    limits = (indexer.index_topk, indexer.softmax_scale)
    if layer.index.context is None:
        return select_top_k(*asked, layer.index_tiles(keys), *limits)
    tiles = (layer.resident_tiles(), layer.new_tiles(keys))
    return select_top_k_over_ranks(*asked, *tiles, *limits, layer.index.context, split=layer.index.split)


def indexer_projections(
    indexer: GlmMoeDsaIndexer,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, S, H, D], keys [B, S, D] and head weights [B, S, H] of an indexer, with gradient.

    Args:
        hidden: [B, S, hidden_size], what the attention layer reads.
        residual: [B, S, q_lora_rank], `q_a_layernorm(q_a_proj(hidden))`.
    """
    parts = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    query_rope, query = indexer.wq_b(residual).view(*hidden.shape[:2], indexer.n_heads, -1).split(parts, -1)
    key_rope, key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2).split(parts, -1)
    query_rope, key_rope = apply_rotary_pos_emb_interleave(query_rope, key_rope, *position_embeddings, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
    return torch.cat([query_rope, query], -1), torch.cat([key_rope, key], -1).squeeze(2), weights


Factors = list[tuple[float, torch.Tensor, torch.Tensor]]
"""(scale, A [r, R], B [H, D, r]) of each active LoRA adapter."""


def _absorbed(attention: GlmMoeDsaAttention, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Factors]:
    """`kv_b_proj` as the key half [H, Dn, R] and the value half [H, Dv, R] of its weight, and its LoRA factors."""
    linear = attention.kv_b_proj
    base = linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear
    if base is not linear and linear.disable_adapters and linear.merged:
        linear.unmerge()  # as its own forward does
    heads = (attention.num_heads, attention.qk_nope_head_dim + attention.v_head_dim, -1)
    w_key, w_value = _weight(base, dtype).view(heads).split([attention.qk_nope_head_dim, attention.v_head_dim], 1)
    if base is linear or linear.disable_adapters or linear.merged:
        return w_key, w_value, []
    names = [name for name in linear.active_adapters if name in linear.lora_A]
    for name in names:
        if name in linear.lora_variant or linear.lora_bias[name]:
            raise ConfigurationError(
                f"adapter {name!r} is not plain LoRA on kv_b_proj (DoRA or another variant, or lora_bias=True), which "
                "cannot be absorbed into the queries exactly; use plain LoRA there"
            )
    return (
        w_key,
        w_value,
        [
            (linear.scaling[name], linear.lora_A[name].weight, linear.lora_B[name].weight.view(*heads[:2], -1))
            for name in names
        ],
    )


def _weight(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] of a frozen linear; of a quantised one what it multiplies activations of `dtype` with."""
    weight: torch.Tensor = linear.weight
    if type(linear) is nn.Linear:
        return weight
    with torch.no_grad():
        probe: torch.Tensor = linear(torch.eye(linear.in_features, dtype=dtype, device=weight.device))
        return probe.T


# The LoRA part is added in float32: rounding W + BA to bfloat16 loses about half of a small BA.


def _into_latent(query: torch.Tensor, weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """[B, S, H, Dn] -> [B, S, H, R]: `query @ (weight + scale * B @ A)` per head."""
    out = torch.einsum("bshn,hnr->bshr", query, weight).to(accumulation_dtype(query.dtype))
    for scale, a, b in factors:
        out = out + scale * torch.einsum("bshn,hnr->bshr", query.to(b.dtype), b) @ a
    return out


def _out_of_latent(attended: torch.Tensor, weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """[B, S, H, R] -> [B, S, H, Dv]: `(weight + scale * B @ A) @ attended` per head."""
    out = torch.einsum("bshr,hvr->bshv", attended.to(weight.dtype), weight).to(attended.dtype)
    for scale, a, b in factors:
        out = out + scale * torch.einsum("bshr,hvr->bshv", attended.to(a.dtype) @ a.T, b)
    return out


def swap_attention(model: nn.Module, tape: DecisionTape) -> Callable[[], None]:
    """Let the attention layers of `model` read resident states; returns the function that puts the stock class back."""
    layers = [module for module in model.modules() if type(module) is GlmMoeDsaAttention]
    return swap_classes((layer, ResidentGlmMoeDsaAttention, {"tape": tape}) for layer in layers)
