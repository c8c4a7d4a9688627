"""The rollouts that a checkpoint interrupts: without them a resumed run would draw new ones and leave its path.

TRL reuses one generation batch over several optimizer steps (`num_iterations`, `steps_per_generation`) and does not
save it. Tensors and one integer, in safetensors: loading executes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longstraw_sdk.errors import ConfigurationError

FILE_NAME = "longstraw_rollouts.safetensors"


def save_rollouts(folder: Path, step: int, batches: list[dict[str, Any]]) -> None:
    """Write the micro-batches of the current generation and TRL's micro-step counter into a checkpoint folder."""
    tensors: dict[str, torch.Tensor] = {}
    for i, batch in enumerate(batches):
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{i}.{name}"] = value.detach().cpu().contiguous().clone()
            elif value is not None:
                raise ConfigurationError(
                    f"rollout field {name!r} is a {type(value).__name__}, which a checkpoint cannot hold; choose "
                    "save_steps so that checkpoints fall between generation batches"
                )
    save_file(tensors, folder / FILE_NAME, metadata={"step": str(step), "n_batches": str(len(batches))})


def load_rollouts(folder: Path, device: torch.device) -> tuple[int, list[dict[str, torch.Tensor]]] | None:
    """What `save_rollouts` wrote: (micro-step counter, micro-batches); None if the checkpoint holds none."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    with safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata()
        batches: list[dict[str, torch.Tensor]] = [{} for _ in range(int(metadata["n_batches"]))]
        for key in file.keys():  # noqa: SIM118, a safetensors handle is no mapping
            index, name = key.split(".", 1)
            batches[int(index)][name] = file.get_tensor(key)
    return int(metadata["step"]), batches
