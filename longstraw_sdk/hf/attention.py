"""The attention and mask functions that transformers calls on a bound model.

A forward with a resident cache attends to its pages; any other forward goes to the implementation that the model had
before, so that the stock model works beside the bound one. One pair of functions is registered per stock
implementation, which is why binding needs no record of what was there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import InputError, UnsupportedModelError
from ..ops import Recall, decode_attention, prefix_attention
from ..state import PagedView

RESIDENT_KWARG = "longstraw_resident"
"""The keyword through which a cache layer says to the attention function of the same layer what it attends to."""


class ResidentRows(NamedTuple):
    """What one layer's attention reads beside its new rows.

    `output_unused` says that only the new rows themselves are wanted, as of a last layer that fills a state.
    """

    view: PagedView
    recall: Recall
    output_unused: bool
    last: torch.Tensor | None = None
    """Set where the new rows are memory of a fixed size: LongTensor [1], the row of the token that attends."""


_PREFIX = "longstraw_"
_STOCK = ("eager", "sdpa")
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")

# Masks are built before the layers run, so a context variable is safe for them: checkpoint recompute, which may run in
# another thread, starts inside a layer.
_RESIDENT: ContextVar[bool] = ContextVar("longstraw_resident_forward", default=False)


@contextmanager
def resident_forward() -> Iterator[None]:
    """Within the block no attention mask is built: the resident cache and causality say everything."""
    token = _RESIDENT.set(True)
    try:
        yield
    finally:
        _RESIDENT.reset(token)


def bound_name(stock: str) -> str:
    """Name of the registered pair that falls back to `stock`; kernels without a pair of their own fall back to SDPA."""
    return _PREFIX + (stock if stock in _STOCK else "sdpa")


def _attention(stock: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def longstraw_attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows: ResidentRows | None = kwargs.pop(RESIDENT_KWARG, None)
        if rows is None:
            stock_attention = _eager_of(module) if stock == "eager" else ALL_ATTENTION_FUNCTIONS[stock]
            return stock_attention(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        found = [name for name in _REFUSED if kwargs.get(name) is not None]
        if found or dropout or attention_mask is not None:
            found += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
            raise UnsupportedModelError(
                f"{type(module).__name__} passed {', '.join(found)} to attention; resident attention is plain causal "
                "softmax attention and would ignore it"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if rows.output_unused:
            batch, n_heads, n_tokens, _ = query.shape
            return query.new_zeros(batch, n_tokens, n_heads, value.shape[-1]), None
        if rows.last is not None:
            out = decode_attention(query, key, value, rows.view, scale, rows.last)
        else:
            out = prefix_attention(query, key, value, rows.view, scale, rows.recall)
        return out.transpose(1, 2).contiguous(), None

    return longstraw_attention


def _mask(stock: str) -> Callable[..., Any]:
    def longstraw_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if not _RESIDENT.get():
            return ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None and not bool(attention_mask.all()):
            raise InputError(
                "a padded row reached resident attention; rows must be unpadded: strip the padding and pass each row "
                "by itself"
            )
        return None

    return longstraw_mask


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The `eager_attention_forward` of the modelling file that defines `module` (or the class it subclasses)."""
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise UnsupportedModelError(f"{type(module).__name__} has no eager attention function in its modelling file")


for _name in _STOCK:
    AttentionInterface.register(_PREFIX + _name, _attention(_name))
    AttentionMaskInterface.register(_PREFIX + _name, _mask(_name))
