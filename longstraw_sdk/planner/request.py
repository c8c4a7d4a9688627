"""What a plan is asked for: a model, a group, and the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigurationError, require_at_least
from ..types import GradientScope, PrefixAdapter

BaseWeights = Literal["model", "nf4"]
Tier = Literal["cuda", "split", "cpu"]

_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "TiB": 2**40, "TB": 10**12}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})")


def parse_size(name: str, text: str) -> int:
    """Bytes of a size such as "141GiB" or "80 GB". `name` is the option, for the message."""
    found = _SIZE.fullmatch(text.strip())
    n_bytes = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if n_bytes <= 0:
        raise ConfigurationError(
            f"{name}={text!r} is not a size; write a positive number with one of the units {', '.join(_UNITS)}, such "
            "as 141GiB or 80GB"
        )
    return n_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a session would run; the planner chooses what the request leaves open.

    Args:
        chunk_tokens, page_tokens, replay_tokens, context_parallel_size, expert_parallel_size: as in `LongStrawSession`.
        tier: where pages live: "cuda" all beside the model, "cpu" all in host memory, "split" some there.
    """

    chunk_tokens: int
    page_tokens: int
    replay_tokens: int | None
    tier: Tier
    context_parallel_size: int
    expert_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A group of GRPO on a machine.

    Args:
        model: a folder with config.json, a Hub id, or a name of `geometry.GEOMETRIES`.
        gpus: GPUs of all nodes together.
        gpu_bytes: memory of each.
        host_bytes: memory of the hosts for pages, per GPU.
        prompt_tokens, response_tokens, group: P, R of every response, and G.
        scope, prefix_adapter: as in `LongStrawSession`.
        lora_rank: of LoRA on every linear.
        base_weights: "model" keeps the dtype of the config, "nf4" counts linears of the layers in bitsandbytes' NF4.
        checkpointing: backward forwards each layer again.
        optimizer: count AdamW's states.
        sampled: responses are drawn from the resident state.
        chunk_tokens, page_tokens, replay_tokens, tier, context_parallel_size, expert_parallel_size: given, or None to
            let the planner choose.
    """

    model: str
    gpus: int = 1
    gpu_bytes: int = 141 * 10**9
    host_bytes: int = 0
    prompt_tokens: int = 131_072
    response_tokens: int = 1024
    group: int = 8
    scope: GradientScope = "full"
    prefix_adapter: PrefixAdapter = "live"
    lora_rank: int = 16
    base_weights: BaseWeights = "model"
    checkpointing: bool = True
    optimizer: bool = True
    sampled: bool = True
    chunk_tokens: int | None = None
    page_tokens: int | None = None
    replay_tokens: int | None = None
    tier: Tier | None = None
    context_parallel_size: int | None = None
    expert_parallel_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "gpu_bytes", "response_tokens", "group", "lora_rank"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("prompt_tokens", self.prompt_tokens, 2)
        require_at_least("host_bytes", self.host_bytes, 0)
        for name in ("page_tokens", "replay_tokens", "context_parallel_size", "expert_parallel_size"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)
        if self.chunk_tokens is not None:
            require_at_least("chunk_tokens", self.chunk_tokens, 2)
        allowed = {"scope": GradientScope, "prefix_adapter": PrefixAdapter, "base_weights": BaseWeights}
        for name, kind in allowed.items():
            _one_of(name, getattr(self, name), get_args(kind))
        if self.tier is not None:
            _one_of("tier", self.tier, get_args(Tier))
        for name in ("context_parallel_size", "expert_parallel_size"):
            size = getattr(self, name)
            if size is not None and self.gpus % size:
                raise ConfigurationError(f"{name}={size} does not divide gpus={self.gpus}; choose a divisor")

    @property
    def collects(self) -> bool:
        """Whether gradients of the prompt are collected and swept."""
        return self.scope == "full" and self.prefix_adapter == "live"


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not known; allowed: {', '.join(map(repr, allowed))}")
