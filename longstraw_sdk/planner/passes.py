"""What one forward or backward is about: how many tokens, behind how many, in which numbers and by which operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Bytes per element, and which operators compute.

    Args:
        model: of weights and activations.
        sums: of accumulators: 4, or 8 for float64.
        lora_rank: r of LoRA on every linear.
        fused: fused kernels compute: cuDNN's attention and flash-linear-attention's. Otherwise plain PyTorch does.
        on_gpu: the tiles of plain operators are those for a GPU.
    """

    model: int
    sums: int
    lora_rank: int
    fused: bool
    on_gpu: bool

    @property
    def narrow(self) -> bool:
        """Whether LoRA linears are ours: those of a model in 16 bits."""
        return self.model < self.sums


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward on one rank, and its backward.

    Args:
        n_rows: rows B of the batch.
        width: tokens of each row that the rank runs.
        resident: rows of the prefix that it holds.
        prefix: tokens of the prefix on all ranks.
        page_tokens: rows of a page.
        accumulate: gradients of the prefix are collected.
        state_only: nobody wants the last hidden state, as in capture and sweep.
        ranks: of the context.
        first: nothing precedes the pass.
    """

    n_rows: int
    width: int
    resident: int
    prefix: int
    page_tokens: int
    accumulate: bool
    state_only: bool
    ranks: int = 1
    expert_ranks: int = 1

    @cached_property
    def n_tokens(self) -> int:
        return self.n_rows * self.width
