"""A sampler that is reached through a folder: requests are put there, answers are waited for.

`<id>.request.json` holds what `RolloutRequest.describe` says, with `token_ids` beside each prompt's hash and the
adapter's `path`. The answer is `<id>.response.json`, written under another name and renamed: `{"adapter_sha256": ...,
"prompts": [{"sha256": ..., "completions": [{"token_ids": [...], "logprobs": [...]}]}]}`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, SamplerError
from .protocol import Completion, RolloutRequest, checked, prompt_identity

_BYTES_PER_TOKEN = 64
_POLL_SECONDS = 0.2


class DirectorySampler:
    """Implements `Sampler` by files.

    Args:
        folder: an existing folder that both sides reach.
        timeout_seconds: how long an answer is waited for.
        max_logprob_difference, exclusive: as in `Sampler`. Files cannot make the other side give its devices back, so
            `exclusive` says that it does so between answers.
    """

    name = "directory"

    def __init__(
        self,
        folder: str | Path,
        *,
        timeout_seconds: float = 3600.0,
        max_logprob_difference: float = 0.1,
        exclusive: bool = False,
    ):
        self.folder = Path(folder)
        self.timeout_seconds = timeout_seconds
        self.max_logprob_difference = max_logprob_difference
        self.exclusive = exclusive
        if not self.folder.is_dir():
            raise ConfigurationError(f"the sampler's folder {self.folder} does not exist; make it first")

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "folder": str(self.folder)}

    def sample(self, request: RolloutRequest) -> list[list[Completion]]:
        target = self.folder / f"{request.request_id}.response.json"
        target.unlink(missing_ok=True)  # an answer of an earlier attempt
        body = request.describe()
        for entry, ids in zip(body["prompts"], request.prompts, strict=True):
            entry["token_ids"] = list(ids)
        body["adapter"]["path"] = str(request.adapter.path)
        asked = self.folder / f"{request.request_id}.request.json"
        unfinished = asked.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(body), encoding="utf-8")
        os.replace(unfinished, asked)
        try:
            return checked(request, self._parsed(request, self._wait(request, target)), self.name)
        finally:
            asked.unlink(missing_ok=True)

    def _wait(self, request: RolloutRequest, target: Path) -> Any:
        deadline = time.monotonic() + self.timeout_seconds
        while not target.is_file():
            if time.monotonic() > deadline:
                raise SamplerError(f"no answer in {target} after {self.timeout_seconds:g} s; is the sampler running?")
            time.sleep(_POLL_SECONDS)
        bound = 4096 + _BYTES_PER_TOKEN * request.n_tokens_bound
        with target.open("rb") as file:
            data = file.read(bound + 1)
        if len(data) > bound:
            raise SamplerError(f"{target} is larger than the {bound} bytes that the answer can need")
        try:
            return json.loads(data)
        except ValueError as error:
            raise SamplerError(f"{target} is not JSON: {error}") from error

    def _parsed(self, request: RolloutRequest, answer: Any) -> list[list[Completion]]:
        try:
            served, prompts = answer["adapter_sha256"], answer["prompts"]
            hashes = [entry["sha256"] for entry in prompts]
            completions = [
                [Completion(tuple(c["token_ids"]), tuple(c["logprobs"])) for c in entry["completions"]]
                for entry in prompts
            ]
        except (KeyError, TypeError) as error:
            raise SamplerError(
                f"the answer to {request.request_id} lacks a field or has another type: {error}"
            ) from None
        if served != request.adapter.sha256:
            raise SamplerError(f"the sampler served adapter {served}, not {request.adapter.sha256}")
        wanted = [prompt_identity(ids) for ids in request.prompts]
        if hashes != wanted:
            raise SamplerError("the sampler answered other prompts than it was asked: their sha256 differ")
        return completions
