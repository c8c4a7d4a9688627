"""LoRA on experts and MLPs as two thin products, where PEFT would build `W + B @ A` for every expert.

PEFT adapts parameters of stacked experts by wrapping them, and merges on the fly: 12.9 GB of gate-up weights per layer
at the released geometry, and in bfloat16 the sum rounds about half of a small `B @ A` away. Here each expert's rows get
`x @ W.T + scale * (x @ A.T) @ B.T`. Dense and shared MLPs are wrapped in the same way (PEFT rewrites their names in
`target_modules` into expert parameters and so leaves them out) and are served by the same product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaExperts

from longstraw_sdk.hf.swap import swap_classes
from longstraw_sdk.ops import ThroughExperts
from longstraw_sdk.state import ContextGroup
from longstraw_sdk.types import accumulation_dtype

Factors = list[tuple[float, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
"""(scale, A [r, in] per expert, B [out, r] per expert) of each active adapter; a linear counts as one expert."""


class Spread(NamedTuple):
    """The ranks among which a layer's experts are spread, and how tokens reach them."""

    group: ContextGroup
    through: ThroughExperts


class FactoredLinear(ParamWrapper):
    """`ParamWrapper` of the weight of an `nn.Linear`."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_forward_args(x, *args, **kwargs)
        if self.merged:
            return super().forward(x, *args, **kwargs)
        return _add_lora(self.base_layer(x), x, _factors(self), 0).to(x.dtype)


class FactoredExperts(ParamWrapper):
    """The outermost of the `ParamWrapper`s around `GlmMoeDsaExperts`."""

    spread: Spread | None
    """Where the layer's experts are; None if this rank has them all."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_forward_args(x, *args, **kwargs)
        wrappers = list(_chain(self))
        if any(wrapper.merged for wrapper in wrappers):
            factors: dict[str, Factors] = {}
            if self.spread is None:
                return super().forward(x, *args, **kwargs)
        else:
            factors = {wrapper.parameter_name: _factors(wrapper) for wrapper in wrappers}
        return experts_forward(factors, self.get_base_layer(), self.spread, x, *args, **kwargs)


class SpreadExperts(GlmMoeDsaExperts):
    """`GlmMoeDsaExperts` without LoRA, of which this rank holds a part."""

    spread: Spread

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return experts_forward({}, self, self.spread, hidden, top_k_index, top_k_weights)


def experts_forward(
    factors: dict[str, Factors],
    experts: GlmMoeDsaExperts,
    spread: Spread | None,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum [N, H] of the chosen experts of each token, with LoRA `factors` per parameter name.

    Rows are sorted by expert and summed per token in a fixed order, so that the result does not depend on which other
    tokens there are. LoRA's part keeps its own dtype (float32 under bfloat16 weights) up to the sum over experts.

    Args:
        spread: where the experts are; None if `experts` holds all.
        hidden: [N, H].
        top_k_index, top_k_weights: [N, k].
    """
    n_tokens, top_k = top_k_index.shape
    by_expert, order = top_k_index.flatten().sort(stable=True)
    rows = hidden[order // top_k]
    run = partial(_run_experts, factors, experts)
    if spread is None:
        results = run(rows, by_expert.bincount(minlength=experts.num_experts).tolist())
    else:
        n_experts = experts.num_experts * spread.group.size
        results = spread.through(rows, by_expert, n_experts, spread.group, run)
    by_token = results[order.argsort()].view(n_tokens, top_k, -1)
    return (by_token * top_k_weights[..., None]).sum(1).to(hidden.dtype)


def _run_experts(
    factors: dict[str, Factors], experts: GlmMoeDsaExperts, rows: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """`rows` [N, H], sorted by expert with `counts` of each, through their experts."""
    outputs = [rows.to(accumulation_dtype(rows.dtype))[:0]]  # tied to `rows`, also where there are none
    for expert, mine in enumerate(rows.split(counts)):
        if not len(mine):
            continue
        gate_up = nn.functional.linear(mine, experts.gate_up_proj[expert])
        gate, up = _add_lora(gate_up, mine, factors.get("gate_up_proj", []), expert).chunk(2, -1)
        inner = experts.act_fn(gate) * up
        down = nn.functional.linear(inner.to(rows.dtype), experts.down_proj[expert])
        outputs.append(_add_lora(down, inner, factors.get("down_proj", []), expert))
    return torch.cat(outputs)


def _add_lora(out: torch.Tensor, x: torch.Tensor, factors: Factors, expert: int) -> torch.Tensor:
    for scale, a, b in factors:
        out = out + scale * (x.to(a[expert].dtype) @ a[expert].T) @ b[expert].T
    return out


def _factors(wrapper: ParamWrapper) -> Factors:
    if wrapper.disable_adapters:
        return []
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    n_experts = wrapper.num_experts
    # Unbound once: indexing one expert at a time gives each a gradient of the size of all.
    return [
        (
            wrapper.scaling[name],
            wrapper.lora_A[name].weight.unflatten(0, (n_experts, -1)).unbind(0),
            wrapper.lora_B[name].weight.unflatten(1, (-1, n_experts)).permute(2, 0, 1).unbind(0),
        )
        for name in names
    ]


def _chain(wrapper: nn.Module) -> Iterator[ParamWrapper]:
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def swap_experts(model: nn.Module, spread: Spread | None) -> Callable[[], None]:
    """Factor the LoRA of every wrapped expert and MLP of `model`, and reach the experts that are `spread` over ranks.

    Returns the function that puts the stock classes back.
    """
    inner = {id(module.base_layer) for module in model.modules() if isinstance(module, ParamWrapper)}
    swaps: list[tuple[Any, type, dict[str, Any]]] = []
    candidates: list[Any] = list(model.modules())
    for module in candidates:
        if type(module) is GlmMoeDsaExperts and spread is not None and id(module) not in inner:
            swaps.append((module, SpreadExperts, {"spread": spread}))
        if type(module) is not ParamWrapper or id(module) in inner:
            continue
        base = module.get_base_layer()
        if isinstance(base, GlmMoeDsaExperts):
            swaps.append((module, FactoredExperts, {"spread": spread}))
        elif type(base) is nn.Linear and module.parameter_name == "weight":
            swaps.append((module, FactoredLinear, {}))
    return swap_classes(swaps)
