"""The part of the package vllm that `VllmSampler` calls, decoding from a tiny model as `completion_server` does.

It answers as vLLM 0.32.0 does. `faults` changes answers on their way out; `events` lists what was called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from completion_server import Served

from longstraw_sdk.rollout import vllm_engine


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(kw_only=True)
class SamplingParams:
    """Without a default, so that what a request leaves out is an error."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_p: float
    seed: int
    logprobs: int
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool


@dataclass
class Engines:
    """Every engine that was started, and how they misbehave."""

    served: Served = field(default_factory=Served)
    events: list[str] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    sampled: list[SamplingParams] = field(default_factory=list)
    faults: Callable[[list[Any]], Any] = lambda answers: answers
    lists: Callable[[set[int]], set[int]] = lambda ids: ids
    sleep_mode: bool = True


def llm_class(engines: Engines) -> type:
    class LLM:
        def __init__(self, **arguments: Any):
            engines.events.append("start")
            engines.arguments.append(arguments)
            engines.environments.append(dict(os.environ))
            if arguments["enable_sleep_mode"] and not engines.sleep_mode:
                raise ValueError("Sleep mode is not supported on current platform.")
            self.arguments, self.llm_engine = arguments, self
            self.engine_core = SimpleNamespace(shutdown=lambda: engines.events.append("shutdown"))
            self._loras: dict[int, LoRARequest] = {}
            self._asleep = False

        def add_lora(self, lora: LoRARequest) -> bool:
            assert not self._asleep and len(self._loras) < self.arguments["max_loras"]
            engines.events.append("add_lora")
            engines.served.load({"lora_name": lora.lora_name, "lora_path": lora.lora_path})
            self._loras[lora.lora_int_id] = lora
            return True

        def remove_lora(self, number: int) -> bool:
            engines.events.append("remove_lora")
            engines.served.unload({"lora_name": self._loras.pop(number).lora_name})
            return True

        def list_loras(self) -> set[int]:
            return engines.lists(set(self._loras))

        def sleep(self, level: int) -> None:
            assert self.arguments["enable_sleep_mode"] and not self._asleep
            engines.events.append(f"sleep {level}")
            self._asleep = True

        def wake_up(self) -> None:
            assert self._asleep
            engines.events.append("wake_up")
            self._asleep = False

        def generate(
            self, prompts: list[Any], params: list[SamplingParams], *, lora_request: LoRARequest, use_tqdm: bool
        ) -> Any:
            assert not self._asleep
            engines.events.append("generate")
            engines.sampled += params
            answers = []
            for prompt, asked in zip(prompts, params, strict=True):
                ids = prompt["prompt_token_ids"]
                body = vars(asked) | {"prompt": ids, "model": lora_request.lora_name}
                choices = engines.served.complete(body)["choices"]
                answers.append(
                    SimpleNamespace(
                        prompt_token_ids=list(ids), lora_request=lora_request, outputs=[_output(c) for c in choices]
                    )
                )
            return engines.faults(answers)

    return LLM


def _output(choice: dict[str, Any]) -> SimpleNamespace:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    return SimpleNamespace(
        index=choice["index"],
        token_ids=tokens,
        logprobs=[{t: SimpleNamespace(logprob=p)} for t, p in zip(tokens, logprobs, strict=True)],
        finish_reason=choice["finish_reason"],
    )


@contextmanager
def fake_vllm(**options: Any) -> Iterator[Engines]:
    """Within the block `import vllm` finds the fake."""
    engines = Engines(**options)
    vllm, lora, requests = (ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    vllm.LLM, vllm.SamplingParams, requests.LoRARequest = llm_class(engines), SamplingParams, LoRARequest
    with pytest.MonkeyPatch.context() as patch:
        for module in (vllm, lora, requests):
            module.__spec__ = ModuleSpec(module.__name__, None)
            patch.setitem(sys.modules, module.__name__, module)
        yield engines


@contextmanager
def no_vllm() -> Iterator[None]:
    """Within the block vllm is not installed, whether or not it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "find_spec", lambda name: None)
        yield
