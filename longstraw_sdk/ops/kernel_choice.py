"""Whether fused kernels may be used at all, as the environment says."""

from __future__ import annotations

import os

from ..errors import ConfigurationError

VARIABLE = "LONGSTRAW_KERNELS"
"""Environment variable: "auto" (default) uses the kernels where a trial on the device agreed with the stock code or the
reference, "off" never does."""

NAMES = ("auto", "off")


def kernels_wanted() -> bool:
    """Whether `VARIABLE` lets kernels be used; read at every call."""
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in NAMES:
        raise ConfigurationError(f"{VARIABLE}={asked!r} is not known; allowed: {', '.join(NAMES)}")
    return asked != "off"
