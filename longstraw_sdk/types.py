"""Small shared types. Axes in all docstrings: G group members, P prompt tokens, R response tokens, B packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

GradientScope = Literal["response", "full"]
PrefixAdapter = Literal["live", "frozen"]
StateDevice = Literal["auto", "cuda", "cpu"]

CausalLM = Any
"""A causal language model, usually a transformers one, PEFT-wrapped or not. `nn.Module` types every attribute as
`Tensor | Module`, which says less than nothing about configs and methods."""


def is_shared(parameter: torch.Tensor) -> bool:
    """Whether every rank holds this parameter. Experts that are spread over ranks carry Megatron's mark for it."""
    return bool(getattr(parameter, "allreduce", True))


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this rank holds; all of it unless FSDP2 shards it."""
    part: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return part


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` state are summed: float32, or float64 for float64 state."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class ReplayOutput:
    """Result of replaying one response.

    Args:
        logps: float tensor [R], log-probability of every response token, with the graph of this response only.
        entropy: float tensor [R], entropy (nats) of the distribution that each response token was drawn from.
    """

    logps: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class Reduction:
    """How gradients were reduced over one group of ranks.

    Args:
        group: "context" (ranks that share a prompt), "expert copies" (ranks that hold the same experts) or "data"
            (ranks with other prompts). Megatron's are "all" and "all expert copies", of contexts and data alike.
        ranks: the global ranks of the group.
        operation: "sum", "mean", or "sum / n": the sum over all ranks divided by the n contexts.
        n_parameters, n_elements: what was reduced.
    """

    group: str
    ranks: tuple[int, ...]
    operation: str
    n_parameters: int
    n_elements: int


@dataclass(frozen=True)
class FinalizeResult:
    """What one `finalize()` closed.

    Args:
        n_prefixes: prompts that took part in the update.
        n_sweeps: how many of them were swept (full scope, something was accumulated).
        n_swept_tokens: prefix tokens that the sweeps forwarded and back-propagated.
        reductions: over which groups the gradient was reduced, and how; empty for one process.
    """

    n_prefixes: int
    n_sweeps: int
    n_swept_tokens: int
    reductions: tuple[Reduction, ...] = ()
