"""Base of the adapters for transformers decoders: what varies is which layer types there are and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ..adapter import DecoderOutput, ResidentStateAdapter, StateView
from ..errors import UnsupportedModelError
from ..state import AttentionKVSpec, StateSpec
from ..types import CausalLM
from .attention import bound_name, resident_forward
from .cache import KVLayer, RecurrentLayer, ResidentCache
from .checks import find_problems, layer_types_of
from .lora import swap_lora_linears


class TransformersAdapter(ResidentStateAdapter):
    """Serves decoders whose attention goes through `cache.update(..., kwargs=kwargs)` and the AttentionInterface.

    A subclass for an architecture with further layer types names them in `layer_types` and says in `layer_spec` what
    one keeps.
    """

    layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    latent_attention: ClassVar[bool] = False
    """Whether the adapter keeps the latents of multi-head latent attention."""
    forward_options: ClassVar[dict[str, Any]] = {}
    """Further arguments of the decoder's forward over a resident state."""

    def layer_spec(self, config: Any, layer: int, layer_type: str, dtype: torch.dtype) -> StateSpec:
        """What decoder layer `layer` of type `layer_type` keeps; here keys and values."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return AttentionKVSpec(layer=layer, n_kv_heads=n_kv_heads, key_dim=head_dim, value_dim=head_dim, dtype=dtype)

    def resident_cache(self, model: CausalLM, view: StateView, *, keep_rows: bool) -> ResidentCache:
        """The cache that shows `view` to a forward of `model`; `keep_rows` in a generation."""
        last = model.config.num_hidden_layers - 1

        def cache_layer(layer: int) -> KVLayer | RecurrentLayer:
            if (layer, "kv") not in view.state.paged:
                return RecurrentLayer(view, layer, keep_rows=keep_rows)
            return KVLayer(view, layer, keep_rows=keep_rows, output_unused=view.state_only and layer == last)

        return ResidentCache([cache_layer(layer) for layer in range(last + 1)])

    def find_problems(self, model: CausalLM) -> list[str]:
        """What keeps `model` from being served exactly, one sentence each, with what to do about it."""
        return find_problems(model, self.layer_types, latent_attention=self.latent_attention)

    def validate(self, model: CausalLM) -> None:
        problems = self.find_problems(model)
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise UnsupportedModelError(f"{type(self).__name__} cannot serve {type(model).__name__}:{listed}")

    def state_specs(self, model: CausalLM) -> tuple[StateSpec, ...]:
        types = layer_types_of(model.config)
        return tuple(self.layer_spec(model.config, i, kind, model.dtype) for i, kind in enumerate(types))

    def install(self, model: CausalLM) -> Callable[[], None]:
        """Make `model`'s attention able to read a resident state; returns the function that undoes it."""
        stock = model.config._attn_implementation
        model.set_attn_implementation(bound_name(stock))
        return lambda: model.set_attn_implementation(stock)

    def bind(self, model: CausalLM) -> Callable[[], None]:
        undo = ExitStack()
        undo.callback(self.install(model))
        try:
            undo.callback(swap_lora_linears(model))
        except BaseException:
            undo.close()
            raise
        # transformers drops the cache of a checkpointed layer unless the layer says that it only reads it. A resident
        # cache is only read: its updates are functional.
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        flags = [layer.__dict__.get("_can_checkpoint_with_cache") for layer in layers]
        for layer in layers:
            layer._can_checkpoint_with_cache = True

        def unbind() -> None:
            undo.close()
            for layer, flag in zip(layers, flags, strict=True):
                if flag is None:
                    del layer._can_checkpoint_with_cache
                else:
                    layer._can_checkpoint_with_cache = flag

        return unbind

    def forward(self, model: CausalLM, input_ids: torch.Tensor, view: StateView) -> DecoderOutput:
        cache = self.resident_cache(model, view, keep_rows=False)
        part = view.state.slice_of(input_ids.shape[1])
        cache.new_ids, cache.part = input_ids, part
        first = view.n_tokens + part.start
        positions = torch.arange(first, first + part.width, device=input_ids.device)
        with resident_forward():
            out = model.base_model(
                input_ids=part.take(input_ids),
                position_ids=positions.expand(input_ids.shape[0], -1),
                cache=cache,
                use_cache=False,
                **self.forward_options,
            )
        return DecoderOutput(out.last_hidden_state, cache.take_produced())

    def generation_cache(self, model: CausalLM, view: StateView) -> ResidentCache:
        return self.resident_cache(model, view, keep_rows=True)
