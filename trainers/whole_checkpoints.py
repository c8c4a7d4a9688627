"""Which checkpoints may be resumed: those that were written to their end, have not changed since, and fit the model."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.evidence.manifest import MANIFEST, problems_of

from .rollout_state import FILE_NAME

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def checkpoint_to_resume(asked: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint=asked` means; True is the newest whole one below `output_dir`.

    A folder without a manifest that TRL's own trainer wrote is taken as it is, with a warning.
    """
    if asked is None or asked is False:
        return None
    if asked is True:
        return _newest_whole(Path(output_dir))
    folder = Path(asked)
    if not folder.is_dir():
        raise ConfigurationError(f"resume_from_checkpoint={asked!r} is no folder")
    if not (folder / MANIFEST).exists() and not (folder / FILE_NAME).exists():
        logger.warning("%s has no %s, so that it is whole is not checked", folder, MANIFEST)
        return asked
    if problems := problems_of(folder):
        raise ConfigurationError(
            f"{folder} is not a whole checkpoint: {'; '.join(problems)}. Resume from an earlier one; "
            "resume_from_checkpoint=True takes the newest that is whole"
        )
    return asked


def check_lora(checkpoint: str, model: Any, *, spread: bool) -> None:
    """Raise `ConfigurationError` unless the adapter in `checkpoint` has the LoRA parameters of `model`.

    PEFT leaves what an adapter lacks as it was made, and says so by a warning.

    Args:
        spread: the model holds a part of the experts, whose shapes are those of the part.
    """
    path = Path(checkpoint, SAFETENSORS_WEIGHTS_NAME)
    if not path.is_file() or not isinstance(model, PeftModel):
        return
    own = {name: list(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}
    with safe_open(path, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    faults = {
        "lacks": sorted(own.keys() - found.keys()),
        "has besides": sorted(found.keys() - own.keys()),
        "has in another shape": sorted(n for n in own.keys() & found.keys() if own[n] != found[n] and not spread),
    }
    if any(faults.values()):
        told = "; ".join(f"it {what} {len(names)}, {names[0]} first" for what, names in faults.items() if names)
        raise ConfigurationError(
            f"{path} holds the LoRA of another model or configuration than this model's {len(own)} parameters: {told}. "
            "Resume with the model and peft_config that the checkpoint was written with"
        )


def _newest_whole(output_dir: Path) -> str:
    numbered = {
        int(match[1]): path
        for path in (output_dir.iterdir() if output_dir.is_dir() else ())
        if path.is_dir() and (match := _NAME.fullmatch(path.name))
    }
    refused = []
    for _, folder in sorted(numbered.items(), reverse=True):
        problems = problems_of(folder)
        if not problems:
            return str(folder)
        logger.warning("%s is left out: %s", folder, "; ".join(problems))
        refused.append(f"{folder.name}: {problems[0]}")
    told = f" ({'; '.join(refused)})" if refused else ""
    raise ConfigurationError(
        f"resume_from_checkpoint=True, but {output_dir} holds no whole checkpoint{told}; name the folder of one, or "
        "start without it"
    )
