"""Sparse-attention indexers of a fresh model learn which tokens its attention reads.

The warm-up of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): train with full attention, then fit the softmax of the
index scores to the attention weights with everything else frozen. A selection that several layers share (IndexShare,
arXiv 2603.12201) is fitted to the mean of their weights.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import AdamW
from transformers import PreTrainedModel
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from longstraw_sdk.models.glm52.attention import indexer_projections
from longstraw_sdk.ops import index_scores

N_STEPS = 24
N_RAMP_STEPS = 6
N_TOKENS = 2048
N_DOCUMENTS = 2
N_QUERIES = 64  # per document: those that the answers hang on, the rest drawn from all positions
LEARNING_RATE = 1e-2

Document = tuple[list[int], list[int]]
"""Token ids, and the positions whose predictions matter."""


def sharing_layers(model: PreTrainedModel) -> list[list[GlmMoeDsaAttention]]:
    """Attention layers grouped by the selection they read; the first of a group selects. Empty without indexers."""
    groups: list[list[GlmMoeDsaAttention]] = []
    for module in model.modules():
        if isinstance(module, GlmMoeDsaAttention):
            if module.indexer is not None:
                groups.append([])
            groups[-1].append(module)
    return groups


@contextmanager
def full_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let every layer attend to all tokens; models without indexers do so anyway."""
    indexers = [group[0].indexer for group in sharing_layers(model)]
    for indexer in indexers:
        indexer.forward = _select_all
    try:
        yield
    finally:
        for indexer in indexers:
            del indexer.forward


def _select_all(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    n_rows, n_tokens, _ = hidden.shape
    return torch.arange(n_tokens, dtype=torch.int32).expand(n_rows, n_tokens, n_tokens)


def distil_indexers(
    model: PreTrainedModel, document: Callable[[int], Document], rng: random.Random
) -> tuple[float, ...]:
    """Fit the indexers of `model` in place, on documents that `document(n_tokens)` draws.

    Returns the divergence before each step; empty without indexers.
    """
    groups = sharing_layers(model)
    if not groups:
        return ()
    divergences = []
    parameters = [p for group in groups for p in group[0].indexer.parameters()]
    optimizer = AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(N_STEPS):
        documents = [document(N_TOKENS) for _ in range(N_DOCUMENTS)]
        ids = torch.tensor([d for d, _ in documents])
        queries = torch.tensor([p + rng.sample(range(N_TOKENS), N_QUERIES - len(p)) for _, p in documents])
        inputs, weights = _attention_weights(model, ids)
        loss = torch.stack([_divergence(group, inputs, weights, queries) for group in groups]).mean()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / N_RAMP_STEPS) * (1 - step / N_STEPS)
        optimizer.step()
        divergences.append(loss.item())
    model.zero_grad()
    return tuple(divergences)


Inputs = dict[int, tuple[torch.Tensor, Any]]
"""Hidden states [B, T, hidden_size] and position embeddings that each layer's attention reads."""


@torch.no_grad()
def _attention_weights(model: PreTrainedModel, ids: torch.Tensor) -> tuple[Inputs, tuple[torch.Tensor, ...]]:
    """What the attention layers read, and their weights [B, H, T, T] under full attention."""
    inputs: Inputs = {}

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inputs[module.layer_idx] = (kwargs["hidden_states"], kwargs["position_embeddings"])

    layers = [layer for group in sharing_layers(model) for layer in group]
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    stock = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that returns weights
    try:
        with full_attention(model):
            return inputs, model.base_model(ids, output_attentions=True, use_cache=False).attentions
    finally:
        model.set_attn_implementation(stock)
        for hook in hooks:
            hook.remove()


def _divergence(
    group: list[GlmMoeDsaAttention], inputs: Inputs, weights: tuple[torch.Tensor, ...], queries: torch.Tensor
) -> torch.Tensor:
    """Mean over `queries` [B, Q] of the KL divergence between the layers' mean weights and the scores' softmax."""
    selecting = group[0]
    hidden, position_embeddings = inputs[selecting.layer_idx]
    residual = selecting.q_a_layernorm(selecting.q_a_proj(hidden)).detach()
    query, keys, head_weights = indexer_projections(selecting.indexer, hidden, residual, position_embeddings)
    rows = torch.arange(len(queries))[:, None]
    scores = index_scores(query[rows, queries], head_weights[rows, queries], keys, selecting.indexer.softmax_scale)
    seen = torch.arange(keys.shape[1]) <= queries[..., None]
    log_predicted = scores.masked_fill(~seen, float("-inf")).log_softmax(-1)
    target = torch.stack([weights[layer.layer_idx].mean(1)[rows, queries] for layer in group]).mean(0)
    # Terms without target weight are zero, also where the prediction is zero; there `where` keeps NaN out.
    log_predicted = torch.where(target > 0, log_predicted, 0.0)
    return (torch.xlogy(target, target) - target * log_predicted).sum(-1).mean()
