"""The files of a run folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

RUN = "run"
JOURNAL = "journal.jsonl"
REQUEST = "request.json"
MODEL = "model-snapshot.json"
MEMORY = "memory.jsonl"
RANKS = "rank-sessions.json"
GRADIENT = "gradient-witness.json"
ROLLOUTS = "rollouts"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
