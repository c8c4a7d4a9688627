"""Adapter of the GLM-5.2 architecture (transformers `glm_moe_dsa`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from peft.tuners.lora.layer import ParamWrapper
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaExperts, GlmMoeDsaTopkRouter

from longstraw_sdk.adapter import StateView
from longstraw_sdk.hf import TransformersAdapter
from longstraw_sdk.state import ContextGroup, IndexerKeySpec, MLALatentSpec, StateSpec
from longstraw_sdk.types import CausalLM

from .attention import swap_attention
from .cache import LatentCache, LatentLayer
from .expert_shards import cut_expert_lora, gather_expert_lora, mark_expert_shards
from .experts import Spread, swap_experts
from .tape import DecisionTape, TapeMode, swap_deciders

_EXPERT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class GLM52Adapter(TransformersAdapter):
    """Keeps the compressed latent and rotary key of every layer, and the indexer keys of the layers that select.

    576 numbers per token and layer and 128 more per selecting layer: 95,232 bytes per token in bfloat16 for the
    released geometry (78 layers, 21 of them selecting).

    Args:
        tape: whether passes over the same tokens take the same experts and select the same tokens; see `DecisionTape`.
    """

    model_types: ClassVar[tuple[str, ...]] = ("glm_moe_dsa",)
    layer_types: ClassVar[tuple[str, ...]] = ("indexed_attention",)
    latent_attention: ClassVar[bool] = True
    context_parallel: ClassVar[bool] = True
    expert_parallel: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
    )
    # As parameters, because PEFT turns gate_proj, up_proj and down_proj among the modules into the experts alone.
    lora_parameter_targets: ClassVar[tuple[str, ...]] = (
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight",
        "shared_experts.down_proj.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    )
    no_gradient: ClassVar[tuple[str, ...]] = ("indexer",)
    # A dict in place of the mask keeps transformers from building one of [S, T].
    forward_options: ClassVar[dict[str, Any]] = {"attention_mask": {"indexed_attention": None}}

    def __init__(self, tape: TapeMode = "off"):
        self.tape = DecisionTape(tape)

    def state_specs(self, model: CausalLM) -> tuple[StateSpec, ...]:
        return specs_of(model.config, model.dtype)

    def find_problems(self, model: CausalLM) -> list[str]:
        problems = super().find_problems(model)
        kinds = list(getattr(model.config, "indexer_types", None) or ["missing"])
        if set(kinds) - {"full", "shared"} or kinds[0] != "full" or len(kinds) != model.config.num_hidden_layers:
            problems.append(
                f"config.indexer_types={kinds} is not one of 'full' or 'shared' per layer, starting with 'full': a "
                "shared layer reuses the selection of the last full one"
            )
        problems += _layer_problems(model)
        problems += _expert_problems(model, self.experts)
        if any(isinstance(getattr(m, "base_layer", None), GlmMoeDsaTopkRouter) for m in model.modules()):
            problems.append("LoRA is on a router, whose choice has no gradient; leave gate.weight out of the targets")
        return problems

    def install(self, model: CausalLM) -> Callable[[], None]:
        def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("cache")
            if isinstance(cache, LatentCache) and self.tape.mode != "off":
                ids = kwargs["input_ids"] if cache.new_ids is None else cache.new_ids
                cache.begin(self.tape.open_pass(cache.end_keys, ids, cache.part))

        if self.experts is not None:
            mark_expert_shards(model)
        undo = ExitStack()
        undo.callback(swap_attention(model, self.tape))
        undo.callback(swap_experts(model, None if self.experts is None else Spread(self.experts, self.through_experts)))
        undo.callback(swap_deciders(model, self.tape))
        undo.callback(model.base_model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        return undo.close

    def resident_cache(self, model: CausalLM, view: StateView, *, keep_rows: bool) -> LatentCache:
        layers = [LatentLayer(view, layer, keep_rows=keep_rows) for layer in range(model.config.num_hidden_layers)]
        key = 0 if self.tape.mode == "off" else self.tape.prefix_key(view)
        return LatentCache(layers, [key] * view.n_rows)

    def reference(self, model: CausalLM, ids: torch.Tensor) -> AbstractContextManager[None]:
        return self.tape.reference(model, ids)

    def share_choices(self, context: ContextGroup) -> None:
        self.tape.share(context)

    def gather_shards(self, model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.experts is None:
            return dict(tensors)
        return gather_expert_lora(tensors, model.config.n_routed_experts // self.experts.size, self.experts)

    def own_shards(self, model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.experts is None:
            return dict(tensors)
        return cut_expert_lora(tensors, model.config.n_routed_experts, self.experts.rank, self.experts.size)

    def metrics(self) -> dict[str, float]:
        return {f"flip_rate_{kind}": rate for kind, rate in self.tape.flip_rates().items()}

    def forget(self) -> None:
        self.tape.clear()


def _layer_problems(model: CausalLM) -> Iterator[str]:
    n_layers = len(model.base_model.layers)
    if n_layers != model.config.num_hidden_layers:
        yield (
            f"it has {n_layers} decoder layers but config.num_hidden_layers={model.config.num_hidden_layers}; a layer "
            "for multi-token prediction (number 78 of the released checkpoint) is not served: leave it out, as "
            "from_pretrained does"
        )
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "num_experts"):
            experts = module.get_base_layer() if isinstance(module, ParamWrapper) else module
            weights = [p for p in experts.parameters(recurse=False) if p.ndim == 3]
            if type(experts) is not GlmMoeDsaExperts or any(p.dtype not in _EXPERT_DTYPES for p in weights):
                dtypes = ", ".join(sorted({str(p.dtype) for p in weights}))
                yield (
                    f"{name} is {type(experts).__name__} in {dtypes}; experts must be GlmMoeDsaExperts in bfloat16, "
                    "float16, float32 or float64: quantised experts have no backward here, so load them dequantised"
                )
                return


def _expert_problems(model: CausalLM, group: ContextGroup | None) -> Iterator[str]:
    n_experts = model.config.n_routed_experts
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    for name, module in model.named_modules():
        if isinstance(module, GlmMoeDsaExperts):
            held, first = module.num_experts, getattr(module, "first_expert", 0)
            if (held * size, first) != (n_experts, rank * held):
                yield (
                    f"{name} holds experts {first} to {first + held - 1} of {n_experts}, but with expert_parallel_size="
                    f"{size} rank {rank} must hold the {rank}-th of {size} equal parts; load the model with "
                    f"load_expert_shard(folder, {rank}, {size})"
                )
                return


def specs_of(config: Any, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """What each layer of a model with `config` keeps; needs no model, so that a planner can ask."""
    specs: list[StateSpec] = []
    for layer, kind in enumerate(config.indexer_types):
        specs.append(
            MLALatentSpec(layer=layer, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim, dtype=dtype)
        )
        if kind == "full":
            specs.append(IndexerKeySpec(layer=layer, dim=config.index_head_dim, dtype=dtype))
    return tuple(specs)
