"""Fused attention of PyTorch on CUDA with its log-sum-exp, forward and backward, for any sizes.

cuDNN is the fastest (twice FlashAttention 2 at heads of 256 on an H200), but it makes a plan for every combination of
sizes, forward and backward, which takes 50 ms and is kept for ever: lengths of prompts and responses never stop being
new. So it gets sizes that are multiples of `PLANNED`, and FlashAttention, which needs no plan, the others.

Shapes: queries [B, Hq, T, D], keys [B, Hkv, S, D], values [B, Hkv, S, D], log-sum-exp [B, Hq, T] in float32. The causal
mask begins at the first key.
"""

from __future__ import annotations

import torch

PLANNED = 1024


def is_planned(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether cuDNN gets these sizes. Few queries are planned as well: they decode, with sizes that stay."""
    return k.shape[2] % PLANNED == 0 and (q.shape[2] % PLANNED == 0 or q.shape[2] < PLANNED)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    if is_planned(q, k):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return found[0], found[1].reshape(q.shape[:-1]).float()
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    found = torch.ops.aten._flash_attention_forward(
        *tokens_first, None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale
    )
    return found[0].transpose(1, 2), found[1]


def fused_attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, given output and log-sum-exp [B, Hq, T, 1] over all keys of the row."""
    unused = torch.zeros(2, 1, dtype=torch.int64, device=q.device)  # of dropout, which there is not
    sizes = (q.shape[2], k.shape[2])
    if is_planned(q, k):
        given = (d_out.contiguous(), q, k, v, out, lse.contiguous())
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *given, unused[0], unused[1], None, None, None, *sizes, 0.0, causal, scale=scale
        )
        return found[0], found[1], found[2]
    tokens_first = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
    found = torch.ops.aten._flash_attention_backward(
        *tokens_first, lse[..., 0].contiguous(), None, None, *sizes, 0.0, causal, unused[0], unused[1], scale=scale
    )
    d_q, d_k, d_v = (x.transpose(1, 2) for x in found)
    return d_q, d_k, d_v
