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


def equal_rewards(rewards: torch.Tensor, weights: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Which rows [N] of `rewards` [N, F] belong to a group whose weighted sums are all the same, missing ones aside.

    The same up to four epsilons of the larger: the float32 mean of equal rewards is off by about one, and advantages
    are that difference over 1e-4 at least: 3e-4 for seven rewards of 0.35, 0.37 for seven of 1000.1. An optimizer that
    divides by the size of the gradient makes whole steps of that.
    """
    totals = (rewards * weights.to(rewards)).nansum(1).masked_fill(rewards.isnan().all(1), math.nan)
    groups = totals.view(-1, num_generations)
    missing = groups.isnan()
    high = groups.masked_fill(missing, -math.inf).amax(1)
    low = groups.masked_fill(missing, math.inf).amin(1)
    equal = high - low <= 4 * torch.finfo(rewards.dtype).eps * torch.maximum(high.abs(), low.abs())
    return equal.repeat_interleave(num_generations)
