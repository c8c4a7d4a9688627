"""LoRA weights and optimizer state after a closed update: safetensors, which hold nothing that runs when it is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, InputError
from ..evidence.artifacts import file_sha256, sync_folder
from ..evidence.manifest import MANIFEST, problems_of, write_manifest
from ..types import CausalLM

KEPT = 2
"""Checkpoints that stay: the last, and the one before."""


def trained_parameters(model: CausalLM) -> list[tuple[str, torch.nn.Parameter]]:
    """By name, in the order in which the optimizer gets them."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def pack_state(model: CausalLM, optimizer: torch.optim.Optimizer, taken: Callable[[torch.nn.Parameter], bool]) -> bytes:
    """Weights and optimizer state of the trained parameters that are `taken`, and the optimizer's settings.

    Raises `ConfigurationError` if the optimizer keeps what is neither a tensor nor a JSON value.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, p in trained_parameters(model):
        if taken(p):
            tensors[f"weight/{name}"] = p.detach()
            for key, value in optimizer.state.get(p, {}).items():
                place = f"state/{key}/{name}"
                if isinstance(value, torch.Tensor):
                    tensors[place] = value.detach()
                else:
                    values[place] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        facts = json.dumps({"values": values, "groups": groups}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{type(optimizer).__name__} keeps what is neither a tensor nor a JSON value ({error}), so a run could "
            "not go on from its checkpoints; use another optimizer"
        ) from error
    # safetensors refuses tensors that share memory, as tied weights do.
    return save(
        {name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, {"facts": facts}
    )


def unpack_state(model: CausalLM, optimizer: torch.optim.Optimizer, data: bytes) -> None:
    """Put what `pack_state` gave back in place; what it did not take stays as it is.

    Raises `InputError` if it is of another model or optimizer. Nothing was changed then.
    """
    from safetensors.torch import load

    tensors = load(data)
    facts = _facts(data)
    named = dict(trained_parameters(model))
    if len(facts["groups"]) != len(optimizer.param_groups):
        raise InputError("the checkpoint is of an optimizer with another number of parameter groups")
    for place, tensor in tensors.items():
        kind, _, name = place.partition("/")
        p = named.get(name if kind == "weight" else name.partition("/")[2])
        if p is None or (kind == "weight" and (p.shape, p.dtype) != (tensor.shape, tensor.dtype)):
            raise InputError(f"the checkpoint holds {place!r}, which the model has not, or in another shape or dtype")
    with torch.no_grad():
        for place, value in [*tensors.items(), *facts["values"].items()]:
            kind, _, name = place.partition("/")
            if kind == "weight":
                named[name].copy_(value)
                continue
            key, _, name = name.partition("/")
            p = named[name]
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                value = value.to(p.device)  # counters stay on the CPU, where optimizers keep them
            optimizer.state[p][key] = value
    for group, settings in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})


def _facts(data: bytes) -> dict[str, Any]:
    n_bytes = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(data[8 : 8 + n_bytes])["__metadata__"]["facts"])
    return found


def write_checkpoint(folder: Path, update: int, states: Mapping[str, bytes], facts: Mapping[str, Any]) -> Path:
    """A folder below `folder` that holds `states` by file name, all or nothing, and its manifest."""
    final = folder / f"update-{update:06d}"
    unfinished = folder / f".{final.name}"
    for path in (unfinished, final):  # `final` is of a driver that died before its journal named it
        if path.exists():
            shutil.rmtree(path)
    unfinished.mkdir(parents=True)
    for name, data in states.items():
        (unfinished / name).write_bytes(data)
    write_manifest(unfinished, {"update": update} | dict(facts))
    unfinished.rename(final)
    sync_folder(folder)
    return final


def read_checkpoint(folder: Path, manifest_sha256: str) -> dict[str, bytes]:
    """`states` by file name. Raises `InputError` if a file is not what was written, or the manifest not that one."""
    if problems := problems_of(folder):
        raise InputError(f"the run cannot go on from {folder}: {'; '.join(problems)}")
    if file_sha256(folder / MANIFEST) != manifest_sha256:
        raise InputError(f"the run cannot go on from {folder}: it is not the checkpoint that its journal names")
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def prune_checkpoints(folder: Path) -> None:
    """Delete all but the `KEPT` newest. Call it when the newest is in the journal."""
    for path in sorted(folder.glob("update-*"))[:-KEPT]:
        shutil.rmtree(path)
