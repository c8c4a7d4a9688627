"""Extending the positions of a transformers decoder in place, reversibly, with angles that stay exact beyond a million.

A float32 product of position and frequency has 24 bits for all turns together: at position 2,097,151 it is off by up to
0.0165 rad with GLM-5.2's rope_theta (over the positions near there by up to 0.0625), for each token by another amount,
so that even neighbours lose their distance. Extended models multiply in float64 and round cosines and sines once.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import LifecycleError, UnsupportedModelError
from ..lora import base_model_of, walk
from ..positions import (
    PositionConfig,
    asked_positions,
    default_frequencies,
    positions_of,
    rotary_modules,
    to_rope_parameters,
)
from ..types import CausalLM
from .swap import swap_classes


class ExtendedPositions:
    """What `extend_positions` did to a model. As a context manager it takes that back at the end of the block."""

    def __init__(self, positions: PositionConfig, undo: ExitStack):
        self.positions = positions
        self._undo = undo

    def undo(self) -> None:
        """Give the model its own positions back, bit for bit. Doing so twice is allowed."""
        self._undo.close()

    def __enter__(self) -> ExtendedPositions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def extend_positions(model: CausalLM, positions: PositionConfig) -> ExtendedPositions:
    """Extend the positions of `model` (a causal LM, PEFT-wrapped or not) until `undo`.

    `LongStrawSession(positions=...)` calls it; call it yourself for a forward of your own. What a session captured
    before is stale then, and what it captures afterwards is stale after `undo`.

    Raises:
        LifecycleError: they are extended already.
        UnsupportedModelError: its angles are made in a way that is not known here.
        ConfigurationError: it has YaRN of its own, or `positions` do not extend it.
    """
    base = base_model_of(model)
    found = positions_of(base)
    if found is not None:
        raise LifecycleError(
            f"the positions of this {type(base).__name__} are extended already, by {found.to_json()}; undo that first "
            "(ExtendedPositions.undo(), or close the session that did it)"
        )
    config = base.config
    rope_parameters = to_rope_parameters(positions, config)
    rotary = rotary_modules(base)
    if not rotary:
        raise UnsupportedModelError(
            f"{type(base).__name__} has no module with rotary frequencies (a buffer `inv_freq`), so its positions "
            "cannot be extended; give no positions"
        )
    for module in rotary:
        _require_plain(module, rope_parameters["rope_theta"])
    with ExitStack() as undo:
        _replace(undo, config, "rope_parameters", rope_parameters)
        _replace(undo, config, "max_position_embeddings", positions.max_positions)
        for module in rotary:
            _extend(undo, module, positions, rope_parameters["rope_theta"])
        for module in _latent_attentions(base):
            magnitude = positions.latent_magnitude
            _replace(undo, module, "scaling", module.scaling * magnitude * magnitude)
        return ExtendedPositions(positions, undo.pop_all())


def extend_as_asked(model: CausalLM) -> None:
    """Extend `model` as the environment asks, for good; one that is extended so stays as it is."""
    asked = asked_positions(None)
    if asked is not None and positions_of(model) != asked:
        extend_positions(model, asked)


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _extend(undo: ExitStack, module: Any, positions: PositionConfig, rope_theta: float) -> None:
    frequencies = torch.tensor(positions.frequencies(rope_theta, 2 * len(module.inv_freq)), dtype=torch.float64)
    frequencies = frequencies.to(module.inv_freq.device)
    # Plain attributes: `model.to(bfloat16)` would round a buffer to 8 bits.
    exact = {"extended_by": positions, "exact_frequencies": frequencies}
    undo.callback(swap_classes([(module, _exact_class(type(module)), exact)]))
    for name, value in {
        "rope_type": "yarn",
        "attention_scaling": positions.attention_scaling,
        "max_seq_len_cached": positions.max_positions,
        "original_max_seq_len": positions.max_positions,
    }.items():
        if hasattr(module, name):
            _replace(undo, module, name, value)
    for name in ("inv_freq", "original_inv_freq"):
        if name in module._buffers:
            stock = getattr(module, name)
            undo.callback(_give_back, module, name, stock)
            setattr(module, name, frequencies.to(torch.float32, copy=True))


def _give_back(module: nn.Module, name: str, stock: torch.Tensor) -> None:
    """The stock buffer, on the device that the model may have been moved to meanwhile."""
    setattr(module, name, stock.to(getattr(module, name).device))


def _latent_attentions(model: CausalLM) -> list[Any]:
    """Attention layers that transformers gives a softmax scale from `mscale_all_dim`: those of latent attention."""
    if not getattr(model.config, "kv_lora_rank", None):
        return []
    return [m for m in walk(model) if hasattr(m, "kv_b_proj") and hasattr(m, "scaling")]


class ExactAngles:
    """Mixin of a rotary module: float64 angles, in the shapes and dtype of the stock forward."""

    extended_by: PositionConfig
    exact_frequencies: torch.Tensor

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.exact_frequencies.device != x.device:
            self.exact_frequencies = self.exact_frequencies.to(x.device)
        return _cos_sin(self, self.exact_frequencies, self.extended_by.attention_scaling, x, position_ids)


_EXACT: dict[type, type] = {}
"""The exact class of each stock class of rotary modules, made when it is first needed."""


def _exact_class(stock: type) -> type:
    if stock not in _EXACT:
        _EXACT[stock] = type(f"Exact{stock.__name__}", (ExactAngles, stock), {"__module__": __name__})
    return _EXACT[stock]


def _cos_sin(
    rotary: Any, frequencies: torch.Tensor, scaling: float, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B, T, D] in the dtype of `x`, of `position_ids` [B, T], or [3, B, T] for three axes.

    Not reduced by 2 pi before: float64 cosines reduce their argument exactly, a remainder by a rounded 2 pi would not.
    """
    by_axis = hasattr(rotary, "recomposition_frequencies")  # as Qwen3.6, whose images have three axes
    if by_axis:
        position_ids = position_ids.expand(3, -1, -1)
    angles = position_ids[..., None].double() * frequencies
    halves = [part * scaling for part in (angles.cos(), angles.sin())]
    cos, sin = (rotary.recomposition_frequencies(h) if by_axis else torch.cat((h, h), -1) for h in halves)
    return cos.to(x.dtype), sin.to(x.dtype)


@torch.no_grad()
def _require_plain(module: Any, rope_theta: float) -> None:
    """Raise unless `_cos_sin` at the frequencies of `rope_theta` is what `module` computes now."""
    name, stock = type(module).__name__, module.inv_freq
    if "forward" in vars(module):
        raise UnsupportedModelError(
            f"something replaced the forward of {name}, as accelerate's hooks do under a device_map, so it would not "
            "make the extended angles; load the model without a device_map"
        )
    plain = torch.tensor(default_frequencies(rope_theta, 2 * len(stock)), dtype=torch.float64, device=stock.device)
    allowed = max(torch.finfo(stock.dtype).eps, 1e-6)  # half of eps is rounding; float32 powers are off by 3e-7
    same = bool(((stock.double() - plain).abs() <= allowed * plain).all())
    if same:
        ids = torch.arange(12, device=stock.device).view(3, 1, 4)
        ids = ids if hasattr(module, "recomposition_frequencies") else ids[:, 0]
        x = torch.zeros(1, device=stock.device)
        pairs = zip(module(x, ids), _cos_sin(module, plain, 1.0, x, ids), strict=True)
        same = all(a.shape == b.shape and bool(((a - b).abs() <= 12 * allowed).all()) for a, b in pairs)
    if not same:
        raise UnsupportedModelError(
            f"{name} does not rotate by rope_theta={rope_theta} in a way that is known here, so its positions cannot "
            "be extended; give no positions"
        )
