"""The contract between the engine and an architecture, and the registry that finds it.

An adapter answers five questions; everything that varies between architectures is in what it returns.
`models/README.md` says how to write one and how to prove it.
"""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .errors import RegistryError
from .ops import ThroughExperts, through_experts
from .state.context import ContextGroup
from .state.resident import PagedView, ResidentState
from .state.specs import StateKey, StateSpec
from .types import CausalLM

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class StateView:
    """What one forward may read of a resident state.

    Args:
        state: the resident state.
        boundary: the chunk boundary that the forward starts from; it sees the first `bounds[boundary]` tokens.
        n_rows: rows B of the forward; all of them continue the same prefix.
        accumulate: collect gradients with respect to what is read.
        state_only: only what the forward produces is wanted; its last hidden state may be anything.
    """

    state: ResidentState
    boundary: int
    n_rows: int = 1
    accumulate: bool = False
    state_only: bool = False

    @property
    def n_tokens(self) -> int:
        return self.state.bounds[self.boundary]

    @property
    def n_owned(self) -> int:
        """Rows of those tokens that are kept on this rank."""
        return self.state.owned[self.boundary]

    def paged(self, key: StateKey, *, split: bool) -> PagedView:
        """The rows of one paged state. `split` says that new tokens are split over the ranks of the context."""
        row_map = self.state.row_map
        return PagedView(
            self.state.paged[key], self.n_owned, self.accumulate, row_map, split and row_map is not None, self.n_tokens
        )


@dataclass(frozen=True)
class DecoderOutput:
    """Result of one decoder forward.

    Args:
        hidden: [B, T, H], the last hidden state, after the final norm and before the LM head; if the view was
            `state_only`, anything of that shape. Under context parallelism T is the width of this rank's slice,
            padding included.
        produced: for every `StateSpec.key`, component name -> tensor with a batch axis in front: the T new rows of a
            paged spec `[B, *leading, T, *trailing]`, the end state of a recurrent one `[B, *leading, *trailing]`.
            They carry the graph of the forward.
    """

    hidden: torch.Tensor
    produced: Mapping[StateKey, Mapping[str, torch.Tensor]]


class ResidentStateAdapter(ABC):
    """How the engine runs one architecture. `model` is always the unwrapped causal LM, with LoRA layers in place.

    Class attributes:
        model_types: `config.model_type` values that the adapter is made for.
        lora_targets: names of the linears that `lora_config` covers: all of them, in every layer kind.
        lora_parameter_targets: names of parameters that it covers beside them, as stacked experts.
        no_gradient: names of modules whose output has no gradient, so that LoRA on their linears would learn nothing.
        context_parallel: whether `forward` runs only this rank's slice of the tokens when `view.state.context` is set.
        expert_parallel: whether `bind` and `forward` reach experts on the other ranks of `experts`.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    lora_targets: ClassVar[tuple[str, ...]] = ()
    lora_parameter_targets: ClassVar[tuple[str, ...]] = ()
    no_gradient: ClassVar[tuple[str, ...]] = ()
    context_parallel: ClassVar[bool] = False
    expert_parallel: ClassVar[bool] = False

    experts: ContextGroup | None = None
    """The ranks among which stacked experts are spread; the session sets it before it asks anything."""

    through_experts: ThroughExperts = staticmethod(through_experts)
    """How tokens reach them; the session sets it too."""

    @abstractmethod
    def validate(self, model: CausalLM) -> None:
        """Raise `UnsupportedModelError`, listing everything found, if this model cannot be served exactly."""

    @abstractmethod
    def state_specs(self, model: CausalLM) -> tuple[StateSpec, ...]:
        """What each decoder layer keeps of a prompt."""

    @abstractmethod
    def bind(self, model: CausalLM) -> Callable[[], None]:
        """Prepare `model` for `forward` and return the function that undoes it. The stock forward keeps working."""

    @abstractmethod
    def forward(self, model: CausalLM, input_ids: torch.Tensor, view: StateView) -> DecoderOutput:
        """Run the decoder on `input_ids` [B, T], continuing the prefix that `view` shows.

        It must be functional: nothing that `view` shows is written, so that checkpoint recompute and a second replay
        see the same state.
        """

    @abstractmethod
    def generation_cache(self, model: CausalLM, view: StateView) -> Any:
        """A cache for `model.generate(cache=...)` in which `view.n_rows` rows continue the one prefix."""

    def reference(self, model: CausalLM, ids: torch.Tensor) -> AbstractContextManager[None]:
        """A context in which stock forwards of `model` over `ids` [T] decide what resident passes over them decided.

        For architectures that make discrete choices; others have nothing to agree on.
        """
        return nullcontext()

    def share_choices(self, context: ContextGroup) -> None:
        """Give every rank of `context` the discrete choices that were made on the others; every rank calls it."""
        return None

    def gather_shards(self, model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors`, shaped and named as LoRA parameters, with the parts that the other ranks of `experts` hold.

        Every rank calls it.
        """
        return dict(tensors)

    def own_shards(self, model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse of `gather_shards`: this rank's part of whole `tensors`."""
        return dict(tensors)

    def metrics(self) -> dict[str, float]:
        """Figures of this adapter for the training log, by name."""
        return {}

    def forget(self) -> None:
        """New responses begin: drop what was remembered about single sequences."""
        return None

    def lora_config(self, r: int = 16, lora_alpha: int | None = None, **options: Any) -> LoraConfig:
        """A PEFT preset with LoRA on every linear of every layer kind; `options` go to `peft.LoraConfig`."""
        from peft import LoraConfig

        options.setdefault("target_modules", list(self.lora_targets))
        if self.lora_parameter_targets:
            options.setdefault("target_parameters", list(self.lora_parameter_targets))
        options.setdefault("task_type", "CAUSAL_LM")
        return LoraConfig(r=r, lora_alpha=2 * r if lora_alpha is None else lora_alpha, lora_dropout=0.0, **options)


_DENSE = "longstraw_sdk.models.dense:DenseAdapter"
_REGISTRY: dict[str, str | type[ResidentStateAdapter]] = {
    "glm_moe_dsa": "longstraw_sdk.models.glm52:GLM52Adapter",
    "qwen3_5_text": "longstraw_sdk.models.qwen36:Qwen36Adapter",
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "smollm3": _DENSE,
}


def register_adapter(model_type: str, adapter: str | type[ResidentStateAdapter]) -> None:
    """Register `adapter`, a class or a lazily imported "module:Class", for `config.model_type`.

    Registering the same adapter twice is allowed; another one for a taken model type raises `RegistryError`.
    """
    known = _REGISTRY.get(model_type)
    if known is None or _adapter_name(known) == _adapter_name(adapter):
        _REGISTRY[model_type] = adapter
    elif _load(known) is not adapter:
        raise RegistryError(
            f"model type {model_type!r} is served by {_adapter_name(known)} already, so {_adapter_name(adapter)} "
            "cannot be registered for it; pass it as `adapter=` instead"
        )


def adapter_for(model: CausalLM) -> ResidentStateAdapter:
    """A new adapter for `model.config.model_type`. Raises `RegistryError` with the nearest known names."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type not in _REGISTRY:
        near = difflib.get_close_matches(str(model_type), list(_REGISTRY), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RegistryError(
            f"no adapter is registered for model type {model_type!r} (known: {', '.join(sorted(_REGISTRY))}){hint}. "
            "Pass `adapter=`, for a plain decoder DenseAdapter(), or register your own with register_adapter()"
        )
    return _load(_REGISTRY[model_type])()


def _load(adapter: str | type[ResidentStateAdapter]) -> type[ResidentStateAdapter]:
    if not isinstance(adapter, str):
        return adapter
    module_name, _, class_name = adapter.partition(":")
    loaded: type[ResidentStateAdapter] = getattr(importlib.import_module(module_name), class_name)
    return loaded


def _adapter_name(adapter: str | type[ResidentStateAdapter]) -> str:
    return adapter if isinstance(adapter, str) else f"{adapter.__module__}:{adapter.__qualname__}"
