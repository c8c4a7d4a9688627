"""What a run was asked for and where it ran, as JSON."""

from __future__ import annotations

import json
import math
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("longstraw-sdk", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")


def describe_run(trainer: Any, sampler: dict[str, Any]) -> dict[str, Any]:
    """Arguments (tokens masked, as transformers does), versions, data, rewards and sampler."""
    data = trainer.train_dataset
    request = {
        "arguments": trainer.args.to_dict(),
        "versions": {name: _version(name) for name in PACKAGES},
        "dataset": {
            "fingerprint": getattr(data, "_fingerprint", None),
            "n_rows": len(data) if hasattr(data, "__len__") else None,
        },
        "reward_functions": list(trainer.reward_func_names),
        "sampler": sampler,
        "adapter": type(trainer.longstraw.adapter).__name__,
        "gradient_scope": trainer.longstraw.gradient_scope,
        "prefix_adapter": trainer.longstraw.prefix_adapter,
        "positions_sha256": trainer.longstraw.positions_identity,
        "n_processes": trainer.args.world_size,
    }
    found: dict[str, Any] = _finite(json.loads(json.dumps(request, default=str)))
    return found


def observed_device(device: torch.device) -> dict[str, Any]:
    """The accelerator that a rank really has."""
    if device.type != "cuda":
        return {"device": str(device), "name": None, "uuid": None}
    properties = torch.cuda.get_device_properties(device)
    return {"device": str(device), "name": properties.name, "uuid": str(properties.uuid)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
