"""Which operator computes prefix attention."""

from __future__ import annotations

import logging
from functools import cache

import torch

from ..environment import ATTENTION as VARIABLE
from ..environment import asked
from ..errors import ConfigurationError
from .attention_cudnn import CudnnAttention, why_not_cudnn, why_not_kernel
from .attention_parts import AttentionOperator
from .attention_reference import ReferenceAttention

_LOG = logging.getLogger(__name__)


def choose_attention(query: torch.Tensor, value: torch.Tensor) -> AttentionOperator:
    """The operator for queries [..., D] and values [..., Dv]. Chosen, and logged, once per kind of input."""
    return _choose(asked(VARIABLE), query.device, query.dtype, query.shape[-1], value.shape[-1])


@cache
def _choose(name: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> AttentionOperator:
    reason = "it was asked for" if name == "reference" else why_not_cudnn(device, dtype, dim, value_dim)
    if name == "cudnn" and reason is not None:
        raise ConfigurationError(f"{VARIABLE}='cudnn' cannot be used: {reason}")
    without = why_not_kernel(device, dtype, dim) if reason is None else None
    chosen: AttentionOperator = ReferenceAttention() if reason else CudnnAttention(with_kernel=without is None)
    told = f", because {reason}" if reason else f", its kernel for queries alone unused: {without}" if without else ""
    _LOG.info("prefix attention of %s on %s, heads of %d and %d: %s", dtype, device, dim, value_dim, chosen.name + told)
    return chosen
