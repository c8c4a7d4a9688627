"""Log-probabilities of chosen tokens without holding [N, vocab] logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..types import accumulation_dtype
from .autocast import without_autocast

MAX_TILE_ELEMENTS = 2**25
"""Bound on the logits held at once: 128 MiB in float32, 135 positions of a 248,320-token vocabulary."""


def selective_log_probs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, both [N].

    Args:
        hidden: [N, H], last hidden state that predicts each target.
        targets: LongTensor [N].
        head: the LM head, [n, H] -> [n, vocab].
        vocab_size: width of the head, which sets the tile.
        temperature: the logits are divided by it.

    The head runs in its own dtype; log-softmax and entropy are float32 (float64 for float64). Each tile is
    checkpointed, so its logits are recomputed in backward and never live together with another tile's.
    """
    size = max(1, MAX_TILE_ELEMENTS // vocab_size)
    logps, entropies = [], []
    for start in range(0, len(targets), size):
        tile = (hidden[start : start + size], targets[start : start + size], head, temperature)
        if torch.is_grad_enabled():
            logp, entropy = checkpoint(_tile_log_probs, *tile, use_reentrant=False)
        else:
            logp, entropy = _tile_log_probs(*tile)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def _tile_log_probs(
    hidden: torch.Tensor, targets: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp, entropy = _LogProbs.apply(head(hidden), targets, temperature)
    return logp, entropy


class _LogProbs(torch.autograd.Function):
    """Log-probabilities and entropies [n] of logits [n, vocab].

    One node for both: what a checkpoint recomputes for an output that no loss uses stays alive until the graph dies,
    which with a node for each was every tile's float32 logits twice (8 GiB for 4,096 tokens of 248,320).
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = _scaled(logits, temperature).log_softmax(-1)
        logp = log_probs.gather(-1, targets[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        logits, targets, entropy = ctx.saved_tensors
        d_logp, d_entropy = grad_outputs
        log_probs = _scaled(logits, ctx.temperature).log_softmax(-1)
        probs = log_probs.exp()
        gradient = torch.zeros_like(probs)
        if d_logp is not None:  # d logp / d z = one at the target, minus p
            gradient.addcmul_(probs, d_logp[:, None], value=-1)
            gradient.scatter_add_(-1, targets[:, None], d_logp[:, None])
        if d_entropy is not None:  # d entropy / d z = -p * (log p + entropy)
            gradient.addcmul_(probs.mul_(d_entropy[:, None]), log_probs.add_(entropy[:, None]), value=-1)
        return gradient.div_(ctx.temperature).to(logits.dtype), None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.to(accumulation_dtype(logits.dtype)) / temperature
