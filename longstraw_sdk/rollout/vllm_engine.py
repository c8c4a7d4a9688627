"""A sampler that owns its vLLM engine: no server, the adapter is loaded as it is and nothing is merged.

`vllm.LLM` runs the engine in a process of its own beside the trainer, on the GPU that is current when it starts. That
process imports the program's main file again, so what trains must stand below `if __name__ == "__main__":`.

`tests/test_vllm_engine.py` drives a real engine; it passes with vLLM 0.32.0 on a CPU, where sleep mode does not exist.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import ConfigurationError, SamplerError
from .adapter_export import ExportedAdapter, adapter_rank
from .http import NEUTRAL
from .protocol import Completion, RolloutRequest, checked

logger = logging.getLogger(__name__)

MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM has buffers for."""

_SET_HERE = (
    "model",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "logprobs_mode",
    "enable_sleep_mode",
    "tensor_parallel_size",
)

_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun, beside all of TORCHELASTIC_. With TORCHELASTIC_USE_AGENT_STORE an engine that meets over TCP,
as vLLM's does on some platforms, would wait for a store that nobody serves (vLLM 0.32.0 on a CPU uses a file)."""


class VllmSampler:
    """Implements `Sampler` by a `vllm.LLM`, which starts with the first drawing.

    Only the rank that draws, the first of a context, starts one: on one GPU, beside the trainer's weights.

    Args:
        model: folder or name of the base model whose adapter is trained. Its weights are read from there once.
        max_lora_rank: None takes the rank of the first adapter; vLLM rounds up to one of `MAX_LORA_RANKS`.
        sleep: `exclusive`, by vLLM's sleep mode: weights go to host memory (level 1) behind each drawing and come back
            before the next.
        engine_arguments: further arguments of `vllm.LLM`, such as `max_model_len` and `dtype` (vLLM's own choice may be
            narrower than the trainer's) or what `vllm_arguments` returns. `gpu_memory_utilization` is 0.3 unless given.
        max_logprob_difference: as in `Sampler`. Processed log-probs are those behind `top_p`, the trainer's are not: a
            `top_p` of 0.9 alone makes about -ln 0.9 = 0.105 nats.

    Raises:
        ConfigurationError: vllm is not installed, `engine_arguments` name what is set here, or what trains stands where
            the engine's process would run it again.
    """

    name = "vllm"

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_lora_rank: int | None = None,
        sleep: bool = False,
        engine_arguments: Mapping[str, Any] | None = None,
        max_logprob_difference: float = 0.1,
    ):
        given = dict(engine_arguments or {})
        if taken := sorted(given.keys() & set(_SET_HERE)):
            raise ConfigurationError(f"engine_arguments name {', '.join(taken)}, which VllmSampler sets itself")
        if max_lora_rank is not None and not 1 <= max_lora_rank <= MAX_LORA_RANKS[-1]:
            raise ConfigurationError(f"max_lora_rank must be 1 to {MAX_LORA_RANKS[-1]}, got {max_lora_rank}")
        if find_spec("vllm") is None:
            raise ConfigurationError(
                'vllm is not installed: pip install "longstraw-sdk[vllm]", or let a vLLM server of another environment '
                "draw (HttpSampler)"
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # else it would train a second time
            raise ConfigurationError(
                'the engine\'s process imports this program again: put what trains below if __name__ == "__main__":'
            )
        self.model = os.fspath(model)
        self.max_lora_rank = max_lora_rank
        self.exclusive = sleep
        self.engine_arguments = {"gpu_memory_utilization": 0.3} | given
        self.max_logprob_difference = max_logprob_difference
        self._engine: Any = None
        self._asleep = False
        self._loaded: Any = None
        self._n_loaded = 0

    def acquire(self) -> None:
        """Wake the engine; one that was not started yet starts with the drawing, which names the adapter's rank."""
        if self._asleep:
            with _told("wake up"):
                self._engine.wake_up()
            self._asleep = False
            logger.info("vLLM woke up")

    def release(self) -> None:
        if self.exclusive and self._engine is not None and not self._asleep:
            with _told("sleep"):
                self._engine.sleep(level=1)
            self._asleep = True
            logger.info("vLLM sleeps")

    def close(self) -> None:
        """End the engine and its process; a drawing after that starts another. Doing so twice is allowed."""
        engine, self._engine, self._loaded, self._asleep = self._engine, None, None, False
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
            logger.info("vLLM ended")

    def describe(self) -> dict[str, Any]:
        arguments = {name: str(value) for name, value in sorted(self.engine_arguments.items())}
        return {"name": self.name, "model": self.model, "engine_arguments": arguments}

    def sample(self, request: RolloutRequest) -> list[list[Completion]]:
        request.adapter.verify()
        if self._engine is None:
            self._start(request.adapter)
        if self._asleep:
            raise SamplerError("vLLM sleeps; call acquire() before sample()")
        lora = self._load(request.adapter)
        prompts = [{"prompt_token_ids": list(ids)} for ids in request.prompts]
        wanted = [self._sampling(request, i) for i in range(len(prompts))]
        with _told(f"answer {request.request_id}"):
            answers = self._engine.generate(prompts, wanted, lora_request=lora, use_tqdm=False)
        if len(answers) != len(prompts):
            raise SamplerError(f"{self.name} answered for {len(answers)} prompts of {len(prompts)}")
        return checked(request, [self._row(answer, request, i) for i, answer in enumerate(answers)], self.name)

    def _start(self, adapter: ExportedAdapter) -> None:
        rank = self.max_lora_rank or adapter_rank(adapter.path)
        fitting = [r for r in MAX_LORA_RANKS if r >= rank]
        if not fitting:
            raise SamplerError(f"the adapter has rank {rank}; vLLM takes {MAX_LORA_RANKS[-1]} at most")
        with _told("start"), _own_process():
            from vllm import LLM

            self._engine = LLM(
                model=self.model,
                enable_lora=True,
                max_loras=1,
                max_lora_rank=fitting[0],
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=self.exclusive,
                tensor_parallel_size=1,
                **self.engine_arguments,
            )
        logger.info("vLLM started on %s for LoRA of rank %d", self.model, fitting[0])

    def _load(self, adapter: ExportedAdapter) -> Any:
        """The adapter as vLLM's request, loaded and alone; the one before is removed first."""
        from vllm.lora.request import LoRARequest

        loras, lora = self._engine.llm_engine, self._loaded
        with _told(f"load adapter {adapter.name}"):
            if lora is None or lora.lora_name != adapter.name:
                if lora is not None:
                    loras.remove_lora(lora.lora_int_id)
                self._loaded = None
                self._n_loaded += 1  # an id is never used twice: vLLM would go on with the adapter it has under it
                lora = LoRARequest(adapter.name, self._n_loaded, str(adapter.path))
                loras.add_lora(lora)
                self._loaded = lora
            listed = set(loras.list_loras())
        if listed != {lora.lora_int_id}:
            self._loaded = None
            raise SamplerError(
                f"vLLM lists adapters {sorted(listed)} after loading {adapter.name} as {lora.lora_int_id}, not it alone"
            )
        return lora

    def _sampling(self, request: RolloutRequest, i: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=request.n_completions,
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            **NEUTRAL,
            seed=request.seed + i * request.n_completions,  # vLLM counts the responses of a prompt up from it
            logprobs=0,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # what the model's files name as the end is not asked for, unless it is among those
            detokenize=False,
        )

    def _row(self, answer: Any, request: RolloutRequest, i: int) -> list[Completion]:
        served = getattr(answer.lora_request, "lora_name", None)
        if served != request.adapter.name:
            raise SamplerError(f"vLLM answered prompt {i} with adapter {served}, not {request.adapter.name}")
        if tuple(answer.prompt_token_ids or ()) != request.prompts[i]:
            raise SamplerError(f"vLLM answered another prompt than prompt {i}: its token ids differ")
        return [self._completion(output, request, i) for output in sorted(answer.outputs, key=lambda o: o.index)]

    def _completion(self, output: Any, request: RolloutRequest, i: int) -> Completion:
        tokens, found, limit = tuple(output.token_ids), output.logprobs, request.max_new_tokens
        if found is None or len(found) != len(tokens):
            n = "no" if found is None else len(found)
            raise SamplerError(f"vLLM returned {len(tokens)} tokens and {n} log-probs to prompt {i}")
        missing = [place for place, (token, at) in enumerate(zip(tokens, found, strict=True)) if token not in at]
        if missing:
            raise SamplerError(
                f"vLLM returned no log-prob of the token that it drew at place {missing[0]} to prompt {i}"
            )
        if output.finish_reason == "length" and len(tokens) < limit:
            raise SamplerError(
                f"vLLM stopped after {len(tokens)} of {limit} tokens behind prompt {i} of {len(request.prompts[i])}: "
                "together they pass the engine's limit (vllm_max_model_length, or max_model_len in engine_arguments)"
            )
        return Completion(tokens, tuple(at[token].logprob for token, at in zip(tokens, found, strict=True)))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever vLLM raises within the block becomes a `SamplerError`."""
    try:
        yield
    except Exception as error:
        raise SamplerError(f"vLLM did not {what}: {type(error).__name__}: {error}") from error


@contextmanager
def _own_process() -> Iterator[None]:
    """Within the block the environment is that of an engine which stands alone, on the current GPU.

    A forked engine would share the trainer's CUDA context and OpenMP threads. One inside the trainer's process would
    make torch.distributed its own.
    """
    asked = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        asked["CUDA_VISIBLE_DEVICES"] = visible.split(",")[torch.cuda.current_device()]
    launched = [name for name in os.environ if name in _OF_LAUNCHERS or name.startswith("TORCHELASTIC_")]
    before = {name: os.environ.pop(name, None) for name in (*asked, *launched)}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
