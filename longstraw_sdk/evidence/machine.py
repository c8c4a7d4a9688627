"""What a result was found on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Hardware, date and the versions that decide a result; no host name."""
    names = ("longstraw-sdk", "torch", "transformers", "peft", "trl")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in names},
    }


def version_of(package: str) -> str | None:
    """None if `package` is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def observed_accelerator(device: torch.device) -> dict[str, Any]:
    """The accelerator that a rank really has; no name and no UUID on a CPU."""
    if device.type != "cuda":
        return {"device": str(device), "name": None, "uuid": None}
    properties = torch.cuda.get_device_properties(device)
    return {"device": str(device), "name": properties.name, "uuid": str(properties.uuid)}
