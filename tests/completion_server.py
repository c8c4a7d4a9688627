"""An HTTP server of the OpenAI completions API with vLLM's extensions, serving a tiny model on the loopback device.

It answers as vLLM 0.32.0 does for `return_token_ids`, runtime LoRA loading and sleep mode. `faults` changes answers on
their way out, and `events` lists the paths that were called.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

from longstraw_sdk.evidence.tiny import tiny_model


class Refused(Exception):
    """(status, message): an answer that is an error."""


@dataclass
class Served:
    """What the server holds, and how it misbehaves."""

    model: Any = field(default_factory=lambda: tiny_model("qwen36").eval())
    adapters: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    faults: dict[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    serve_stale: bool = False
    """Go on serving the weights of the adapter that was loaded first, whatever is asked for."""
    generation_config: dict[str, float] = field(default_factory=dict)
    """Of the model: what a request leaves out is taken from here."""
    max_model_len: int = 512
    sleep_mode: bool = True
    slow_seconds: float = 0.0
    status: int = 200
    url: str = ""

    def load(self, body: dict[str, Any]) -> bytes:
        name, file = body["lora_name"], Path(body["lora_path"]) / "adapter_model.safetensors"
        if name in self.adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if not file.is_file():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {body['lora_path']}")
        self.adapters[name] = load_file(file)
        return b"Success"

    def unload(self, body: dict[str, Any]) -> bytes:
        name = body["lora_name"]
        if name not in self.adapters:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        if not self.serve_stale:
            del self.adapters[name]
        return b"Success"

    def models(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"data": [{"id": "base"}, *({"id": name} for name in self.adapters)]}

    def sleep_or_wake(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.sleep_mode:
            raise Refused(404, "Not Found")
        return {}

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        name = next(iter(self.adapters)) if self.serve_stale else body["model"]
        if name not in self.adapters:
            raise Refused(404, f"The model `{name}` does not exist.")
        if len(body["prompt"]) >= self.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        set_peft_model_state_dict(self.model, self.adapters[name])
        generator = torch.Generator().manual_seed(body["seed"])
        choices = [self._choice(i, body, generator) for i in range(body["n"])]
        return {"object": "text_completion", "model": body["model"], "choices": choices}

    def _choice(self, index: int, body: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        ids, tokens, logprobs, reason = list(body["prompt"]), [], [], "length"
        penalty = (self.generation_config | body).get("repetition_penalty", 1.0)
        while len(tokens) < body["max_tokens"] and len(ids) < self.max_model_len:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            seen = logits[ids]
            logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
            logits /= body["temperature"]
            logps = logits.log_softmax(-1)
            token = int(torch.multinomial(logps.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(logps[token]))
            ids.append(token)
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
        return {
            "index": index,
            "text": "?",
            "finish_reason": reason,
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs},
        }


@contextmanager
def completion_server(**options: Any) -> Iterator[Served]:
    served = Served(**options)
    routes = {
        "/v1/load_lora_adapter": "load",
        "/v1/unload_lora_adapter": "unload",
        "/v1/models": "models",
        "/v1/completions": "complete",
        "/sleep?level=1": "sleep_or_wake",
        "/wake_up": "sleep_or_wake",
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

        def _answer(self, body: Any) -> None:
            served.events.append(self.path)
            served.headers.append(dict(self.headers))
            status = served.status
            try:
                found = getattr(served, routes[self.path])(body or {})
            except Refused as refusal:
                status, message = refusal.args
                found = {"error": {"message": message, "code": status}}
            else:
                if self.path in served.faults:
                    found = served.faults[self.path](found)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            try:
                for start in range(0, len(data), 64) if served.slow_seconds else (0,):
                    self.wfile.write(data[start : start + 64] if served.slow_seconds else data)
                    time.sleep(served.slow_seconds)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
