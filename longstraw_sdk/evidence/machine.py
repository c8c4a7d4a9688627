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
