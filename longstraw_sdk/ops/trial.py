"""Trials of an operator on the device beside its reference, which decide whether it is used."""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_ERROR = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.03}
"""Relative L2 to float32 in a trial, by the dtype of the operands. 3e-3 was measured in bfloat16 and 1e-7 in float32 on
an H200, so this finds what is wrong."""


def tried(trial: Callable[[], str | None], device: torch.device) -> str | None:
    """What `trial` found wrong, or how it failed; None if nothing.

    Whoever is first to need an operator may be under autocast, in inference mode or inside of a checkpointed layer,
    whose hooks on saved tensors are none of the trial's.
    """
    try:
        with (
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(_same, _same),
        ):
            return trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and libraries raise whatever they like
        return f"a trial failed: {type(error).__name__}: {first_line(error)}"


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else ""


def too_far(name: str, found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> str | None:
    """A sentence if `found`, of operands of `dtype`, is further from `wanted` than rounding explains."""
    error = float((found.detach().float() - wanted.detach().float()).norm() / wanted.detach().float().norm())
    return None if error <= MAX_ERROR[dtype] else f"in a trial its {name} was off by {error:.1e} (relative L2)"
