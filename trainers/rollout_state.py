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
"""Of the first context; further ones, with prompts of their own, add their number to the stem."""


def _path(folder: Path, context: int) -> Path:
    name = Path(FILE_NAME)
    return folder / (name if context == 0 else f"{name.stem}_{context}{name.suffix}")


def save_rollouts(
    folder: Path, step: int, batches: list[dict[str, Any]], *, context: int = 0, n_contexts: int = 1
) -> None:
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
    metadata = {"step": str(step), "n_batches": str(len(batches)), "n_contexts": str(n_contexts)}
    save_file(tensors, _path(folder, context), metadata=metadata)


def load_rollouts(
    folder: Path, device: torch.device, *, context: int = 0, n_contexts: int = 1
) -> tuple[int, list[dict[str, torch.Tensor]]] | None:
    """What `save_rollouts` wrote: (micro-step counter, micro-batches); None if the checkpoint holds none.

    Raises `ConfigurationError` if it was saved in the middle of a generation by another number of contexts.
    """
    if not _path(folder, 0).exists():
        return None
    with safe_open(_path(folder, 0), framework="pt") as first:
        metadata = first.metadata()
    saved = int(metadata["n_contexts"])
    if int(metadata["n_batches"]) == 0:
        return int(metadata["step"]), []
    if saved != n_contexts:
        raise ConfigurationError(
            f"{folder} was saved in the middle of a generation batch that {saved} contexts (ranks with prompts of "
            f"their own) had shared out, and {n_contexts} are running; resume with {saved}, or from a checkpoint "
            "between two generation batches"
        )
    with safe_open(_path(folder, context), framework="pt", device=str(device)) as file:
        batches: list[dict[str, torch.Tensor]] = [{} for _ in range(int(metadata["n_batches"]))]
        for key in file.keys():  # noqa: SIM118, a safetensors handle is no mapping
            index, name = key.split(".", 1)
            batches[int(index)][name] = file.get_tensor(key)
    return int(metadata["step"]), batches
