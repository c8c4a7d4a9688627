"""Operators choose their own dtypes: a surrounding autocast must not change them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` with autocast off on the device of its first tensor argument.

    A backward pass started inside of an autocast block, as a trainer's is, runs under it too.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapper
