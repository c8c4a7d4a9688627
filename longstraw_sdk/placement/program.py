"""What ranks run, as plain values: they cross to other machines and into the journal."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from ..errors import ConfigurationError, InputError, require_at_least
from ..session import LongStrawSession

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_OURS = {"model", "adapter", "backend", "context_parallel_size", "expert_parallel_size", "positions"}
_SESSION = set(inspect.signature(LongStrawSession).parameters) - _OURS


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """Model, objective and optimizer of a run. Functions are "module:function", importable in the image of the ranks.

    Args:
        model: gives the LoRA model, on every rank the same, on the GPU `cuda:0` (Ray shows a rank no other);
            called with `model_arguments`. Ranks that hold a part of the experts learn from the environment variable
            RANK which.
        loss: `loss(out, old, advantage)` of one response, where `out` is a `ReplayOutput`, `old` float [R] are the
            log-probs before the update and `advantage` is a number; gives a scalar, which is back-propagated. A sum
            over responses; scaling by their number is up to it.
        optimizer: called with the trained parameters and `optimizer_arguments`.
        session: options of `LongStrawSession`, without those that have a field here.
        max_grad_norm: clips the reduced gradient; None leaves it.

    Raises `ConfigurationError` for what cannot be sent or cannot work.
    """

    model: str
    loss: str
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "torch.optim:AdamW"
    optimizer_arguments: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                raise ConfigurationError(f"{name}={value!r} is no importable function; write it as 'module:function'")
        if unknown := sorted(set(self.session) - _SESSION):
            raise ConfigurationError(
                f"session has {', '.join(unknown)}; allowed: {', '.join(sorted(_SESSION))} (positions: set "
                "LONGSTRAW_POSITIONS in the image)"
            )
        require_at_least("context_parallel_size", self.context_parallel_size, 1)
        require_at_least("expert_parallel_size", self.expert_parallel_size, 1)
        if self.context_parallel_size % self.expert_parallel_size:
            raise ConfigurationError(
                f"expert_parallel_size={self.expert_parallel_size} must divide context_parallel_size="
                f"{self.context_parallel_size} here: contexts that share experts must serve each other between calls, "
                "which ranks of a driver do not"
            )
        try:
            same = json.loads(json.dumps(self.as_dict(), allow_nan=False)) == self.as_dict()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the arguments of a program must be JSON values: {error}") from error
        if not same:
            raise ConfigurationError("the arguments of a program must be JSON values: lists, and strings as keys")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """A prompt of an update, with its responses, or how to draw them.

    Args:
        prompt_ids: P token ids.
        responses: R_i token ids each; empty if they are drawn.
        n_samples: responses to draw from the resident state, with `max_new_tokens` and `seed`. A run that goes on
            after a failure draws the same again.
    """

    prompt_ids: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...] = ()
    n_samples: int = 0
    max_new_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.responses) == bool(self.n_samples):
            raise InputError(
                f"a group has either responses or n_samples, got {len(self.responses)} responses and "
                f"n_samples={self.n_samples}"
            )
        if self.n_samples and self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1 to draw responses, got {self.max_new_tokens}")


def load_function(reference: str) -> Any:
    """The object that "module:function" names. Raises `ConfigurationError` if it cannot be imported."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{reference!r} cannot be imported here: {error}. The image of the ranks must hold it"
        ) from error
