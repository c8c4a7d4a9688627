"""The least work of a GRPO group and the fastest that a device does it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..lora import base_model_of
from ..types import CausalLM, GradientScope


@dataclass(frozen=True)
class Ceilings:
    """Measured FLOP/s of a large matrix product and of causal attention forward and backward, alone on the device."""

    products: float
    attention: float
    attention_backward: float


@dataclass(frozen=True)
class Work:
    """FLOPs of products with weights, and of attention forward and backward."""

    products: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.attention_backward + other.attention_backward,
        )

    def seconds(self, ceilings: Ceilings) -> float:
        """At the ceilings, one after the other."""
        return (
            self.products / ceilings.products
            + self.attention / ceilings.attention
            + self.attention_backward / ceilings.attention_backward
        )


@dataclass(frozen=True)
class ModelWork:
    """Work of one model.

    Recurrent layers beyond their products, norms and LoRA count as nothing, and so does what checkpointing repeats.
    """

    layer_parameters: int
    """Of the products that one token takes part in: of stacked experts those that it is routed to."""
    head_parameters: int
    attention_width: int
    """Heads times their size, summed over attention layers."""

    @classmethod
    def of(cls, model: CausalLM) -> ModelWork:
        base = base_model_of(model)
        config = base.config
        in_layers = sum(
            module.weight.numel()
            for name, module in base.base_model.named_modules()
            if isinstance(module, nn.Linear) and ".lora_" not in name
        )
        stacked = [p for name, p in base.named_parameters() if ".experts." in name and p.ndim == 3]
        if stacked:
            in_layers += sum(p.numel() for p in stacked) // len(stacked[0]) * config.num_experts_per_tok
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * head_dim * kinds.count("full_attention")
        return cls(in_layers, base.get_output_embeddings().weight.numel(), width)

    def capture(self, prompt_tokens: int) -> Work:
        """One forward of the prompt."""
        pairs = prompt_tokens**2 / 2
        return Work(2.0 * self.layer_parameters * prompt_tokens, 4.0 * self.attention_width * pairs)

    def sweep(self, prompt_tokens: int) -> Work:
        """One backward of the prompt to its inputs; base weights get no gradient."""
        pairs = prompt_tokens**2 / 2
        return Work(2.0 * self.layer_parameters * prompt_tokens, 0.0, 10.0 * self.attention_width * pairs)

    def replay(self, prompt_tokens: int, response_tokens: int, scope: GradientScope) -> Work:
        """Forward and backward of one response; in response scope the prompt's keys and values get no gradient."""
        own, prefix = response_tokens**2 / 2, float(response_tokens * prompt_tokens)
        return Work(
            4.0 * (self.layer_parameters + self.head_parameters) * response_tokens,
            4.0 * self.attention_width * (own + prefix),
            self.attention_width * (10.0 * own + (10.0 if scope == "full" else 6.0) * prefix),
        )

    def step(self, prompt_tokens: int, response_tokens: int, group: int, scope: GradientScope) -> Work:
        """A whole group, with everything of the prompt done once."""
        work = self.capture(prompt_tokens)
        for _ in range(group):
            work += self.replay(prompt_tokens, response_tokens, scope)
        return work + self.sweep(prompt_tokens) if scope == "full" else work
