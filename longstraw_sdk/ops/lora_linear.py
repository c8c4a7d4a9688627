"""A frozen linear with its LoRA side product, without an activation wider than the model's.

PEFT keeps LoRA weights in float32 beside a bfloat16 model and casts activations up to them: every adapted linear then
reads and writes its input and output in float32. Here the small LoRA weights are cast down instead, the side product
is added into the base output in place, and gradients of the LoRA weights are float32 sums as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from .autocast import without_autocast


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`x W^T + bias + scale * (x A^T) B^T`, [..., out] in the dtype of `x`.

    Args:
        x: [..., in], bfloat16 or float16.
        weight, bias: [out, in] and [out] in the dtype of `x`; no gradient is computed of them.
        lora_a, lora_b: [r, in] and [out, r], usually float32; so are their gradients.
    """
    out: torch.Tensor = _LoRALinear.apply(x, weight, bias, lora_a, lora_b, scale)
    return out


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inner = rows @ lora_a.to(x.dtype).T
        out = F.linear(rows, weight, bias).addmm_(inner, (lora_b * scale).to(x.dtype).T)
        ctx.save_for_backward(x, weight, lora_a, lora_b, inner)
        ctx.scale = scale
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, weight, lora_a, lora_b, inner = ctx.saved_tensors
        wants_x, _, _, wants_a, wants_b, _ = ctx.needs_input_grad
        rows, d_out = x.flatten(0, -2), grad_outputs[0].flatten(0, -2)
        d_x = d_a = d_b = None
        if wants_x or wants_a:
            d_inner = d_out @ (lora_b * ctx.scale).to(x.dtype)
        if wants_x:
            d_x = (d_out @ weight).addmm_(d_inner, lora_a.to(x.dtype)).view_as(x)
        if wants_a:
            d_a = _wide_product(d_inner.T, rows).to(lora_a.dtype)
        if wants_b:
            d_b = _wide_product(d_out.T, inner).mul_(ctx.scale).to(lora_b.dtype)
        return d_x, None, None, d_a, d_b, None


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in float32, whose sums over all tokens are not rounded to the narrow dtype."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
