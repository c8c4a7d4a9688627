"""What the engine needs to know about LoRA adapters: which are active, how to turn them off, what they cover.

PEFT is recognised by the shape of its layers (`lora_A`, `enable_adapters`), so that this module costs no import of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import ConfigurationError
from .types import CausalLM, local

_IN_LAYER = re.compile(r"(?:.*?\.)?(?P<layer>\d+)\.(?P<linear>.+)")

AdapterState = tuple[str, ...]
"""Names of the active adapters; empty when adapters are off."""


def base_model_of(model: CausalLM) -> CausalLM:
    """The transformers model under a PEFT wrapper (LoRA layers stay in place), or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def walk(model: nn.Module, *, with_lora: bool = True) -> Iterator[nn.Module]:
    """Every module once, a parent before its children; without those that hold LoRA weights if asked.

    `model.modules()` makes the path of every module: 70 ms for 64 layers with LoRA, and each replay walks a few times.
    """
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        for name, child in reversed(module._modules.items()):
            if child is not None and (with_lora or not name.startswith("lora_")):
                waiting.append(child)


def _each_lora_layer(model: CausalLM) -> Iterator[Any]:
    return (m for m in walk(model) if hasattr(m, "lora_A") and hasattr(m, "enable_adapters"))


def lora_layers(model: CausalLM) -> list[Any]:
    return list(_each_lora_layer(model))


def is_lora_parameter(name: str) -> bool:
    return ".lora_" in name


def adapter_state(model: CausalLM) -> AdapterState:
    """Which adapters act on a forward now."""
    first = next(_each_lora_layer(model), None)
    return () if first is None or first.disable_adapters else tuple(sorted(first.active_adapters))


@contextmanager
def adapters_disabled(model: CausalLM) -> Iterator[None]:
    """Turn every adapter off for the block and restore what was active, `requires_grad` flags included.

    PEFT's own switch forgets parameters that were frozen by hand: it re-enables the gradient of every active adapter.
    """
    layers = [layer for layer in lora_layers(model) if not layer.disable_adapters]
    flags = {p: p.requires_grad for layer in layers for p in layer.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def weights_fingerprint(model: CausalLM, *, with_adapters: bool) -> int:
    """Changes whenever a weight that the capture depends on was replaced or written in place.

    Optimizers that write through raw pointers leave the version counters alone; after those call
    `LongStrawSession.mark_weights_updated()`.
    """
    modules = walk(model, with_lora=with_adapters)
    held = [local(p) for module in modules for p in module._parameters.values() if p is not None]
    return hash(tuple((p.data_ptr(), p._version) for p in held))


def adapter_digest(model: CausalLM) -> str:
    """SHA-256 over names and bytes of all LoRA parameters: equal on ranks that hold the same adapter."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        if is_lora_parameter(name):
            digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
            digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_trainable_lora(model: CausalLM) -> None:
    """Raise unless at least one LoRA parameter is there and trainable."""
    names = [(name, p) for name, p in model.named_parameters() if is_lora_parameter(name)]
    if not names:
        raise ConfigurationError(
            "the model carries no LoRA adapter; LongStraw accumulates LoRA gradients only. Wrap it first, for example "
            "peft.get_peft_model(model, adapter.lora_config(r=16)), or pass `peft_config` to the trainer"
        )
    if not any(p.requires_grad for _, p in names):
        raise ConfigurationError(
            f"all {len(names)} LoRA parameters are frozen (requires_grad=False), so nothing would be trained. Load the "
            "adapter with is_trainable=True, or activate it with model.set_adapter(name)"
        )


@dataclass(frozen=True)
class CoverageRow:
    """How many of the linears with one name, in layers of one kind, carry LoRA."""

    layer_kind: str
    linear: str
    n_layers: int
    n_with_lora: int
    n_trainable_parameters: int


@dataclass(frozen=True)
class LoRACoverage:
    """Which linears of each layer kind carry trainable LoRA. `str()` of it is a table."""

    rows: tuple[CoverageRow, ...]

    @property
    def missing(self) -> tuple[CoverageRow, ...]:
        """Linears that at least one layer leaves without LoRA."""
        return tuple(row for row in self.rows if row.n_with_lora < row.n_layers)

    def __str__(self) -> str:
        lines = [f"{'layer kind':<18} {'linear':<28} {'with LoRA':>12} {'trainable':>12}"]
        for row in self.rows:
            carried = f"{row.n_with_lora} of {row.n_layers}"
            lines.append(f"{row.layer_kind:<18} {row.linear:<28} {carried:>12} {row.n_trainable_parameters:>12,}")
        return "\n".join(lines)


def lora_coverage(model: CausalLM, layer_kinds: Mapping[int, str], no_gradient: Sequence[str] = ()) -> LoRACoverage:
    """Coverage of the linears and stacked experts in `model`'s decoder layers.

    Args:
        layer_kinds: what each layer index is called, as "recurrent".
        no_gradient: names of modules to leave out.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    for name, wrapper in _adaptable(model):
        place = _IN_LAYER.fullmatch(name)
        if place is None or set(no_gradient) & set(name.split(".")):
            continue
        own = [] if wrapper is None else [p for n, p in wrapper.named_parameters() if n.startswith("lora_")]
        trainable = sum(p.numel() for p in own if p.requires_grad)
        entry = counts.setdefault((layer_kinds.get(int(place["layer"]), "other"), place["linear"]), [0, 0, 0])
        entry[0] += 1
        entry[1] += bool(trainable)
        entry[2] += trainable
    return LoRACoverage(tuple(CoverageRow(kind, name, *entry) for (kind, name), entry in counts.items()))


def _adaptable(model: CausalLM) -> Iterator[tuple[str, Any]]:
    """Every linear and stacked expert: its name without PEFT's wrappers, and the wrapper that carries its LoRA."""
    for path, module in model.named_modules():
        if ".lora_" in path:
            continue
        name = path
        wrappers = {}
        while name.endswith(".base_layer"):
            name = name.removesuffix(".base_layer")
            wrapper = model.get_submodule(name)
            wrappers[getattr(wrapper, "parameter_name", "weight")] = wrapper
        if isinstance(module, nn.Linear):
            yield name, wrappers.get("weight")
        elif hasattr(module, "num_experts"):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3 and "lora_" not in parameter_name:
                    yield f"{name}.{parameter_name}", wrappers.get(parameter_name)


def model_device(model: CausalLM) -> torch.device:
    """Where the token embedding lives, which is where inputs go."""
    return next(model.parameters()).device
