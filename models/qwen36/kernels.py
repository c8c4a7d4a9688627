"""Fused kernels of flash-linear-attention for what lies between the large products, beside the stock code.

Norms, SwiGLU and the depthwise convolution are bound by memory traffic: the stock code goes over its tensors up to ten
times, in float32, where one pass does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from longstraw_sdk.environment import kernels_off
from longstraw_sdk.hf.swap import swap_classes
from longstraw_sdk.ops.trial import too_far, tried

_LOG = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SILU = ("silu", "swish")


def why_no_kernels(x: torch.Tensor) -> str | None:
    """What keeps the kernels from being used on tensors like `x`, or None. Found, and logged, once per kind."""
    return _why(kernels_off(), x.device, x.dtype)


@cache
def _why(off: str | None, device: torch.device, dtype: torch.dtype) -> str | None:
    if off is not None:
        reason: str | None = off
    elif device.type != "cuda":
        reason = f"they need CUDA, not {device.type}"
    elif dtype not in DTYPES:
        reason = f"they compute in float32, which is not enough for {dtype}"
    elif find_spec("fla") is None:
        reason = 'flash-linear-attention is not installed: pip install "longstraw-sdk[gpu]"'
    else:
        reason = tried(lambda: _trial(device, dtype), device)
    told = "used" if reason is None else f"not used, because {reason}"
    _LOG.info("fused kernels for norms, SwiGLU and convolution of %s on %s: %s", dtype, device, told)
    return reason


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`Qwen3_5RMSNorm`, whose weight [D] is centred at zero, of `x` [..., D]."""
    from fla.modules.norm.layernorm import rms_norm as fused

    out: torch.Tensor = fused(x, 1.0 + weight.float(), None, eps=eps)
    return out


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`Qwen3_5RMSNormGated`: the norm of `x` [..., D] times the SiLU of `gate` [..., D]."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as fused

    out: torch.Tensor = fused(x, gate, weight, None, activation="swish", eps=eps)
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`."""
    from fla.modules.activations import swiglu as fused

    out: torch.Tensor = fused(gate, up)
    return out


def convolve(
    columns: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Causal depthwise convolution of `columns` [B, T, C] that follow `tail` [B, C, K - 1], by `weight` [C, K]."""
    if activation not in SILU or why_no_kernels(columns) is not None:
        return convolve_reference(columns, tail, weight, bias, activation)
    return _convolve_fused(columns, tail, weight, bias, activation)


def convolve_reference(
    columns: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """`convolve` by the stock code."""
    joined = torch.cat([tail, columns.transpose(1, 2)], -1)
    out: torch.Tensor = stock.causal_conv1d_fn(joined, weight, bias, activation=activation)
    return out[..., tail.shape[-1] :].transpose(1, 2)


def _convolve_fused(
    columns: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    state = F.pad(tail, (1, 0))  # its state has as many columns as the kernel, the first of which is out of reach
    out: torch.Tensor = causal_conv1d(columns, weight, bias, initial_state=state, activation=activation)[0]
    return out


class FusedRMSNorm(stock.Qwen3_5RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if why_no_kernels(x) is not None:
            out: torch.Tensor = super().forward(x)
            return out
        return rms_norm(x, self.weight, self.eps)


class FusedRMSNormGated(stock.Qwen3_5RMSNormGated):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.activation not in SILU or why_no_kernels(hidden_states) is not None:
            out: torch.Tensor = super().forward(hidden_states, gate)
            return out
        return rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon)


class FusedMLP(stock.Qwen3_5MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.hidden_act not in SILU or why_no_kernels(x) is not None:
            out: torch.Tensor = super().forward(x)
            return out
        out = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


_FUSED: dict[type, type] = {
    stock.Qwen3_5RMSNorm: FusedRMSNorm,
    stock.Qwen3_5RMSNormGated: FusedRMSNormGated,
    stock.Qwen3_5MLP: FusedMLP,
}


def swap_fused(model: nn.Module) -> Callable[[], None]:
    """Let norms and MLPs of `model` use the kernels where they can; returns the function that undoes it."""
    return swap_classes((m, _FUSED[type(m)], {}) for m in model.modules() if type(m) in _FUSED)


def _trial(device: torch.device, dtype: torch.dtype) -> str | None:
    """Output and gradients of every kernel beside the stock code in float32."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    for name, fused, reference, inputs in trials(draw):
        d_out = torch.randn(reference(*inputs).shape, generator=generator, device=device).to(dtype)
        found = differentiate(fused, inputs, d_out)
        wanted = differentiate(reference, [x.float() for x in inputs], d_out)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            if reason := too_far(f"{'gradient of ' * bool(i)}{name}", a, b, dtype):
                return reason
    return None


Trial = tuple[str, Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[torch.Tensor]]


def trials(draw: Callable[..., torch.Tensor]) -> list[Trial]:
    """Name, kernel, stock code and inputs of each; 200 tokens are more than one tile of any of them."""
    wide, head, n_tokens, size = 1024, 128, 200, 4
    weight, narrow, gain, taps = draw(wide), draw(head), draw(head), draw(wide, size)
    norm, head_norm = stock.Qwen3_5RMSNorm(wide), stock.Qwen3_5RMSNorm(head)
    gated = stock.Qwen3_5RMSNormGated(head)
    for module, w in ((norm, weight), (head_norm, narrow), (gated, gain)):
        module.weight = nn.Parameter(w.float(), requires_grad=False)

    def convolution(by: Any, columns: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = by(columns, tail, taps.to(columns.dtype), None, "silu")
        return out

    return [
        ("norm", lambda x: rms_norm(x, weight, norm.eps), norm, [draw(2, n_tokens, wide)]),
        # Up to 512 numbers another kernel computes it.
        ("norm of heads", lambda x: rms_norm(x, narrow, norm.eps), head_norm, [draw(2, n_tokens, 3, head)]),
        (
            "gated norm",
            lambda x, z: rms_norm_gated(x, z, gain, gated.variance_epsilon),
            gated,
            [draw(n_tokens, head), draw(n_tokens, head)],
        ),
        ("SwiGLU", swiglu, lambda x, y: F.silu(x) * y, [draw(2, n_tokens, wide), draw(2, n_tokens, wide)]),
        (
            "convolution",
            partial(convolution, _convolve_fused),
            partial(convolution, convolve_reference),
            [draw(2, n_tokens, wide), draw(2, wide, size - 1)],
        ),
    ]


@torch.enable_grad()
def differentiate(
    run: Callable[..., torch.Tensor], inputs: list[torch.Tensor], d_out: torch.Tensor
) -> list[torch.Tensor]:
    """The output of `run` and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]
