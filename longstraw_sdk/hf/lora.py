"""PEFT's LoRA linears of a narrow model, computed by `lora_linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ..lora import lora_layers
from ..ops import add_lora, lora_linear
from ..types import CausalLM
from .swap import swap_classes

NARROW = (torch.bfloat16, torch.float16)


def swap_lora_linears(model: CausalLM) -> Callable[[], None]:
    """Let `model`'s plain LoRA linears compute without float32 activations; returns the function that undoes it."""
    layers = lora_layers(model)
    if not layers:
        return lambda: None
    from peft.import_utils import is_bnb_4bit_available
    from peft.tuners.lora import Linear

    swapped = {Linear: _narrow(Linear)}
    if is_bnb_4bit_available():
        from peft.tuners.lora.bnb import Linear4bit

        swapped[Linear4bit] = _narrow(Linear4bit)
    return swap_classes((layer, swapped[type(layer)], {}) for layer in layers if type(layer) in swapped)


@cache
def _narrow(stock: Any) -> type:
    class NarrowLoRALinear(stock):
        """Computes what PEFT computes; whatever is not one plain adapter on a plain linear goes to PEFT."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            name = None if args or kwargs else _plain_adapter(self, x)
            if name is None:
                out: torch.Tensor = super().forward(x, *args, **kwargs)
                return out
            base = self.base_layer
            factors = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
            if type(base) is nn.Linear:
                return lora_linear(x, base.weight, base.bias, *factors)
            return add_lora(base(x), x, *factors)

    return NarrowLoRALinear


def _plain_adapter(layer: Any, x: torch.Tensor) -> str | None:
    """The one adapter that acts on this forward, if `lora_linear` computes all that PEFT would."""
    kind = x.device.type
    other = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype
    if x.dtype not in NARROW or other or layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    base, a, b = layer.base_layer, layer.lora_A[active[0]], layer.lora_B[active[0]]
    for part in (a, b):
        if type(part) is not nn.Linear or not _is_bare(part) or part.bias is not None:
            return None
    if type(base) is nn.Linear and (not _is_bare(base) or _is_trained(base) or base.weight.dtype != x.dtype):
        return None  # a quantised base runs its own forward and returns the dtype of its input
    dropout = layer.lora_dropout[active[0]]
    drops = isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training
    return None if drops else active[0]


def _is_bare(module: Any) -> bool:
    """Whether nothing watches or replaces the module's forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooked and "forward" not in vars(module)


def _is_trained(linear: nn.Linear) -> bool:
    return linear.weight.requires_grad or (linear.bias is not None and linear.bias.requires_grad)
