"""Checkpoints of models whose experts are spread over ranks: what is written is whole, what is read is cut."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from longstraw_sdk.adapter import ResidentStateAdapter
from longstraw_sdk.lora import base_model_of, is_lora_parameter
from longstraw_sdk.types import CausalLM

_WEIGHTS = "adapter_model.safetensors"


def whole_adapter(model: CausalLM, adapter: ResidentStateAdapter) -> dict[str, torch.Tensor]:
    """The LoRA of `model` with the experts of all ranks. Every rank calls it."""
    own = {name: p.detach() for name, p in model.named_parameters() if is_lora_parameter(name)}
    return adapter.gather_shards(base_model_of(model), own)


@contextmanager
def own_adapter(checkpoint: str, model: CausalLM, adapter: ResidentStateAdapter) -> Iterator[str]:
    """A copy of the adapters in `checkpoint` with the experts of this rank only."""
    with tempfile.TemporaryDirectory() as folder:
        for path in [*Path(checkpoint).glob("adapter_*"), *Path(checkpoint).glob("*/adapter_*")]:
            target = Path(folder, path.relative_to(checkpoint))
            target.parent.mkdir(exist_ok=True)
            if path.name == _WEIGHTS:
                save_file(adapter.own_shards(base_model_of(model), load_file(path)), target, {"format": "pt"})
            else:
                shutil.copyfile(path, target)
        yield folder


def share_optimizer_state(optimizer: torch.optim.Optimizer, model: CausalLM, adapter: ResidentStateAdapter) -> None:
    """Let `optimizer.state_dict()`, which all ranks then call, be whole; `load_state_dict` takes this rank's part."""
    base = base_model_of(model)
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def changed(state: dict[str, Any], change: Callable[..., Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        entries = {index: dict(entry) for index, entry in state["state"].items()}
        for key in sorted({key for entry in entries.values() for key in entry}):
            # Moments have the parameter's shape; step counts are the same everywhere.
            shaped = {i: e[key] for i, e in entries.items() if isinstance(e.get(key), torch.Tensor) and e[key].ndim > 1}
            found = change(base, {order[i]: tensor for i, tensor in shaped.items()})
            for i in shaped:
                entries[i][key] = found[order[i]]
        return state | {"state": entries}

    optimizer.register_state_dict_post_hook(lambda _, state: changed(state, adapter.gather_shards))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: changed(state, adapter.own_shards))
