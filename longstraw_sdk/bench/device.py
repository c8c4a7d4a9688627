"""What a preset asks of the machine."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError

GIB = 2**30


def require_cuda(preset: str, n_bytes: int, instead: str) -> torch.device:
    """The first CUDA device. Raises `ConfigurationError`, with a preset to run `instead`, if it has less memory."""
    found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    if found < n_bytes:
        raise ConfigurationError(
            f"{preset} needs a CUDA device of at least {n_bytes / GIB:.0f} GiB, and "
            + (f"this one has {found / GIB:.0f} GiB" if found else "there is none")
            + f"; {instead} does the same with tiny models"
        )
    return torch.device("cuda", 0)
