"""Run modelling code in true float64, although it upcasts to float32 by hand.

transformers hard-codes float32 in norms, softmax and the delta rule, so a stock "float64" model carries float32 noise
and no comparison below 1e-7 means anything. Inside `float64_upcasts` every such request becomes one for float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class float64_upcasts(TorchFunctionMode):
    """Context manager: `.float()`, `.to(float32)`, `.type(float32)` and `dtype=float32` mean float64.

    PyTorch switches the mode off inside a function that it intercepted, and `backward` is one: a checkpointed model
    must recompute under a mode of its own, `checkpoint(context_fn=float64_contexts)`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def float64_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of `torch.utils.checkpoint` that recomputes under `float64_upcasts`."""
    return nullcontext(), float64_upcasts()
