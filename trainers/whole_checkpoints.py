"""Which checkpoints may be resumed: those that were written to their end and have not changed since."""

from __future__ import annotations

import logging
import re
from pathlib import Path

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
