"""The policy as others load it: an ordinary PEFT folder with an identity."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SamplerError

if TYPE_CHECKING:
    import torch

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class ExportedAdapter:
    """A PEFT folder. `name` holds the first digits of `sha256`: whoever serves it by name serves these bytes."""

    path: Path
    sha256: str

    @property
    def name(self) -> str:
        return f"longstraw-{self.sha256[:16]}"

    def verify(self) -> None:
        """Raise `SamplerError` if the folder is not what was exported."""
        found = adapter_identity(self.path)
        if found != self.sha256:
            raise SamplerError(f"{self.path} changed after it was exported: its sha256 is {found}, not {self.sha256}")


def export_adapter(
    model: object, root: Path, state_dict: Mapping[str, torch.Tensor] | None = None, keep: int = 2
) -> ExportedAdapter:
    """Write the trained adapter of a `PeftModel` below `root`, and delete all but the `keep` newest.

    Args:
        state_dict: the LoRA weights to write where `model` holds only a part of them.
    """
    root.mkdir(parents=True, exist_ok=True)
    unfinished = root / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(  # type: ignore[attr-defined]
        str(unfinished), selected_adapters=["default"], **({} if state_dict is None else {"state_dict": state_dict})
    )
    identity = adapter_identity(unfinished)
    exported = ExportedAdapter(root / f"longstraw-{identity[:16]}", identity)
    if exported.path.exists():  # of an earlier drawing, or cut off by a power failure
        shutil.rmtree(exported.path)
    unfinished.rename(exported.path)
    exported.path.touch()
    others = sorted((p for p in root.iterdir() if p.is_dir() and p != exported.path), key=lambda p: p.stat().st_mtime)
    for old in others[: max(0, len(others) + 1 - keep)]:
        shutil.rmtree(old)
    return exported


def adapter_identity(folder: Path) -> str:
    """sha256 over the configuration, without the base model's path, and the weights of a PEFT folder."""
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise SamplerError(f"{folder} has no {', '.join(missing)}; only a LoRA adapter can be exported")
    config = json.loads((folder / _FILES[0]).read_text(encoding="utf-8"))
    config.pop("base_model_name_or_path", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with (folder / _FILES[1]).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def adapter_rank(folder: Path) -> int:
    """The highest rank of any LoRA in a PEFT folder."""
    config = json.loads((folder / _FILES[0]).read_text(encoding="utf-8"))
    ranks = (config.get("r"), *(config.get("rank_pattern") or {}).values())
    return max(int(rank) for rank in ranks if rank is not None)
