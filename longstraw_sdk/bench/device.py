"""What presets ask of a device and how they run on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ConfigurationError

GIB = 2**30


def require_cuda(preset: str, n_bytes: int, instead: str) -> torch.device:
    """This process's CUDA device. `ConfigurationError`, naming a preset to run `instead`, if it is too small."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    found = torch.cuda.get_device_properties(index).total_memory if index < torch.cuda.device_count() else 0
    if found < n_bytes:
        raise ConfigurationError(
            f"{preset} needs a CUDA device of at least {n_bytes / GIB:.0f} GiB, and "
            + (f"this one has {found / GIB:.0f} GiB" if found else "there is none")
            + f"; {instead} does the same with tiny models"
        )
    return torch.device("cuda", index)


def fastest_attention() -> AbstractContextManager[None]:
    """PyTorch's attention with cuDNN first, which is the fastest that it has on an H200."""
    if not torch.cuda.is_available():
        return nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    found: AbstractContextManager[None] = sdpa_kernel(kernels, set_priority=True)
    return found


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock sees what it did."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """How long `action` takes, with all that it leaves to the device."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began
