"""What a run was asked for and where it ran, as JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch

from longstraw_sdk.evidence.machine import version_of

PACKAGES = ("longstraw-sdk", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")


def describe_run(trainer: Any, sampler: dict[str, Any]) -> dict[str, Any]:
    """Arguments (tokens masked, as transformers does), versions, data, rewards and sampler."""
    data = trainer.train_dataset
    request = {
        "arguments": trainer.args.to_dict(),
        "versions": {name: version_of(name) for name in PACKAGES},
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
    found: dict[str, Any] = finite(json.loads(json.dumps(request, default=str)))
    return found


def describe_rewards(trainer: Any, advantages: torch.Tensor) -> dict[str, Any]:
    """Rewards [N, F] of all processes, null where a function gave none, and this context's advantages."""
    return {
        "functions": list(trainer.reward_func_names),
        "weights": trainer.reward_weights.tolist(),
        "num_generations": trainer.num_generations,
        "scale_rewards": str(trainer.scale_rewards),
        "aggregation": trainer.multi_objective_aggregation,
        "rewards": [[None if math.isnan(r) else r for r in row] for row in trainer._rewards.tolist()],
        "first_row": trainer._place()["context"] * len(advantages),
        "advantages": advantages.tolist(),
    }


def describe_rank(trainer: Any) -> dict[str, Any]:
    """Where this rank was meant to run, where it ran, and how long its phases took."""
    context, stats = trainer._backend.context, trainer.longstraw.stats
    return {
        "rank": trainer.args.process_index,
        "context_rank": 0 if context is None else context.rank,
        "planned": {"local_rank": trainer.args.local_process_index, "device": str(trainer.args.device)},
        "observed": _observed(trainer.longstraw.bound.device),
        "seconds": dict(stats.seconds),
        "captured_tokens": stats.captured_tokens,
        "replayed_tokens": stats.replayed_tokens,
        "swept_tokens": stats.swept_tokens,
    }


def _observed(device: torch.device) -> dict[str, Any]:
    """The accelerator that a rank really has."""
    if device.type != "cuda":
        return {"device": str(device), "name": None, "uuid": None}
    properties = torch.cuda.get_device_properties(device)
    return {"device": str(device), "name": properties.name, "uuid": str(properties.uuid)}


_SECRETS = re.compile(r"(^|_)(token|auth_token|access_token|api_key|secret|password)$")
_NO_SECRETS = re.compile(r"^(pad|eos|bos|unk|mask|sep|cls|image)_token$")


def finite(value: Any) -> Any:
    """`value` for JSON: NaN and infinities as text, secrets hidden."""
    if isinstance(value, dict):
        hidden = {name for name in value if _SECRETS.search(str(name)) and not _NO_SECRETS.match(str(name))}
        return {n: "<hidden>" if n in hidden and v is not None else finite(v) for n, v in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
