"""Log-probabilities of chosen tokens without holding [N, vocab] logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ..types import accumulation_dtype

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
    logits = head(hidden)
    log_probs = torch.log_softmax(logits.to(accumulation_dtype(logits.dtype)) / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropy
