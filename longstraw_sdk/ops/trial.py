"""Trials of an operator on the device beside its reference, which decide whether it is used."""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_ERROR = 0.03
"""Relative L2 of bfloat16 against float32 in a trial; 3e-3 was measured on an H200, so this finds what is wrong."""


def tried(trial: Callable[[], str | None]) -> str | None:
    """What `trial` found wrong, or how it failed; None if nothing."""
    try:
        return trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and libraries raise whatever they like
        return f"a trial failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def too_far(name: str, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """A sentence if `found` is further from `wanted` than rounding explains."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return None if error <= MAX_ERROR else f"in a trial its {name} was off by {error:.1e} (relative L2)"
