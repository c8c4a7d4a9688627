"""What runs in the actors: a session, asked for one phase at a time. No mathematics, and no import of Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from ..errors import InputError, LifecycleError
from ..evidence.digests import gradient_witness, tensors_digest
from ..evidence.machine import observed_accelerator
from ..prefix import Prefix
from ..session import LongStrawSession
from ..types import CausalLM, is_shared
from .checkpoint import pack_state, trained_parameters, unpack_state
from .program import RankProgram, load_function


class Coordinator:
    """Holds the store at which the ranks of one attempt meet. The system picks the port: no other can take it first."""

    def place(self) -> dict[str, Any]:
        """Where this actor is, as Ray sees it."""
        from .runtime import observed_placement

        return observed_placement()

    def listen(self, timeout_s: float) -> int:
        """The port, of this node's address."""
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=timeout_s)
        # One reference is all that keeps the store open.
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return int(self._store.port)


class RankActor:
    """One rank. Its phases are called in the same order on all ranks of a context, with the same arguments."""

    def __init__(self) -> None:
        self._phases: list[dict[str, Any]] = []
        self._session: LongStrawSession | None = None
        self._update = 0

    def place(self) -> dict[str, Any]:
        """Where this actor is, as Ray sees it."""
        from .runtime import observed_placement

        return observed_placement()

    def open(
        self, environment: Mapping[str, str], program: RankProgram, n_closed: int, states: Sequence[bytes]
    ) -> None:
        """Join the other ranks, make the model and open the session.

        Args:
            environment: variables that tell torch.distributed which rank this is and where the others are.
            n_closed, states: the update to go on from and what `state` gave after it; empty at the beginning.
        """
        self._update = n_closed
        with self._phase("open"):
            os.environ.update(environment)
            self._program = program
            self._loss = load_function(program.loss)
            optimizer = load_function(program.optimizer)
            self._model: CausalLM = load_function(program.model)(**program.model_arguments)
            self._model.train()
            self._session = LongStrawSession(
                self._model,
                backend="accelerate",
                context_parallel_size=program.context_parallel_size,
                expert_parallel_size=program.expert_parallel_size,
                **program.session,
            )
            parameters = [p for _, p in trained_parameters(self._model)]
            self._optimizer = optimizer(parameters, **program.optimizer_arguments)
            for state in states:
                unpack_state(self._model, self._optimizer, state)

    def capture(self, prompt_ids: Sequence[int]) -> None:
        with self._phase("capture"):
            self._prefix: Prefix = self._opened.capture(torch.tensor(prompt_ids, device=self._device))
            self._rows: list[torch.Tensor] = []

    def sample(self, n_samples: int, max_new_tokens: int, seed: int) -> list[list[int]]:
        """Token ids of each response."""
        with self._phase("sample"):
            rows = self._prefix.sample(n_samples, max_new_tokens=max_new_tokens, seed=seed)
            return [row.tolist() for row in rows]

    def score(self, responses: Sequence[Sequence[int]]) -> None:
        """Take the responses and keep their log-probs before the update."""
        with self._phase("score"):
            self._rows = [torch.tensor(row, device=self._device) for row in responses]
            self._old = self._prefix.score(self._rows)

    def replay(self, index: int, advantage: float) -> None:
        """Replay one of the responses and back-propagate its loss."""
        with self._phase("replay"):
            if not 0 <= index < len(self._rows):
                raise InputError(f"response {index} was asked for, but {len(self._rows)} were scored")
            out = self._prefix.replay(self._rows[index])
            self._loss(out, self._old[index], advantage).backward()

    def sweep(self) -> None:
        """Sweep the prompt and give its pages back."""
        with self._phase("sweep"):
            with self._prefix:
                pass

    def finalize(self) -> dict[str, Any]:
        """Close the update; its reductions, and a witness of the gradient."""
        with self._phase("finalize"):
            result = self._opened.finalize()
            return {"reductions": [asdict(r) for r in result.reductions], "gradient": gradient_witness(self._model)}

    def step(self) -> str:
        """Step the optimizer; the digest of what every rank then holds alike."""
        with self._phase("step"):
            if self._program.max_grad_norm is not None:
                self._opened.clip_grad_norm_(self._program.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            digest = tensors_digest((n, p) for n, p in trained_parameters(self._model) if is_shared(p))
        self._update += 1
        return digest

    def state(self, *, shared: bool) -> bytes:
        """LoRA weights and optimizer state, as `open` takes them: `shared`, or of this rank's own experts."""
        with self._phase("state"):
            return pack_state(self._model, self._optimizer, lambda p: is_shared(p) == shared)

    def report(self) -> dict[str, Any]:
        """The phases since the last report, in order, where this rank is, and what it did since `open`."""
        phases, self._phases = self._phases, []
        stats, context = self._opened.stats, self._opened.backend.context
        return {
            "context_rank": 0 if context is None else context.rank,
            "phases": phases,
            "observed": observed_accelerator(self._device) | self.place(),
            "seconds": dict(stats.seconds),
            "captured_tokens": stats.captured_tokens,
            "replayed_tokens": stats.replayed_tokens,
            "swept_tokens": stats.swept_tokens,
        }

    def close(self) -> list[str]:
        """Close the session and leave the other ranks. What pages it did not give back, a sentence each."""
        session = self._opened
        session.close()
        torch.distributed.destroy_process_group()
        return session.pool.audit()

    @property
    def _opened(self) -> LongStrawSession:
        if self._session is None:
            raise LifecycleError("this rank was asked for a phase before open()")
        return self._session

    @property
    def _device(self) -> torch.device:
        return self._opened.bound.device

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        entry: dict[str, Any] = {"phase": name, "update": self._update, "ok": False}
        self._phases.append(entry)
        start = time.perf_counter()
        try:
            yield
            entry["ok"] = True
        finally:
            entry["seconds"] = round(time.perf_counter() - start, 6)
