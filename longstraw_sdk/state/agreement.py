"""Ranks that must do the same: what one refuses all refuse, instead of waiting for it for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import ConfigurationError, InputError, LifecycleError
from ..types import is_shared, local
from .context import ContextGroup


@contextmanager
def in_step(group: ContextGroup | None, what: str, *given: object) -> Iterator[None]:
    """Checks within the block, which all ranks of `group` must pass before any goes on.

    Raises on every rank if the block raises on one, or if the ranks were `given` different tensors or values. None is
    a group of this rank alone.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    if group is not None:
        passed, same = group.agree_on(error is None, _digest(given))
        if error is None and not same:
            error = InputError(
                f"the {group.size} ranks of a {group.name} were given different {what}; ranks that share a prompt must "
                "all be given its ids, its responses and the same options"
            )
        elif error is None and not passed:
            error = LifecycleError(
                f"another rank of this {group.name} refused its {what}, so this one does not go on; see its error"
            )
    if error is not None:
        raise error


def check_same_weights(group: ContextGroup | None, model: nn.Module) -> None:
    """Raise `ConfigurationError` on every rank unless all of `group` hold the same bits in what is not trained.

    Of what is trained, and of what is spread over ranks already, only names, dtypes and shapes must agree.
    """
    if group is not None and not group.agree_on(True, _weights_digest(model))[1]:
        raise ConfigurationError(
            f"the {group.size} ranks of this run hold different weights, so they would train an adapter for none of "
            "them; load the same checkpoint in the same dtype everywhere, or seed every rank alike if it is random"
        )


def _weights_digest(model: nn.Module) -> int:
    """Of every parameter's and buffer's name, dtype, shape and sum of its bits as integers, which has no rounding."""
    held = [*model.named_parameters(), *model.named_buffers()]
    apart = [t.requires_grad or not is_shared(t) or local(t) is not t for _, t in held]
    sums = [
        torch.zeros(()) if skip else _integers(t).sum(dtype=torch.int64)
        for skip, (_, t) in zip(apart, held, strict=True)
    ]
    totals = torch.stack([total.cpu().long() for total in sums]).tolist()
    return _digest([(name, t.dtype, tuple(t.shape), total) for (name, t), total in zip(held, totals, strict=True)])


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def _digest(values: Sequence[object]) -> int:
    """Of tensors by dtype, shape and elements, of other values by their text; fits in 56 bits."""
    digest = hashlib.sha256()
    for value in values:
        seen = (value.dtype, value.shape, value.tolist()) if isinstance(value, torch.Tensor) else value
        digest.update(repr(seen).encode())
    return int.from_bytes(digest.digest()[:7])
