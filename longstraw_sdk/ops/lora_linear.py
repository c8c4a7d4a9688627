"""A frozen linear with its LoRA side product, without an activation wider than the model's.

PEFT keeps LoRA weights in float32 beside a bfloat16 model and casts activations up to them: every adapted linear then
reads and writes its input and output in float32. Here the small LoRA weights are cast down instead, the side product
is added into the base output in place, and gradients of the LoRA weights are float32 sums as before.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    # Views are made here: a view made inside of a Function could not be written in place.
    out: torch.Tensor = _LoRALinear.apply(x.flatten(0, -2), weight, bias, lora_a, lora_b, scale)
    return out.unflatten(0, x.shape[:-1])


def add_lora(
    out: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float
) -> torch.Tensor:
    """`out + scale * (x A^T) B^T` in the dtype of `x`: for a base output [..., out] of another kind, as quantised."""
    added: torch.Tensor = _AddLoRA.apply(out.flatten(0, -2), x.flatten(0, -2), lora_a, lora_b, scale)
    return added.view_as(out)


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
        a, b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        inner = x @ a.T
        ctx.save_for_backward(x, weight, lora_a, lora_b, inner, a, b)
        ctx.scale = scale
        return F.linear(x, weight, bias).addmm_(inner, b.T, alpha=scale)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, weight, lora_a, _, inner, a, b = ctx.saved_tensors
        wants_x, _, _, *wanted, _ = ctx.needs_input_grad
        d_out = grad_outputs[0]
        d_inner, d_a, d_b = _back(d_out, x, b, inner, ctx.scale, wanted, lora_a.dtype)
        d_x = (d_out @ weight).addmm_(d_inner, a, alpha=ctx.scale) if wants_x else None
        return d_x, None, None, d_a, d_b, None


class _AddLoRA(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, out: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        a, b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        inner = x @ a.T
        ctx.save_for_backward(x, lora_a, lora_b, inner, a, b)
        ctx.scale = scale
        return torch.addmm(out, inner, b.T, alpha=scale)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, lora_a, _, inner, a, b = ctx.saved_tensors
        _, wants_x, *wanted, _ = ctx.needs_input_grad
        d_out = grad_outputs[0]
        d_inner, d_a, d_b = _back(d_out, x, b, inner, ctx.scale, wanted, lora_a.dtype)
        d_x = (d_inner @ a).mul_(ctx.scale) if wants_x else None
        return d_out, d_x, d_a, d_b, None


# The casts of A and B are saved for the backward, which a checkpoint frees; the originals too, so that autograd notices
# a step between forward and backward.


def _back(
    d_out: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    inner: torch.Tensor,
    scale: float,
    wanted: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`d_out B` [n, r], and gradients of A and B, where they are `wanted`, in `dtype`; `b` is B cast to that of `x`."""
    d_inner = d_out @ b
    d_a = _wide_product(d_inner.T, x).mul_(scale).to(dtype) if wanted[0] else None
    d_b = _wide_product(d_out.T, inner).mul_(scale).to(dtype) if wanted[1] else None
    return d_inner, d_a, d_b


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in float32: sums over all tokens are not rounded to the narrow dtype. Only CUDA needs no wide copies."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
