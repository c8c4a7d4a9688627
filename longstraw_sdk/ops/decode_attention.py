"""Attention of one new token per row over the resident prefix and over rows in memory of a fixed size."""

from __future__ import annotations

import torch

from ..state.resident import PagedView
from ..types import accumulation_dtype
from .attention_choice import choose_attention
from .attention_parts import Part, merge_parts


@torch.no_grad()
def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: PagedView, scale: float, last: torch.Tensor
) -> torch.Tensor:
    """`prefix_attention` of a token whose own key is row `last` of those in memory; sizes do not depend on `last`.

    Args:
        query: [B, Hq, 1, D].
        key, value: [B, Hkv, L, D] and [B, Hkv, L, Dv]: row 0 to `last` of each batch entry are there.
        view: the resident rows, which every one of the B rows sees, all of them on this rank.
        scale: factor on the scores.
        last: LongTensor [1] on the device of `query`.
    """
    assert view.context is None, "the ranks of a context exchange what they found, which decode_attention does not"
    batch, n_heads, _, dim = query.shape
    q = query.view(batch, key.shape[1], n_heads // key.shape[1], dim)
    operator = choose_attention(query, value)
    found = operator.attend_to_pages(q.transpose(0, 1).flatten(1, 2), view, scale, value.shape[-1])
    out, lse = (x.unflatten(1, (batch, -1)).transpose(0, 1) for x in found)
    out, _ = merge_parts([_own_rows(q, key, value, scale, last), (out, lse)])
    return out.flatten(1, 2)[:, :, None].to(query.dtype)


def _own_rows(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, last: torch.Tensor) -> Part:
    """`q` [B, Hkv, g, D] over the rows up to `last`."""
    dtype = accumulation_dtype(q.dtype)
    scores = q.to(dtype) @ key.to(dtype).transpose(2, 3) * scale
    scores = scores.masked_fill(torch.arange(key.shape[2], device=q.device) > last, float("-inf"))
    return scores.softmax(-1) @ value.to(dtype), scores.logsumexp(-1)
