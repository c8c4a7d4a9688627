"""What the environment asks for: variables that each have a few values, the first of which is the default, and one that
holds an object."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .errors import ConfigurationError

ATTENTION = "LONGSTRAW_ATTENTION"
"""Which operator computes prefix attention; "auto" is the fastest that a trial on the device found right."""

KERNELS = "LONGSTRAW_KERNELS"
"""Whether fused kernels are used where a trial on the device found them right."""

DECODE = "LONGSTRAW_DECODE"
"""Whether sampling replays a CUDA graph where it can."""

POSITIONS = "LONGSTRAW_POSITIONS"
"""A `PositionConfig` as JSON, which extends the model's positions; unset leaves them alone."""

ALLOWED = {ATTENTION: ("auto", "reference", "cudnn"), KERNELS: ("auto", "off"), DECODE: ("eager", "graph")}

_WITHOUT_KERNELS: ContextVar[bool] = ContextVar("longstraw_without_kernels", default=False)


def asked(variable: str) -> str:
    """The value of `variable`, read at every call. Raises `ConfigurationError` if it is not one of `ALLOWED`."""
    value = os.environ.get(variable, ALLOWED[variable][0])
    if value not in ALLOWED[variable]:
        raise ConfigurationError(f"{variable}={value!r} is not known; allowed: {', '.join(ALLOWED[variable])}")
    return value


def positions_text() -> str | None:
    """The value of `POSITIONS`, or None where it is not set."""
    return os.environ.get(POSITIONS)


def asked_for() -> tuple[str | None, ...]:
    """The values of all variables, unchecked: ranks must agree on them before one of them raises."""
    return (*(os.environ.get(variable, values[0]) for variable, values in ALLOWED.items()), positions_text())


def check() -> None:
    """Raise `ConfigurationError` if any variable of a few values has another; `asked_positions` checks `POSITIONS`."""
    for variable in ALLOWED:
        asked(variable)


def kernels_off() -> str | None:
    """Why no fused kernel may be used here and now, or None."""
    if asked(KERNELS) == "off":
        return f"{KERNELS} is 'off'"
    return "a reference is computed without them" if _WITHOUT_KERNELS.get() else None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within the block no fused kernel is used: for a reference that must not share their faults."""
    token = _WITHOUT_KERNELS.set(True)
    try:
        yield
    finally:
        _WITHOUT_KERNELS.reset(token)
