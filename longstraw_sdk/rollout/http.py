"""A sampler that is reached over HTTP: a server of the OpenAI completions API that speaks token ids, such as vLLM.

Prompts are sent as ids and answers are read as ids (`return_token_ids`, vLLM from 0.10.2): a server that returns text
alone is refused, because text does not always tokenise back to what was drawn. At temperatures other than 1 vLLM must
be started with `--logprobs-mode processed_logprobs`, or its log-probs are those of temperature 1.

`tests/test_vllm_server.py` drives a real server; it passes with vLLM 0.32.0 on a CPU, where sleep mode does not exist.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigurationError, SamplerError
from .protocol import Completion, RolloutRequest, checked

_BYTES_PER_TOKEN = 512
"""Of an answer: an id and a log-prob take about 30, the text and the list of top log-probs beside them more."""

CONNECTION_RETRIES = 4

NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
"""vLLM takes what a request leaves out from the model's `generation_config.json`. A repetition penalty of 1.3 there
moved log-probs of a tiny model by 0.005 nats a token on average, which no trainer would refuse."""

_NEEDS = {
    "/v1/load_lora_adapter": "--enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and the trainer's output folder "
    "under the same path",
    "/wake_up": "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1; it has no sleep mode on a CPU",
}
"""What a vLLM server that answers 404 may lack."""


class HttpSampler:
    """Implements `Sampler` by `POST /v1/completions`.

    Args:
        base_url: scheme, host and port, as "http://10.0.0.7:8000".
        load_adapter: have the server load the exported adapter under its name (`POST /v1/load_lora_adapter`, vLLM with
            `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`), see it listed, and unload the one before it. The server must reach
            the trainer's output folder under the same path. If off, something else does so before requests arrive.
        api_key_variable: name of the environment variable that holds the key, if the server wants one. The key itself
            is nowhere stored.
        timeout_seconds: of one request as a whole.
        sleep: `exclusive`, by vLLM's sleep mode (`--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`): `POST /wake_up`
            before and `/sleep` after.
        max_logprob_difference: as in `Sampler`. Processed log-probs are those behind `top_p`, the trainer's are not: a
            `top_p` of 0.9 alone makes about -ln 0.9 = 0.105 nats.
    """

    name = "http"

    def __init__(
        self,
        base_url: str,
        *,
        load_adapter: bool = True,
        api_key_variable: str | None = None,
        timeout_seconds: float = 3600.0,
        sleep: bool = False,
        max_logprob_difference: float = 0.1,
    ):
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            given = "one with them" if parts.username or parts.password else repr(base_url)
            raise ConfigurationError(f"base_url must be http(s)://host:port without a user or password, got {given}")
        if api_key_variable is not None and not os.environ.get(api_key_variable):
            raise ConfigurationError(f"the environment variable {api_key_variable} that should hold the key is not set")
        self.base_url = base_url.rstrip("/")
        self.load_adapter = load_adapter
        self.api_key_variable = api_key_variable
        self.timeout_seconds = timeout_seconds
        self.exclusive = sleep
        self.max_logprob_difference = max_logprob_difference
        self._loaded: str | None = None

    def acquire(self) -> None:
        if self.exclusive:
            self._call("POST", "/wake_up", None, 65536)

    def release(self) -> None:
        if self.exclusive:
            self._call("POST", "/sleep?level=1", None, 65536)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "base_url": self.base_url, "load_adapter": self.load_adapter}

    def sample(self, request: RolloutRequest) -> list[list[Completion]]:
        if self.load_adapter:
            self._load(request)
        answer = [self._complete(request, i) for i in range(len(request.prompts))]
        return checked(request, answer, self.name)

    def _load(self, request: RolloutRequest) -> None:
        adapter, before = request.adapter, self._loaded
        adapter.verify()
        if before == adapter.name:
            return
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        refused = None
        try:
            self._call("POST", "/v1/load_lora_adapter", body, 65536)
        except SamplerError as error:
            refused = error  # as when another trainer process had it loaded
        listed = self._json("GET", "/v1/models", None, 2**20)
        names = [entry.get("id") for entry in listed.get("data", []) if isinstance(entry, dict)]
        if adapter.name not in names:
            raise refused or SamplerError(
                f"{self.base_url} does not list adapter {adapter.name} after loading it; it has {names}"
            )
        self._loaded = adapter.name if refused is None else None
        if before in names:  # not where the server was restarted
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": before}, 65536)

    def _complete(self, request: RolloutRequest, i: int) -> list[Completion]:
        ids = request.prompts[i]
        body = {
            "model": request.adapter.name,
            "prompt": list(ids),
            "n": request.n_completions,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **NEUTRAL,
            "seed": request.seed + i * request.n_completions,  # a server may count responses up from it
            "logprobs": 0,
            "stop_token_ids": list(request.stop_token_ids),
            "return_token_ids": True,
        }
        # The prompt comes back in every choice.
        bound = 65536 + request.n_completions * (_BYTES_PER_TOKEN * request.max_new_tokens + 16 * len(ids))
        answer = self._json("POST", "/v1/completions", body, bound)
        if answer.get("model") != request.adapter.name:
            raise SamplerError(
                f"{self.base_url} answered as model {answer.get('model')!r}, not as {request.adapter.name!r}"
            )
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(
            isinstance(choice, dict) and isinstance(choice.get("index", 0), int) for choice in choices
        ):
            raise SamplerError(f"{self.base_url} returned no list of choices to prompt {i}")
        return [
            self._completion(choice, answer, request, i) for choice in sorted(choices, key=lambda c: c.get("index", 0))
        ]

    def _completion(
        self, choice: Mapping[str, Any], answer: Mapping[str, Any], request: RolloutRequest, i: int
    ) -> Completion:
        ids, max_new_tokens = request.prompts[i], request.max_new_tokens
        seen = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        tokens, found = choice.get("token_ids"), choice.get("logprobs")
        logprobs = found.get("token_logprobs") if isinstance(found, dict) else None
        if not isinstance(seen, list) or not isinstance(tokens, list) or not isinstance(logprobs, list):
            raise SamplerError(
                f"{self.base_url} returned no token_ids, prompt_token_ids or token_logprobs to prompt {i}; text is not "
                "tokenised again. vLLM returns them from 0.10.2 on"
            )
        if tuple(seen) != ids:
            raise SamplerError(f"{self.base_url} answered another prompt than prompt {i}: its token ids differ")
        if choice.get("finish_reason") == "length" and len(tokens) < max_new_tokens:
            raise SamplerError(
                f"{self.base_url} stopped after {len(tokens)} of {max_new_tokens} tokens behind prompt {i} of "
                f"{len(ids)}: together they pass the server's limit (vLLM's --max-model-len)"
            )
        return Completion(tuple(tokens), tuple(logprobs))

    def _json(self, method: str, path: str, body: object, max_bytes: int) -> dict[str, Any]:
        data = self._call(method, path, body, max_bytes)
        try:
            found = json.loads(data)
        except ValueError as error:
            raise SamplerError(f"{self.base_url}{path} did not return JSON: {error}") from error
        if not isinstance(found, dict):
            raise SamplerError(f"{self.base_url}{path} returned a {type(found).__name__}, not an object")
        return found

    def _call(self, method: str, path: str, body: object, max_bytes: int) -> bytes:
        """The answer's body. Bounded in size, and in time as a whole.

        The library bounds the time between two bytes. A server that sends a byte now and then is left to a thread of
        its own, which ends with the connection or with the process.
        """
        found: list[bytes | BaseException] = []

        def send() -> None:
            try:
                found.append(self._send(method, path, body, max_bytes))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(self.timeout_seconds)
        if not found:
            raise SamplerError(f"{method} {self.base_url}{path} was not done after {self.timeout_seconds:g} s")
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def _send(self, method: str, path: str, body: object, max_bytes: int) -> bytes:
        """A connection is tried `CONNECTION_RETRIES` times more before that is an error; a request is sent once."""
        import httpx2

        deadline = time.monotonic() + self.timeout_seconds
        transport = httpx2.HTTPTransport(retries=CONNECTION_RETRIES)
        try:
            with (
                httpx2.Client(timeout=self.timeout_seconds, follow_redirects=False, transport=transport) as client,
                client.stream(method, self.base_url + path, json=body, headers=self._headers()) as response,
            ):
                data = bytearray()
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) > max_bytes:
                        raise SamplerError(f"{self.base_url}{path} sent more than {max_bytes} bytes")
                    if time.monotonic() > deadline:
                        raise SamplerError(f"{self.base_url}{path} was not done after {self.timeout_seconds:g} s")
        except httpx2.HTTPError as error:
            raise SamplerError(f"{method} {self.base_url}{path} failed: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            said = bytes(data[:500]).decode("utf-8", "replace")
            if key := self._key():
                said = said.replace(key, "...")
            needs = f"; vLLM needs {_NEEDS[path]}" if response.status_code == 404 and path in _NEEDS else ""
            raise SamplerError(f"{method} {self.base_url}{path} returned {response.status_code}: {said}{needs}")
        return bytes(data)

    def _headers(self) -> dict[str, str]:
        key = self._key()
        plain = {"Accept-Encoding": "identity"}  # what was packed could unfold beyond the bound
        return plain if key is None else plain | {"Authorization": f"Bearer {key}"}

    def _key(self) -> str | None:
        return None if self.api_key_variable is None else os.environ.get(self.api_key_variable)
