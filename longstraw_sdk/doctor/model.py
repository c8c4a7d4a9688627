"""Model files, whether an adapter serves the architecture, LoRA's coverage and positions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, LongStrawError
from .check import Check
from .subject import Subject

_INDEX = "model.safetensors.index.json"


def examine(subject: Subject) -> Iterator[Check]:
    if subject.model is None:
        return
    folder = Path(subject.model)
    if folder.is_dir():
        yield _files(folder)
        if subject.model_manifest is not None:
            yield _manifest(folder, subject.model_manifest)
    elif "/" not in subject.model or folder.is_absolute():
        yield Check(
            "model files", False, f"{subject.model} does not exist", "name a model folder, or a hub id owner/name"
        )
        return
    elif subject.model_manifest is not None:
        yield Check("model manifest", False, f"{subject.model} is no folder", "download the model and name its folder")
    yield from _architecture(subject)


def _files(folder: Path) -> Check:
    """Every shard of the index, and whether each file is as long as its header says: downloads break off."""
    try:
        shards = _shards(folder)
        broken = [problem for shard in shards if (problem := _problem_of(folder / shard)) is not None]
    except (OSError, ValueError, KeyError) as error:
        return Check("model files", False, f"{folder}: {error}", "download the model again")
    if broken:
        return Check("model files", False, "; ".join(broken), "download these files again")
    return Check("model files", True, f"{len(shards)} files of weights are whole")


def _shards(folder: Path) -> list[str]:
    index = folder / _INDEX
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    single = sorted(path.name for path in folder.glob("*.safetensors"))
    if not single:
        raise ValueError("no .safetensors files (weights in other formats are pickles, which may run code)")
    return single


def _problem_of(path: Path) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, 2**27):
            return f"{path.name} has no header of safetensors"
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return f"{path.name} has no header of safetensors"
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    wanted = 8 + length + end
    return None if size == wanted else f"{path.name} has {size:,} bytes of {wanted:,}"


def _manifest(folder: Path, manifest: Path) -> Check:
    """The files of a `model-snapshot.json` by their sha256."""
    from ..evidence.artifacts import file_sha256, read_json

    try:
        files = read_json(manifest)["files"]
    except (InputError, KeyError) as error:
        remedy = "name the model-snapshot.json of a run folder"
        return Check("model manifest", False, f"{manifest} cannot be read: {error}", remedy)
    if not files:
        return Check("model manifest", False, f"{manifest} names no files", "name that of a model loaded from files")
    changed = []
    for name, facts in files.items():
        path = folder / Path(name).name
        if not path.is_file():
            changed.append(f"{name} is missing")
        elif file_sha256(path) != facts["sha256"]:
            changed.append(f"{name} is another")
    if changed:
        return Check("model manifest", False, "; ".join(changed), "take the model that the manifest was made of")
    return Check("model manifest", True, f"{len(files)} files are those of {manifest}")


def _architecture(subject: Subject) -> Iterator[Check]:
    """On a model without memory (PyTorch's meta device)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..adapter import adapter_for

    assert subject.model is not None
    try:
        config = AutoConfig.from_pretrained(subject.model, **subject.model_options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        yield Check("model configuration", False, first, "name a model folder with config.json, or a hub id")
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        adapter = adapter_for(model)
        adapter.validate(model)
    except (LongStrawError, ValueError) as error:
        remedy = "models/README.md says which models are served and how to add an architecture"
        yield Check("model architecture", False, " ".join(str(error).split()), remedy)
        return
    yield Check("model architecture", True, f"{config.model_type} is served by {type(adapter).__name__}")
    yield _coverage(model, adapter)
    yield _positions(subject, model.config)


def _coverage(model: Any, adapter: Any) -> Check:
    from peft import get_peft_model

    from ..lora import base_model_of, lora_coverage

    wrapped = get_peft_model(model, adapter.lora_config(r=1))
    kinds: dict[int, str] = {}
    for spec in adapter.state_specs(base_model_of(wrapped)):
        kinds.setdefault(spec.layer, spec.kind)
    missing = lora_coverage(base_model_of(wrapped), kinds, adapter.no_gradient).missing
    if missing:
        rows = "; ".join(f"{row.linear} of {row.layer_kind} layers" for row in missing)
        return Check("lora coverage", True, f"not reached by lora_config: {rows}", "name them in target_modules")
    return Check("lora coverage", True, "lora_config reaches every linear of every layer kind")


def _positions(subject: Subject, config: Any) -> Check:
    from ..positions import asked_positions

    try:
        extension = asked_positions(None)
    except LongStrawError:
        extension = None  # told by the check of the environment
    limit = extension.max_positions if extension is not None else getattr(config, "max_position_embeddings", None)
    wanted = (subject.prompt_tokens or 0) + (subject.response_tokens or 0)
    found = f"the model has {limit:,} positions" if limit is not None else "the model's positions have no limit"
    if wanted:
        found += f", and prompt and response take {wanted:,}"
    if limit is not None and wanted > limit:
        remedy = "shorten the prompts, or extend the positions of trainer and sampler alike (LONGSTRAW_POSITIONS)"
        return Check("positions", False, found, remedy)
    return Check("positions", True, found)
