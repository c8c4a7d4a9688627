"""Guards around reward functions."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from longstraw_sdk.errors import InputError


def checked_rewards(reward_funcs: Any) -> Any:
    """The reward functions, each wrapped so that NaN and infinite rewards raise. `None` stays TRL's "no reward"."""
    if reward_funcs is None:
        return None
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    return [_checked_reward(f) if callable(f) and not isinstance(f, torch.nn.Module) else f for f in functions]


def _checked_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", type(function).__name__)

    def check(rewards: Any) -> Any:
        for i, reward in enumerate(rewards):
            if reward is not None and not math.isfinite(reward):
                raise InputError(
                    f"reward function {name} returned {reward} for completion {i}; return a finite number, or None to "
                    "leave the completion out of its group"
                )
        return rewards

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

        @functools.wraps(function)
        async def checked_async(*args: Any, **kwargs: Any) -> Any:
            return check(await function(*args, **kwargs))

        return checked_async

    @functools.wraps(function, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        return check(function(*args, **kwargs))

    if not hasattr(function, "__name__"):
        checked.__name__ = name
    return checked
