"""Frozen descriptions of what each layer keeps of a prompt. They own all byte arithmetic.

The page pool allocates from them, the planner adds them up and the documentation quotes them, so that there is one
truth about sizes. A paged spec grows with the prompt; a recurrent spec has a fixed size per chunk boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch

from ..types import accumulation_dtype

StateKey = tuple[int, str]
"""(decoder layer index, kind of state): one layer may hold several kinds, as MLA latents and indexer keys."""


@dataclass(frozen=True)
class Component:
    """One tensor of a layer's state.

    Rows of a paged component are `leading + (n_tokens,) + trailing`, in memory token after token; a recurrent one is
    `leading + trailing`. In a model's forward every component has a batch axis in front of it.
    """

    name: str
    leading: tuple[int, ...]
    trailing: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True

    @property
    def n_elements(self) -> int:
        return prod(self.leading) * prod(self.trailing)

    @property
    def n_bytes(self) -> int:
        """Bytes per token of a paged component, bytes in all of a recurrent one."""
        return self.n_elements * self.dtype.itemsize

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the gradient accumulator, in the same unit as `n_bytes`; 0 where no gradient flows."""
        return self.n_elements * accumulation_dtype(self.dtype).itemsize if self.differentiable else 0

    def empty_rows(self, n_tokens: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        """Memory for `n_tokens` rows of a paged component."""
        shape = (n_tokens, *self.leading, *self.trailing)
        return torch.empty(shape, dtype=self.dtype, device=device, pin_memory=pinned).movedim(0, self.token_dim)

    @property
    def token_dim(self) -> int:
        """Index of the token axis of rows of this component."""
        return len(self.leading)


@dataclass(frozen=True)
class StateSpec:
    """What one decoder layer keeps. Subclasses fill `components`."""

    kind: ClassVar[str]
    layer: int
    components: tuple[Component, ...] = field(init=False)

    @property
    def key(self) -> StateKey:
        return (self.layer, self.kind)


@dataclass(frozen=True)
class PagedSpec(StateSpec):
    """State that grows by one row per prompt token and lives on pages."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row of the layer."""
        return sum(component.n_bytes for component in self.components)

    @property
    def accumulator_bytes_per_token(self) -> int:
        """Bytes per token of the gradient accumulators that full scope adds."""
        return sum(component.accumulator_bytes for component in self.components)

    def resident_bytes(self, n_tokens: int, page_tokens: int) -> int:
        """Bytes of the pages that hold `n_tokens`; the last page counts whole."""
        return _whole_pages(n_tokens, page_tokens) * self.bytes_per_token

    def gradient_bytes(self, n_tokens: int, page_tokens: int) -> int:
        """Bytes of the gradient accumulators of those pages."""
        return _whole_pages(n_tokens, page_tokens) * self.accumulator_bytes_per_token


def _whole_pages(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens) * page_tokens


@dataclass(frozen=True)
class AttentionKVSpec(PagedSpec):
    """Keys and values of a softmax attention layer with grouped heads (MHA and GQA)."""

    kind: ClassVar[str] = "kv"
    n_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        heads = (self.n_kv_heads,)
        components = (
            Component("k", heads, (self.key_dim,), self.dtype),
            Component("v", heads, (self.value_dim,), self.dtype),
        )
        object.__setattr__(self, "components", components)


@dataclass(frozen=True)
class MLALatentSpec(PagedSpec):
    """Compressed key-value latent and its rotary key of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kind: ClassVar[str] = "mla_latent"
    latent_dim: int = 512
    rope_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        components = (
            Component("latent", (), (self.latent_dim,), self.dtype),
            Component("k_rope", (), (self.rope_dim,), self.dtype),
        )
        object.__setattr__(self, "components", components)


@dataclass(frozen=True)
class IndexerKeySpec(PagedSpec):
    """Keys of a sparse-attention indexer (DeepSeek sparse attention). Selection carries no gradient."""

    kind: ClassVar[str] = "indexer_key"
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", (Component("key", (), (self.dim,), self.dtype, differentiable=False),))


@dataclass(frozen=True)
class RecurrentSpec(StateSpec):
    """State of a linear-attention layer at a chunk boundary: the recurrent matrix and the short convolution's tail.

    Args:
        n_heads, key_dim, value_dim: the recurrent matrix is [n_heads, key_dim, value_dim] in `state_dtype`.
        conv_channels, conv_tail: the last `conv_tail` (kernel size - 1) inputs of the convolution, in `dtype`;
            `conv_tail=0` for architectures without one.
    """

    kind: ClassVar[str] = "recurrent"
    n_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_channels: int = 0
    conv_tail: int = 0
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        components = [Component("recurrent", (self.n_heads,), (self.key_dim, self.value_dim), self.state_dtype)]
        if self.conv_tail:
            components.append(Component("conv", (self.conv_channels,), (self.conv_tail,), self.dtype))
        object.__setattr__(self, "components", tuple(components))

    @property
    def bytes_per_boundary(self) -> int:
        """Bytes of the layer's state at one chunk boundary."""
        return sum(component.n_bytes for component in self.components)

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the one live set of state gradients that full scope holds."""
        return sum(component.accumulator_bytes for component in self.components)


@dataclass(frozen=True)
class StateBytes:
    """What a resident state takes on one rank.

    Args:
        by_layer: per layer with pages, their bytes and those of their gradient accumulators.
        boundary: all recurrent states at one chunk boundary.
        boundary_gradients: the one live set of their gradients.
    """

    by_layer: Mapping[int, tuple[int, int]]
    boundary: int
    boundary_gradients: int

    @classmethod
    def of(cls, specs: Iterable[StateSpec], n_tokens: int, page_tokens: int) -> StateBytes:
        """Of `n_tokens` rows of each paged layer, on pages of `page_tokens`."""
        by_layer: dict[int, tuple[int, int]] = {}
        boundary = boundary_gradients = 0
        for spec in specs:
            if isinstance(spec, PagedSpec):
                pages, gradients = by_layer.get(spec.layer, (0, 0))
                pages += spec.resident_bytes(n_tokens, page_tokens)
                by_layer[spec.layer] = (pages, gradients + spec.gradient_bytes(n_tokens, page_tokens))
            elif isinstance(spec, RecurrentSpec):
                boundary += spec.bytes_per_boundary
                boundary_gradients += spec.accumulator_bytes
        return cls(by_layer, boundary, boundary_gradients)

    @property
    def pages(self) -> int:
        return sum(pages for pages, _ in self.by_layer.values())

    @property
    def accumulators(self) -> int:
        """Of pages and of the one boundary that is being differentiated."""
        return sum(gradients for _, gradients in self.by_layer.values()) + self.boundary_gradients

    def resident(self, n_boundaries: int) -> int:
        """Pages, and recurrent states at `n_boundaries`."""
        return self.pages + n_boundaries * self.boundary


def min_forward_tokens(specs: Iterable[StateSpec]) -> int:
    """Fewest tokens of a forward behind a resident state: 2 where a layer is recurrent, otherwise 1.

    One-token forwards take another kernel in recurrent layers, one whose backward flash-linear-attention does not
    have. From an empty state even one token takes the chunk kernel, so a prefix of a single token is its own chunk.
    """
    return 2 if any(isinstance(spec, RecurrentSpec) for spec in specs) else 1
