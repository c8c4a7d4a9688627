"""Where responses come from: the disk, if an interrupted run drew them already, the resident state, or a sampler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from trl.models import unwrap_model_for_generation

from longstraw_sdk.evidence.digests import adapter_digest, facts_digest
from longstraw_sdk.evidence.run_folder import ROLLOUTS
from longstraw_sdk.rollout import ExportedAdapter, RolloutRequest, Sampler, export_adapter, prompt_identities

from .expert_shards import whole_adapter
from .outside_sampling import drawn, from_first, once_each, parked
from .rollout_store import (
    Rollouts,
    Stored,
    find_rollouts,
    random_state,
    refuse_rollouts,
    restore_random_state,
    rollouts_name,
    store_rollouts,
)

if TYPE_CHECKING:
    from .grpo_trainer import LongStrawGRPOTrainer

logger = logging.getLogger(__name__)

Prompts = Sequence[Sequence[int]]


class Drawings:
    """Draws the responses of a trainer's generation batches. Every rank of a context calls with equal arguments."""

    def __init__(self, trainer: LongStrawGRPOTrainer, sampler: Sampler | None):
        self.trainer = trainer
        self.sampler = sampler
        self._n = 0
        self._stored: list[Stored] = []

    @property
    def _group(self) -> dist.ProcessGroup | None:
        context = self.trainer._backend.context
        return None if context is None else context.group

    @property
    def _context(self) -> int:
        return self.trainer._place()["context"]

    def begin(self) -> None:
        """A generation batch begins; tool calls draw several times for one."""
        self._n, self._stored = 0, []

    def describe(self) -> dict[str, Any]:
        return {"name": "resident"} if self.sampler is None else self.sampler.describe()

    def take(self, prompts: Prompts, n: int) -> Rollouts:
        """A response to each of `prompts`, in which each prompt stands `n` times in a row.

        While training, what was drawn is on the disk before anything is made of it.
        """
        trainer = self.trainer
        draw = self._from_state if self.sampler is None else self._from_sampler
        if not (trainer.model.training and trainer._run.active):
            rollouts = draw(prompts, n)
            self._n += 1
            return rollouts
        device, policy = trainer.accelerator.device, adapter_digest(trainer.model)
        path, identities = self._path, prompt_identities(prompts)
        request = self._request(identities, n, policy)
        stored = from_first(self._group, lambda: find_rollouts(path, request))
        if stored is None:
            rollouts, rows = draw(prompts, n), list(zip(identities, map(len, prompts), strict=True))
            stored = from_first(self._group, lambda: store_rollouts(path, request, rows, rollouts, device))
        else:
            logger.info("%s: responses of an interrupted update are used again", stored.path)
            restore_random_state(stored.random_state, device)
        self._keep(stored, self.describe(), policy)
        return stored.rollouts

    @property
    def _path(self) -> Path:
        return self.trainer._run.folder / ROLLOUTS / rollouts_name(self.trainer._step, self._n, self._context)

    def _keep(self, stored: Stored, sampler: dict[str, Any], policy: str) -> None:
        self.trainer._run.sampled(stored, self._n, sampler, policy)
        self._stored.append(stored)
        self._n += 1

    def note(self, prompts: Prompts, token_ids: list[list[int]], logprobs: list[list[float]] | None) -> None:
        """Write down what TRL's `rollout_func` drew, which cannot be used again: it may draw as it likes."""
        trainer = self.trainer
        if trainer.model.training and trainer._run.active:
            sampler, policy = {"name": "rollout_func"}, adapter_digest(trainer.model)
            request = {"step": trainer._step, "sampler": sampler, "adapter_sha256": policy}
            rollouts, device = Rollouts(token_ids, logprobs), trainer.accelerator.device
            rows = list(zip(prompt_identities(prompts), map(len, prompts), strict=True))
            stored = from_first(self._group, lambda: store_rollouts(self._path, request, rows, rollouts, device))
            self._keep(stored, sampler, policy)

    def refuse(self) -> None:
        """What was drawn for this generation batch must not be used again."""
        for stored in self._stored:
            from_first(self._group, partial(refuse_rollouts, stored.path))

    def _request(self, prompts: list[str], n: int, policy: str) -> dict[str, Any]:
        """What decides the responses: equal for a drawing and its repetition after a crash, and for nothing else."""
        trainer = self.trainer
        states = random_state(trainer.accelerator.device)
        return {
            "step": trainer._step,
            "drawing": self._n,
            "prompts_sha256": facts_digest({"prompts": prompts}),
            "num_generations": n,
            "adapter_sha256": policy,
            "sampler": self.describe(),
            "options": trainer.generation_config.to_json_string(),
            "seed": trainer.args.seed,
            "random_state": facts_digest(states) if self.sampler is None else None,
        }

    def _from_state(self, prompts: Prompts, n: int) -> Rollouts:
        trainer = self.trainer
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, ids in enumerate(prompts):
            groups.setdefault(tuple(ids), []).append(i)
        completions: list[list[int]] = [[] for _ in prompts]
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                generation_kwargs=trainer.generation_kwargs,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ),
            torch.no_grad(),
            trainer.accelerator.autocast(),
        ):
            for ids, members in groups.items():
                prefix = trainer._prefix(torch.tensor(ids, device=trainer.accelerator.device))
                for i, row in zip(members, prefix.generate(len(members), trainer.generation_config), strict=True):
                    completions[i] = row.tolist()
            trainer.longstraw.join()
        return Rollouts(completions, None)

    def _from_sampler(self, prompts: Prompts, n: int) -> Rollouts:
        trainer, sampler = self.trainer, self.sampler
        assert sampler is not None
        distinct, n_each = once_each(prompts, n)
        place = [trainer._step, self._n, self._context]
        request = RolloutRequest(
            request_id="-".join(map(str, place)),
            adapter=self._export(),
            prompts=tuple(distinct),
            n_completions=n_each,
            max_new_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k,
            seed=int(facts_digest({"seed": trainer.args.seed, "place": place})[:7], 16),
            stop_token_ids=tuple(trainer.eos_token_ids),
            vocab_size=trainer.longstraw.bound.vocab_size,
        )
        device = trainer.accelerator.device
        if sampler.exclusive:
            trainer._drop_all()
            trainer.longstraw.trim()
        with parked(trainer.model, trainer.optimizer, device) if sampler.exclusive else nullcontext():
            completions = from_first(self._group, lambda: drawn(sampler, request))
        return Rollouts([list(c.token_ids) for c in completions], [list(c.logprobs) for c in completions])

    def _export(self) -> ExportedAdapter:
        """The policy below the run folder, written by the first rank of each context: they draw at their own times."""
        trainer = self.trainer
        weights = whole_adapter(trainer.model, trainer.longstraw.adapter) if trainer._spread else None
        model = trainer.accelerator.unwrap_model(trainer.model)
        folder = trainer._run.folder.absolute() / "adapters" / f"context{self._context}"
        return from_first(self._group, lambda: export_adapter(model, folder, weights))
