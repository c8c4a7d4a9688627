"""What a transformers decoder must look like to be served exactly. Every finding says what to do about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_CACHE_UPDATE = re.compile(r"\.update\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_HEAD_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling", "final_logit_softcapping")


def find_problems(
    model: nn.Module, supported_layer_types: Sequence[str], *, latent_attention: bool = False
) -> list[str]:
    """Everything that keeps `model` from being served, one sentence each; empty if nothing does.

    `latent_attention` says that the adapter keeps latents where the model has them.
    """
    if not isinstance(model, PreTrainedModel):
        return [f"{type(model).__name__} is not a transformers PreTrainedModel; subclass ResidentStateAdapter for it"]
    return [*_config_problems(model, supported_layer_types, latent_attention), *_module_problems(model)]


def _config_problems(
    model: PreTrainedModel, supported_layer_types: Sequence[str], latent_attention: bool
) -> Iterator[str]:
    config = model.config
    if config.get_text_config() is not config or getattr(config, "vision_config", None) is not None:
        yield (
            f"{type(model).__name__} is multimodal; load the text model alone, with AutoModelForCausalLM or the "
            "architecture's ...ForCausalLM class"
        )
        return
    if model.get_output_embeddings() is None:
        yield f"{type(model).__name__} has no LM head; load it with AutoModelForCausalLM"
    unknown = sorted(set(layer_types_of(config)) - set(supported_layer_types))
    if unknown:
        yield (
            f"layer types {', '.join(unknown)} are not served by this adapter (it knows "
            f"{', '.join(supported_layer_types)}); sliding windows and chunked attention would need state of their own"
        )
    window = getattr(config, "sliding_window", None)
    if window and not getattr(config, "layer_types", None):  # as Mistral, whose every layer then slides
        yield f"config.sliding_window={window} limits every layer; set it to None only if the model was trained without"
    if getattr(config, "kv_lora_rank", None) and not latent_attention:
        yield "multi-head latent attention (config.kv_lora_rank) keeps latents, not keys and values; write an adapter"
    changing = sorted(_rope_types(config) & {"dynamic", "longrope"})
    if changing:
        yield (
            f"its rotary frequencies (rope_type {', '.join(map(repr, changing))}) change with the length of the text, "
            "so keys kept from an earlier chunk are not those of one long forward; use 'default', 'yarn' or 'llama3'"
        )
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models have no shared prompt prefix to keep"
    for name in _HEAD_SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            yield f"config.{name}={getattr(config, name)} changes the logits after the LM head, which replay would miss"
    if getattr(config, "attn_logit_softcapping", None):
        yield f"config.attn_logit_softcapping={config.attn_logit_softcapping} changes the softmax that replay computes"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_trainable:
        yield (
            f"its weights are quantised by {type(quantizer).__name__}, which has no backward, so no gradient would "
            "reach the layers below; load it dequantised (for FP8: FineGrainedFP8Config(dequantize=True)) or with "
            "BitsAndBytesConfig(load_in_4bit=True)"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        yield (
            f"its weights are split over {model._tp_size} ranks by tensor parallelism, whose partial sums replay does "
            "not reduce; load it without tp_plan, and let ranks share prompts by context_parallel_size"
        )
    if not model._can_set_attn_implementation():
        yield "its attention does not go through transformers' AttentionInterface"


def _module_problems(model: PreTrainedModel) -> Iterator[str]:
    dropouts = sorted(
        f"{name}.p={m.p}" for name, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p
    )
    dropouts += sorted(
        f"config.{name}={value}"
        for name, value in vars(model.config).items()
        if "dropout" in name and isinstance(value, float) and value
    )
    if dropouts:
        yield (
            f"dropout is on ({', '.join(dropouts[:4])}{', ...' if len(dropouts) > 4 else ''}), so old, reference and "
            "policy log-probs would differ by chance; set every dropout to 0.0 (in the trainer: disable_dropout=True)"
        )
    for name, module in attention_modules(model):
        if getattr(module, "sliding_window", None):
            yield f"{name} attends to a sliding window of {module.sliding_window}; resident attention sees all tokens"
            break
    for name, module in attention_modules(model):
        if getattr(module, "sinks", None) is not None:
            yield f"{name} has attention sinks, which resident attention does not add to its softmax"
            break
    for name, module in attention_modules(model):
        if not _passes_kwargs_to_cache(module):
            yield (
                f"{name} ({type(module).__name__}) calls cache.update without `kwargs=`, so pages cannot reach its "
                "attention function; this architecture needs an adapter of its own"
            )
            break


def layer_types_of(config: Any) -> list[str]:
    """One type per decoder layer; configs without `layer_types` have full attention everywhere."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(p["rope_type"]) for p in [parameters, *per_layer_type] if "rope_type" in p}


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold keys and values: they know their layer and update a cache in their forward."""
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and _CACHE_UPDATE.search(_forward_source(module)):
            yield name, module


def _passes_kwargs_to_cache(module: nn.Module) -> bool:
    calls = _CACHE_UPDATE.findall(_forward_source(module))
    return all("kwargs=kwargs" in call.replace(" ", "") for call in calls)


def _forward_source(module: nn.Module) -> str:
    return _source(type(module).forward)


@cache
def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
