"""A model made ready for the engine: the facts that capture, replay and sweep need, found once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .adapter import ResidentStateAdapter
from .errors import ConfigurationError, InputError, LifecycleError
from .lora import base_model_of, model_device, walk
from .positions import PositionConfig, positions_of, rotary_modules
from .state import StateSpec
from .types import CausalLM, is_shared, local

_BOUND: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass(frozen=True)
class BoundModel:
    """A causal LM and its adapter. Make it with `bind_model`, undo it with `unbind`."""

    base: CausalLM
    adapter: ResidentStateAdapter
    specs: tuple[StateSpec, ...]
    device: torch.device
    vocab_size: int
    rotary: tuple[nn.Module, ...]
    """The modules that make angles of positions."""
    undo: Callable[[], None]

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has, extended or not; None if it has no limit."""
        limit: int | None = getattr(self.base.config, "max_position_embeddings", None)
        return limit

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of `hidden` [n, H]. Looked up at each call: trainers replace the module."""
        output: torch.Tensor = self.base.get_output_embeddings()(hidden)
        return output

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.base.parameters() if p.requires_grad]

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards frozen weights, so that a layer holds them only while it runs."""
        return any(local(p) is not p for p in self.base.parameters())

    def has_gradient(self) -> bool:
        """Whether a trained parameter that all ranks hold has a gradient other than zero."""
        gradients = [p.grad for p in self.trained if p.grad is not None and is_shared(p)]
        return bool(gradients) and bool(torch.stack([g.any() for g in gradients]).any())

    def unbind(self) -> None:
        if _BOUND.pop(self.base, None) is not None:
            self.undo()

    def check_ids(self, ids: torch.Tensor, what: str, position: int = 0) -> torch.Tensor:
        """Validate a 1-D LongTensor of token ids that starts at `position`, and move it to the model."""
        if not isinstance(ids, torch.Tensor) or ids.dtype != torch.long or ids.dim() != 1:
            found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            hint = " A capture holds one prompt: capture each prompt by itself." if what == "prompt" else ""
            raise InputError(f"the {what} must be a 1-D LongTensor of token ids, got {found}.{hint}")
        if not len(ids):
            raise InputError(f"the {what} is empty; at least one token is needed")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise InputError(
                f"the {what} holds token id {low if low < 0 else high}, outside the model's vocabulary 0.."
                f"{self.vocab_size - 1}; mask values such as -100 and padding must be stripped first"
            )
        if self.max_positions is not None and position + len(ids) > self.max_positions:
            raise InputError(
                f"the {what} of {len(ids)} tokens ends at position {position + len(ids)}, beyond the model's "
                f"max_position_embeddings={self.max_positions}; nothing is truncated: shorten it, or extend the "
                "positions of sampler and trainer alike (PositionConfig)"
            )
        return ids.to(self.device)

    def check_checkpointing(self) -> None:
        """Raise if gradient checkpointing is on in its reentrant form, which loses the gradients of chunk states."""
        for module in walk(self.base):
            if vars(module).get("gradient_checkpointing", False):  # where transformers switches it on
                function = getattr(module, "_gradient_checkpointing_func", None)
                if isinstance(function, partial) and function.keywords.get("use_reentrant", False):
                    raise ConfigurationError(
                        "reentrant gradient checkpointing is on; it cannot carry gradients of the resident state. Use "
                        'gradient_checkpointing_kwargs={"use_reentrant": False}'
                    )


def bind_model(model: CausalLM, adapter: ResidentStateAdapter, positions: PositionConfig | None = None) -> BoundModel:
    """Validate `model` (a causal LM, PEFT-wrapped or not) and bind it; one binding per model.

    `positions`, if given, extend it until `unbind`; a model that is extended by just these stays so.
    """
    base = base_model_of(model)
    if base in _BOUND:
        raise LifecycleError(
            f"this {type(base).__name__} is bound already by {_BOUND[base]}; close that session first (session.close())"
        )
    adapter.validate(base)
    specs = adapter.state_specs(base)
    with ExitStack() as undo:
        if positions is not None and positions_of(base) != positions:
            from .hf.positions import extend_positions

            undo.callback(extend_positions(base, positions).undo)
        undo.callback(adapter.bind(base))
        undo.callback(register_optimizer_step_post_hook(_count_update).remove)
        unbind = undo.pop_all().close
    _BOUND[base] = type(adapter).__name__
    return BoundModel(
        base=base,
        adapter=adapter,
        specs=specs,
        device=model_device(base),
        vocab_size=base.get_input_embeddings().num_embeddings,
        rotary=rotary_modules(base),
        undo=unbind,
    )


def _count_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Let the version counters show the step: PyTorch's fused optimizers write without counting."""
    torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])


@contextmanager
def progress(n_tokens: int, what: str) -> Iterator[Callable[[int], object]]:
    """A progress bar over tokens that appears only when the phase lasts longer than five seconds."""
    from tqdm.auto import tqdm

    with tqdm(total=n_tokens, desc=what, unit="tok", unit_scale=True, delay=5, leave=False, disable=None) as bar:
        yield bar.update
