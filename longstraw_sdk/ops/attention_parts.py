"""What an operator for prefix attention must do: attention to a part of the keys, and the gradients of a part."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..state.resident import PagedView

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention to some of the keys: output [..., Dv] and log-sum-exp [...] of the scores, -inf where there is no key."""


class Gradients(NamedTuple):
    """What the backward of any part of a row's keys needs of the whole row.

    `d_out` [..., Dv] is the gradient of the attention output, in the dtype of the query; `lse` [...] the log-sum-exp
    over all keys and `delta` [...] the sum of `out * d_out`, both in the accumulation dtype; `out` [..., Dv] is the
    output, or None for pages where the operator has no use for it.
    """

    d_out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor | None


class AttentionOperator(Protocol):
    """Computes parts of attention. Queries and keys come in the model's dtype; results have the accumulation dtype.

    Shapes: queries of the causal part are [Hkv, B, g, T, D] with keys [Hkv, B, L, D], of whose rows the last T belong
    to the queries and the first L - T precede them; queries of the prefix are [Hkv, N, D], of all rows together.
    """

    @property
    def name(self) -> str: ...

    def pages_need_out(self, view: PagedView) -> bool:
        """Whether `back_to_pages` needs `Gradients.out`, which then travels over the ranks of a context."""

    def attend_causally(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part: ...

    def back_causally(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Gradients, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of `q`, `k` and `v`."""

    def attend_to_pages(self, q: torch.Tensor, view: PagedView, scale: float, value_dim: int) -> Part: ...

    def back_to_pages(self, q: torch.Tensor, row: Gradients, view: PagedView, scale: float) -> torch.Tensor:
        """Gradient of `q`; gradients of the pages are added to their accumulators if `view` collects them."""


def merge_parts(parts: list[Part]) -> Part:
    """Attention to the union of the parts' keys."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    first, *others = (out * torch.exp(part_lse - lse)[..., None] for out, part_lse in parts)
    for other in others:
        first += other
    return first, lse
