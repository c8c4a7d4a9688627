"""The Gated DeltaNet layer of resident passes, and the reversible swap to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

from longstraw_sdk.hf.cache import RecurrentLayer, ResidentCache
from longstraw_sdk.hf.swap import swap_classes
from longstraw_sdk.ops import carry_state, carry_tail

from .kernels import convolve, why_no_kernels


class ResidentGatedDeltaNet(stock.Qwen3_5GatedDeltaNet):
    """`Qwen3_5GatedDeltaNet` with fused kernels around its scan, and for one rank's slice of the tokens.

    A slice is scanned before the state that it starts from is known. State and output are affine in that state, so one
    scan over values widened by zeros, from zero widened by the identity, gives the slice's own part and the matrices
    that the state is multiplied by. Generation, whole sequences without kernels and anything without a resident cache
    are the stock forward.
    """

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer = cache.layers[self.layer_idx] if isinstance(cache, ResidentCache) else None
        if not isinstance(layer, RecurrentLayer) or layer.keep_rows:
            return super().forward(hidden_states, cache, *args, **kwargs)
        if layer.context is None and why_no_kernels(hidden_states) is not None:
            return super().forward(hidden_states, cache, *args, **kwargs)
        context, (batch, n_tokens) = layer.context, hidden_states.shape[:2]

        mixed = self.in_proj_qkv(hidden_states)
        tail = layer.tail_of(mixed.transpose(1, 2), self.conv_kernel_size - 1)
        n_real = [n_tokens]
        if context is not None:
            n_real = [layer.slice_of(cache.new_ids.shape[1], rank).n_real for rank in range(context.size)]
            tail, layer_tail = carry_tail(mixed.transpose(1, 2), tail, n_real, context)
        else:
            size = tail.shape[-1]
            # A copy: the slice alone would keep all columns alive, one per layer.
            layer_tail = torch.cat([tail, mixed[:, -size:].transpose(1, 2)], -1)[..., -size:].clone()
        mixed = convolve(mixed, tail, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation)
        heads = (batch, n_tokens, -1)
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        query, key = query.reshape(*heads, self.head_k_dim), key.reshape(*heads, self.head_k_dim)
        value = value.reshape(*heads, self.head_v_dim)
        beta = self.in_proj_b(hidden_states).sigmoid()
        decay = F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        g = -self.A_log.float().exp() * decay

        def run(values: torch.Tensor, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out: tuple[torch.Tensor, torch.Tensor] = stock.torch_chunk_gated_delta_rule(
                query, key, values, g=g, beta=beta, initial_state=initial, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return out

        shape = (batch, self.num_v_heads, self.head_k_dim)
        start = layer.state_of((*shape, self.head_v_dim), g)
        if context is None:
            out, end = run(value, start)
        else:
            # Padding neither decays the state nor writes to it.
            real = (torch.arange(n_tokens, device=mixed.device) < n_real[context.rank])[:, None]
            beta, g = beta * real, g * real
            identity = torch.eye(self.head_k_dim, dtype=start.dtype, device=g.device).expand(*shape, -1)
            wide = torch.cat([torch.zeros_like(start), identity], -1)
            wide_out, affine = run(F.pad(value, (0, self.head_k_dim)), wide)
            start, end = carry_state(affine, start, context)
            wide_out = wide_out.transpose(1, 2).flatten(0, 1)  # [B * H, T, Dv + Dk]
            own_out, read = wide_out.split([self.head_v_dim, self.head_k_dim], -1)
            out = torch.baddbmm(own_out, read, start.flatten(0, 1).to(read.dtype))
            out = out.unflatten(0, (batch, -1)).transpose(1, 2)
        layer.produce(conv=layer_tail, recurrent=end)

        z = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        return self.out_proj(self.norm(out.reshape(-1, self.head_v_dim), z).reshape(*heads))


def swap_gated_delta_net(model: nn.Module) -> Callable[[], None]:
    """Let the Gated DeltaNet layers of `model` run as above; returns the function that puts the stock class back."""
    layers = [module for module in model.modules() if type(module) is stock.Qwen3_5GatedDeltaNet]
    return swap_classes((layer, ResidentGatedDeltaNet, {}) for layer in layers)
