"""An HTTP server of the OpenAI completions API with vLLM's extensions, serving a tiny model on the loopback device.

It answers as vLLM does for `return_token_ids`, runtime LoRA loading and sleep mode. `faults` changes answers on their
way out, and `events` lists the paths that were called.
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
    slow_seconds: float = 0.0
    status: int = 200
    url: str = ""

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        self.adapters[body["lora_name"]] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        return {}

    def unload(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.serve_stale:
            del self.adapters[body["lora_name"]]
        return {}

    def models(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"data": [{"id": "base"}, *({"id": name} for name in self.adapters)]}

    def nothing(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        name = next(iter(self.adapters)) if self.serve_stale else body["model"]
        set_peft_model_state_dict(self.model, self.adapters[name])
        generator = torch.Generator().manual_seed(body["seed"])
        choices = [self._choice(i, body, generator) for i in range(body["n"])]
        return {"object": "text_completion", "model": body["model"], "choices": choices}

    def _choice(self, index: int, body: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        ids, tokens, logprobs = list(body["prompt"]), [], []
        while len(tokens) < body["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1] / body["temperature"]
            logps = logits.log_softmax(-1)
            token = int(torch.multinomial(logps.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(logps[token]))
            ids.append(token)
            if token in body["stop_token_ids"]:
                break
        return {
            "index": index,
            "text": "?",
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
        "/sleep?level=1": "nothing",
        "/wake_up": "nothing",
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

        def _answer(self, body: Any) -> None:
            served.events.append(self.path)
            served.headers.append(dict(self.headers))
            found = getattr(served, routes[self.path])(body or {})
            if self.path in served.faults:
                found = served.faults[self.path](found)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(served.status)
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
