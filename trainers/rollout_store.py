"""Rollouts on the disk: what was drawn stays drawn, so that an interrupted update goes on with the same responses."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longstraw_sdk.errors import InputError
from longstraw_sdk.evidence.artifacts import alternatives, file_sha256, free_path, read_json, write_json
from longstraw_sdk.evidence.digests import facts_digest

FORMAT = 1


@dataclass(frozen=True)
class Rollouts:
    """Responses to `prompts`, one each: token ids, and the log-probs that they were drawn with where they are known."""

    token_ids: list[list[int]]
    logprobs: list[list[float]] | None


@dataclass(frozen=True)
class Stored:
    """Rollouts, the file that holds them, and the random state that their drawing left behind."""

    rollouts: Rollouts
    path: Path
    sha256: str
    random_state: Mapping[str, str]
    reused: bool


def rollouts_name(step: int, call: int, context: int) -> str:
    """File name of the `call`-th drawing of generation batch `step` in a context."""
    return f"{step:08d}-{call}" + (f"-context{context}" if context else "") + ".json"


def random_state(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def restore_random_state(states: Mapping[str, str], device: torch.device) -> None:
    found = {n: torch.frombuffer(bytearray(base64.b64decode(s)), dtype=torch.uint8) for n, s in states.items()}
    torch.set_rng_state(found["cpu"])
    if "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def find_rollouts(path: Path, request: Mapping[str, Any]) -> Stored | None:
    """What an interrupted run drew for the same request; None if there is nothing.

    Another request under the same name is that of a policy which was rolled back; it stays as evidence.
    """
    wanted = facts_digest(request)
    for candidate in alternatives(path):
        if not candidate.exists():
            return None
        if _refusal(candidate).exists():
            continue
        content = read_json(candidate)
        try:
            if content["format"] == FORMAT and content["request_sha256"] == wanted:
                rows, states = content["rows"], content["random_state_after"]
                token_ids = [row["token_ids"] for row in rows]
                logprobs = None if any(row["logprobs"] is None for row in rows) else [row["logprobs"] for row in rows]
                return Stored(Rollouts(token_ids, logprobs), candidate, file_sha256(candidate), states, reused=True)
        except (KeyError, TypeError) as error:
            raise InputError(f"{candidate} is no file of rollouts: {error}; remove it to draw anew") from error
    raise AssertionError("there is always another name")


def refuse_rollouts(path: Path) -> None:
    """Let `find_rollouts` pass over `path`, which stays as evidence."""
    _refusal(path).touch()


def _refusal(path: Path) -> Path:
    return path.with_suffix(".refused")


def store_rollouts(
    path: Path,
    request: Mapping[str, Any],
    prompts: Sequence[tuple[str, int]],
    rollouts: Rollouts,
    device: torch.device,
) -> Stored:
    """Write what was drawn for `request`, with the random state as it is now, under a name that is free.

    Args:
        prompts: identity and number of tokens of each row's prompt.
    """
    path = free_path(path)
    logprobs: Sequence[list[float] | None] = rollouts.logprobs or [None] * len(prompts)
    rows = [
        {"prompt_sha256": sha256, "n_prompt_tokens": n, "token_ids": ids, "logprobs": logps}
        for (sha256, n), ids, logps in zip(prompts, rollouts.token_ids, logprobs, strict=True)
    ]
    states = random_state(device)
    content = {
        "format": FORMAT,
        "request": request,
        "request_sha256": facts_digest(request),
        "random_state_after": states,
        "rows": rows,
    }
    return Stored(rollouts, path, write_json(path, content), states, reused=False)
