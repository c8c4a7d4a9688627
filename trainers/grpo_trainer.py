"""TRL's `GRPOTrainer` on resident state: one capture per prompt serves sampling, scoring and every replay.

Only the two places where TRL runs the model are replaced: log-probabilities and generation. Losses, advantages,
metrics, callbacks and checkpoints are TRL's own. The log-probabilities are an autograd function whose forward scores
without a graph and whose backward, which then knows dL/dlogp of every token, replays each response with one.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from transformers import ProcessorMixin, TrainerCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import GRPOTrainer

from longstraw_sdk.adapter import ResidentStateAdapter
from longstraw_sdk.backends import fsdp_is_ours, make_backend
from longstraw_sdk.errors import ConfigurationError, InputError, NumericsError, SamplerError
from longstraw_sdk.evidence.digests import adapter_digest, gradient_witness, row_identity
from longstraw_sdk.evidence.manifest import write_manifest
from longstraw_sdk.evidence.model_snapshot import model_snapshot
from longstraw_sdk.lora import AdapterState, adapter_state
from longstraw_sdk.prefix import Prefix
from longstraw_sdk.rollout import Sampler, prompt_identity
from longstraw_sdk.session import LongStrawSession

from .contexts import ContextAccelerator, NoReward, as_own_rng_state, context_rng_file, once_per_context
from .drawings import Drawings
from .expert_shards import own_adapter, share_optimizer_state, whole_adapter
from .grpo_config import LongStrawGRPOConfig
from .outside_sampling import check_contexts, check_difference, check_options
from .prompt_lengths import check_longest_prompts
from .rewards import checked_rewards, equal_rewards
from .rollout_state import load_rollouts, save_rollouts
from .rows import Row, unpadded
from .run_facts import describe_rank, describe_rewards, describe_run
from .run_record import RunRecord, earlier_model
from .vllm_options import sampler_of, without_vllm
from .whole_checkpoints import check_lora, checkpoint_to_resume

logger = logging.getLogger(__name__)

_PrefixKey = tuple[bytes, AdapterState]


@dataclass
class _StepRecord:
    """What one optimizer step did, beyond the session's running totals."""

    seconds_before: dict[str, float]
    prompt_tokens_before: int
    received_bytes_before: int
    resident_bytes: int = 0
    stale_age: int = 0
    rows_not_replayed: int = 0


class _ReplayedLogps(torch.autograd.Function):
    """(log-probs, entropies), both [B, K]: scored in forward, replayed in backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, trainer: LongStrawGRPOTrainer, rows: list[Row], shape: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.trainer, ctx.rows = trainer, rows
        return trainer._score(rows, shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.trainer._replay(ctx.rows, *grad_outputs)
        return None, None, None, None


class _StepsClosed(TrainerCallback):
    """Tells the run record that the optimizer stepped, before anything is saved of it, and what was logged."""

    def __init__(self, trainer: LongStrawGRPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        record = self.trainer._run
        if record.journal is not None:
            record.stepped(adapter_digest(self.trainer.model), state.global_step)
        record.step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.trainer._run.metrics(logs or {})


class LongStrawGRPOTrainer(GRPOTrainer):
    """GRPO on very long prompts, with TRL's constructor and two more arguments.

    Args:
        adapter: how to run the architecture; None picks it by `config.model_type`.
        sampler: who draws responses outside of this process (`longstraw_sdk.rollout`); None draws them from the
            resident state, or where `args` say `use_vllm=True` by an `HttpSampler` of that server
            (`vllm_mode="server"`) or a `VllmSampler` of the model's files ("colocate"); `trainer.sampler` is that one.
            To TRL a sampler counts as vLLM: its log-probs correct the loss by importance, and are compared with the
            trainer's, so that a sampler with another policy is refused before anything is trained.

    Everything else is TRL's `GRPOTrainer`; `args` is a `LongStrawGRPOConfig`. The reference for beta > 0 (LoRA off, or
    TRL's "ref" adapter) is captured once per prompt and generation batch and dropped after its scoring, since prompts
    rarely come back before memory is needed; under prefix_adapter="frozen" it shares the policy's capture.

    The environment variable LONGSTRAW_POSITIONS extends the model's positions (`PositionConfig.from_json`), in sampling
    and training alike, as long as `trainer.longstraw` is open.
    """

    _tag_names: ClassVar = ["trl", "grpo", "longstraw"]

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
        *,
        adapter: ResidentStateAdapter | None = None,
        sampler: Sampler | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else type(model).__name__
            args = LongStrawGRPOConfig(f"{name.split('/')[-1]}-LongStrawGRPO")
        if not isinstance(args, LongStrawGRPOConfig):
            raise ConfigurationError(
                f"args must be a LongStrawGRPOConfig, got {type(args).__name__}; it takes the same arguments as TRL's "
                "GRPOConfig"
            )
        self._backend = make_backend(args.sharding, args.context_parallel_size, args.expert_parallel_size)
        if isinstance(processing_class, ProcessorMixin):
            raise ConfigurationError(
                f"{type(processing_class).__name__} is a multimodal processor; LongStraw trains text models: pass the "
                "tokenizer as processing_class and load the model with AutoModelForCausalLM"
            )
        sampler = sampler_of(args, sampler, model, quantization_config)
        if sampler is not None:
            check_options(sampler, args, rollout_func)
        with without_vllm(args):
            super().__init__(
                model=model,
                reward_funcs=checked_rewards(reward_funcs),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        if args.context_parallel_size > 1:
            set_seed(args.seed + self.accelerator.process_index)  # as TRL does, but for each context instead of process
        if self.aux_loss_enabled:
            raise ConfigurationError(
                f"the model's router_aux_loss_coef={self.router_aux_loss_coef} asks for a load-balancing loss over the "
                "whole prompt, whose router logits are not kept; set router_aux_loss_coef=0 in the config"
            )
        self.longstraw = LongStrawSession(
            self.model,
            adapter,
            gradient_scope=args.gradient_scope,
            prefix_adapter=args.prefix_adapter,
            chunk_tokens=args.chunk_tokens,
            page_tokens=args.page_tokens,
            replay_tokens=args.replay_tokens,
            temperature=self.temperature,
            state_device=args.state_device,
            backend=self._backend,
        )
        self._policy_state = adapter_state(self.model)
        self._prefixes: dict[_PrefixKey, Prefix] = {}
        self._captured_at: dict[_PrefixKey, int] = {}
        self._rows_left: Counter[_PrefixKey] = Counter()
        self._anchor = torch.zeros((), requires_grad=True)
        self._complete: list[_PrefixKey] = []
        self._record = self._new_record()
        if sampler is not None:
            check_contexts(sampler, self.accelerator.num_processes, spread=self._spread)
            self.use_vllm = True  # to TRL's loss and metrics
            self.vllm_mode = "server"  # a tool conversation would ask a colocated engine for its length
        self._run = RunRecord(args.output_dir, args.process_index, writes=self.accelerator.is_main_process)
        self.sampler = sampler
        self._drawings = Drawings(self, sampler)
        self.add_callback(_StepsClosed(self))

    # Several ranks

    def create_accelerator_and_postprocess(self):
        with fsdp_is_ours():
            super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            self.accelerator.__class__ = ContextAccelerator
            self.accelerator.backend = self._backend

    def get_cp_size(self):
        return self.args.context_parallel_size

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._rewards = self._rewards_of(inputs, prompts, completions, completion_ids_list)
        return self._rewards

    def _rewards_of(self, *asked_about):
        context = self._backend.context
        if context is None:
            return super()._calculate_rewards(*asked_about)
        asked: list[Any] = self.reward_funcs  # type: ignore[has-type]
        if context.rank:
            self.reward_funcs = [NoReward()] * len(asked)
        try:
            everyone = super()._calculate_rewards(*asked_about)
        finally:
            self.reward_funcs = asked
        return once_per_context(everyone, self.args.world_size, context.size)

    # TRL's two uses of the model

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **multimodal,
    ):
        given = sorted(name for name, value in multimodal.items() if value is not None)
        if given or compute_aux_loss:
            given += ["aux loss"] * compute_aux_loss
            raise ConfigurationError(f"{', '.join(given)}: LongStraw replays text; use TRL's GRPOTrainer for these")
        rows = unpadded(input_ids, attention_mask, logits_to_keep)
        shape = input_ids[:, -logits_to_keep:].shape
        if torch.is_grad_enabled():
            logps, entropies = _ReplayedLogps.apply(self._anchor, self, rows, shape)
        else:
            if self.model.training:
                policy = adapter_state(self.model) == self._policy_state
                self._run.scored("old" if policy else "reference", len(rows))
            logps, entropies = self._score(rows, shape)
            self._drop_references()
        return logps, entropies if compute_entropy else None, None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if images is not None or multimodal_fields:
            raise ConfigurationError("the dataset holds images; LongStraw trains text models: drop the column")
        self._check_prompt_lengths(prompt_ids)
        rollouts = self._drawings.take(prompt_ids, num_generations)
        return rollouts.token_ids, rollouts.logprobs

    def _generate(self, prompts):
        self._drawings.begin()
        output = super()._generate(prompts)
        if self.rollout_func is not None:
            self._drawings.note(output[0], output[1], output[4])
        # Tool calls sample from prompts that grow turn by turn; only the final ones are trained on.
        wanted = {_key_of(torch.tensor(ids)) for ids in output[0]}
        with self.accelerator.autocast():
            for key in [key for key in self._prefixes if key[0] not in wanted]:
                # An update of several generations: of one whose masked rows were not replayed, gradients wait here.
                self._prefixes[key].sweep()
                self._drop(key)
            self.longstraw.join()
        return output

    # Scoring and replay

    def _score(self, rows: list[Row], shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.accelerator.device
        logps = torch.zeros(shape, device=device)
        entropies = torch.zeros(shape, device=device)
        with torch.no_grad(), self.accelerator.autocast():
            for prefix, members in self._by_prefix(rows):
                for row, out in zip(members, prefix.score_with_entropy([r.response for r in members]), strict=True):
                    logps, entropies = logps.to(out.logps.dtype), entropies.to(out.logps.dtype)
                    logps[row.index, row.columns] = out.logps
                    entropies[row.index, row.columns] = out.entropy
            self.longstraw.join()
        return logps, entropies

    def _replay(self, rows: list[Row], d_logps: torch.Tensor, d_entropies: torch.Tensor) -> None:
        """Add the gradient of every row whose cotangent is not zero: others cannot contribute."""
        for row in rows:
            if not bool(d_logps[row.index].isfinite().all() and d_entropies[row.index].isfinite().all()):
                raise NumericsError(
                    f"the loss has a NaN or infinite gradient at row {row.index} of the micro-batch (response of "
                    f"{len(row.response)} tokens); no replay was run. Check rewards, old log-probs and the loss options"
                )
        active = [r for r in rows if bool(d_logps[r.index].any() or d_entropies[r.index].any())]
        self._record.rows_not_replayed += len(rows) - len(active)
        stats = self.longstraw.stats
        replayed: list[str] = []
        with torch.enable_grad():
            for prefix, members in self._by_prefix(active):
                if self._run.journal is not None:
                    prompt = prompt_identity(prefix.prompt_ids.tolist())
                    replayed += [row_identity(prompt, row.response.tolist()) for row in members]
                packs = prefix.replay_in_packs([r.response for r in members])
                for pack, outs in iter(partial(self._next_pack, packs), None):
                    packed = [members[i] for i in pack]
                    roots, cotangents = [], []
                    for row, out in zip(packed, outs, strict=True):
                        for root, cotangent in ((out.logps, d_logps), (out.entropy, d_entropies)):
                            roots.append(root)
                            cotangents.append(cotangent[row.index, row.columns].to(root.dtype))
                    try:
                        with stats.timed("backward", prefix.prompt_ids.device):
                            torch.autograd.backward(roots, cotangents)
                    except RuntimeError as error:
                        prefix.advise(error, "backward", [len(row.response) for row in packed])
                        raise
            with self.accelerator.autocast():
                self.longstraw.join()
        self._run.replayed(replayed)
        self._count_rows(rows)

    def _next_pack(self, packs: Iterator[Any]) -> Any:
        """The forward of a pack is under autocast, its backward is not."""
        with self.accelerator.autocast():
            return next(packs, None)

    def _by_prefix(self, rows: Sequence[Row]) -> list[tuple[Prefix, list[Row]]]:
        groups: dict[_PrefixKey, list[Row]] = {}
        for row in rows:
            groups.setdefault(self._key(row.prompt), []).append(row)
        return [(self._prefix(members[0].prompt), members) for members in groups.values()]

    # Captures: who is resident, and until when

    def _key(self, prompt: torch.Tensor) -> _PrefixKey:
        frozen = self.longstraw.prefix_adapter == "frozen"
        return (_key_of(prompt), () if frozen else adapter_state(self.model))

    def _prefix(self, prompt: torch.Tensor) -> Prefix:
        key = self._key(prompt)
        prefix = self._prefixes.get(key)
        if prefix is not None and prefix.stale:
            self._drop(key)
            prefix = None
        if prefix is None:
            prefix = self._prefixes[key] = self.longstraw.capture(prompt)
            self._captured_at[key] = self.state.global_step
        record = self._record
        record.resident_bytes = max(record.resident_bytes, sum(p.n_bytes for p in self._prefixes.values()))
        record.stale_age = max(record.stale_age, self.state.global_step - self._captured_at[key])
        return prefix

    def _drop(self, key: _PrefixKey) -> None:
        self._prefixes.pop(key).release()
        self._captured_at.pop(key)

    def _drop_references(self) -> None:
        """A reference capture has served once its scores are there."""
        if self.longstraw.prefix_adapter == "live":
            for key in [key for key in self._prefixes if key[1] != self._policy_state]:
                self._drop(key)

    def _drop_all(self) -> None:
        for key in list(self._prefixes):
            self._drop(key)

    def _generate_and_score_completions(self, inputs):
        if self.model.training:  # an evaluation between two steps on the same rollouts must not drop theirs
            self.longstraw.adapter.forget()
        output = super()._generate_and_score_completions(inputs)
        if self.multi_objective_aggregation == "sum_then_normalize":  # the other way subtracts the batch's mean at last
            n = self.num_generations if self.model.training else self.num_generations_eval
            equal = equal_rewards(self._rewards, self.reward_weights, n)
            first = self.accelerator.process_index * len(inputs)
            output["advantages"] = output["advantages"].masked_fill(equal[first : first + len(inputs)], 0.0)
        if self._drawings.sampler is not None:
            try:
                check_difference(self._drawings.sampler, output, self.accelerator.gather)
            except SamplerError:
                self._drawings.refuse()
                raise
        if self.model.training:
            self._run.rewarded(f"{self._step:08d}.rewards.json", describe_rewards(self, output["advantages"]))
            masks = output["prompt_mask"].bool()
            self._rows_left = Counter(
                self._key(ids[mask]) for ids, mask in zip(output["prompt_ids"], masks, strict=True)
            )
        return output

    def _count_rows(self, rows: Sequence[Row]) -> None:
        """Sweep and release a prompt as soon as the last row of its group has been replayed.

        TRL shuffles a group over the micro-batches of an accumulation window, so this may be several calls away.
        """
        for key, n in Counter(self._key(row.prompt) for row in rows).items():
            self._rows_left[key] -= n
            prefix = self._prefixes.get(key)
            if self._rows_left[key] <= 0 and prefix is not None and self.longstraw.prefix_adapter == "live":
                self._complete.append(key)

    def _get_train_sampler(self, dataset=None):
        dataset = self.train_dataset if dataset is None else dataset
        needed = self.args.generation_batch_size // self.num_generations
        if len(dataset) < needed:  # TRL leaves out what does not fill a batch, and would end behind 0 steps
            raise ConfigurationError(
                f"the dataset has {len(dataset)} prompts, and one generation batch takes {needed} "
                f"(generation_batch_size={self.args.generation_batch_size} over num_generations="
                f"{self.num_generations}), so no step would be taken; add prompts, or lower "
                "per_device_train_batch_size or steps_per_generation"
            )
        limit = self.longstraw.bound.max_positions
        if limit is not None and self.rollout_func is None and self.environment_factories is None:
            room = limit - self.max_completion_length
            check_longest_prompts(dataset["prompt"], lambda p: len(self._tokenize_prompts([p])[0][0]), room)
        return super()._get_train_sampler(dataset)

    # The update

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        start = time.perf_counter()
        with self.accelerator.autocast():
            for key in self._complete:
                if key in self._prefixes:
                    self._prefixes[key].sweep()
                    self._drop(key)
            self._complete.clear()
            self.longstraw.join()
            if self.accelerator.sync_gradients:
                self._close_update()
        elapsed = time.perf_counter() - start  # TRL took its step time inside super()
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"][-1] += elapsed
        else:
            self._current_train_step_time += elapsed
        return loss

    def _close_update(self) -> None:
        # A window whose rows are all masked touches no prompt. Other ranks' may: all of them reduce, or none.
        reductions: Sequence[Any] = ()
        if self.longstraw.open_anywhere():
            reductions = self.longstraw.finalize().reductions
        if self._run.journal is not None:
            witness = gradient_witness(self.model)
            self._run.finalized(self.longstraw.gradient_scope, witness, [str(r) for r in reductions])
        if self.longstraw.prefix_adapter == "live":
            self._drop_all()  # the optimizer step that follows makes them stale
        self._log_step_metrics()

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._drop_all()

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            check_lora(checkpoint, self.model, spread=self._spread)
        watching = self.longstraw.stats.observer
        try:
            self._begin_record(checkpoint)
            output = super().train(checkpoint, *args, **kwargs)
            self._run.ended(gather_object([describe_rank(self)]))
        except BaseException:
            self.longstraw.discard()  # what is half-added must not meet the next train()
            raise
        finally:
            self._drop_all()
            self._run.close()
            self.longstraw.stats.observer = watching
        return output

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # transformers would take one more
            logger.warning("all %d updates were taken before this checkpoint: nothing is trained", self.state.max_steps)
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _begin_record(self, checkpoint: str | None) -> None:
        step = 0
        if checkpoint is not None:
            step = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).global_step
        if self._run.writes:
            request = describe_run(self, self._drawings.describe())
            model = model_snapshot(self.model, earlier_model(self._run.folder))
            self._run.open(request, model, checkpoint, step)
        self._run.step, self._run.active = step, True
        self.accelerator.wait_for_everyone()  # until the folder is there
        if self.longstraw.stats.observer is None:
            self.longstraw.stats.observer = partial(self._run.memory, device=self.accelerator.device)

    # Checkpoints

    @property
    def _spread(self) -> bool:
        return self._backend.experts is not None

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._spread:
            share_optimizer_state(optimizer, self.model, self.longstraw.adapter)
        return optimizer

    def _save(self, output_dir=None, state_dict=None):
        if self._spread and state_dict is None:  # every rank comes here, and the one that saves writes
            state_dict = whole_adapter(self.model, self.longstraw.adapter)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        if self._spread and not self.args.should_save:
            self.optimizer.state_dict()  # the rank that saves puts it together from all
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if not self._spread:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with own_adapter(resume_from_checkpoint, self.model, self.longstraw.adapter) as folder:
            super()._load_from_checkpoint(folder, model)

    def _save_checkpoint(self, model, trial):
        keep, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = keep
        self.accelerator.wait_for_everyone()  # until the folder is there
        output_dir = self._get_output_dir(trial=trial)
        folder = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self._backend.context is None or self._backend.context.rank == 0:
            generate_every = self.args.steps_per_generation * self.num_iterations
            unfinished = self._buffered_inputs if self._step % generate_every else None
            save_rollouts(folder, self._step, unfinished or [], **self._place())
        self.accelerator.wait_for_everyone()  # until all wrote their part
        if self.args.should_save:
            facts = {
                "global_step": self.state.global_step,
                "gradient_scope": self.args.gradient_scope,
                "prefix_adapter": self.args.prefix_adapter,
            }
            write_manifest(folder, facts)
            self._run.saved(folder)
            # Older ones go when the new one is whole: a run that dies in between has one of them.
            rotate_checkpoints(output_dir, keep, self.state.best_model_checkpoint, use_mtime=True)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        saved = None
        if checkpoint is not None:
            saved = load_rollouts(Path(checkpoint), self.accelerator.device, **self._place())
        if saved is not None:
            self._step, batches = saved
            self._buffered_inputs = batches or None

    def _place(self) -> dict[str, int]:
        return {"context": self.accelerator.process_index, "n_contexts": self.accelerator.num_processes}

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        context = self._backend.context
        if self.args.world_size > 1 and (context is None or context.rank == 0):
            name = f"rng_state_{self.args.process_index}.pth"
            shutil.copyfile(Path(output_dir, name), Path(output_dir, context_rng_file(self.accelerator.process_index)))

    def _load_rng_state(self, checkpoint):
        # Every rank of a context draws as its first one does, however many ranks it had when the checkpoint was saved.
        with as_own_rng_state(checkpoint, self.accelerator.process_index, self.args) as folder:
            super()._load_rng_state(folder)

    # Metrics and the model card

    def _new_record(self) -> _StepRecord:
        stats = self.longstraw.stats
        context = self._backend.context
        received_bytes = 0 if context is None else context.received_bytes
        return _StepRecord(dict(stats.seconds), stats.captured_tokens + stats.swept_tokens, received_bytes)

    def _log_step_metrics(self) -> None:
        stats, record = self.longstraw.stats, self._record
        spent = {phase: total - record.seconds_before.get(phase, 0.0) for phase, total in stats.seconds.items()}
        values = {
            "capture_seconds": spent.get("capture", 0.0),
            "sample_seconds": spent.get("sample", 0.0),
            "score_seconds": spent.get("score", 0.0),
            "replay_seconds": spent.get("replay", 0.0) + spent.get("backward", 0.0),
            "sweep_seconds": spent.get("sweep", 0.0),
            "resident_bytes": record.resident_bytes,
            "prompt_tokens_forwarded": stats.captured_tokens + stats.swept_tokens - record.prompt_tokens_before,
            "stale_age": record.stale_age,
            "rows_not_replayed": record.rows_not_replayed,
            "gradient_scope_full": float(self.longstraw.gradient_scope == "full"),
            **self.longstraw.adapter.metrics(),
        }
        if self._backend.context is not None:
            values["received_bytes"] = self._backend.context.received_bytes - record.received_bytes_before
        for name, value in values.items():
            self._metrics["train"][f"longstraw/{name}"].append(value)
        self._record = self._new_record()

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        scope = f"longstraw-gradient-scope-{self.longstraw.gradient_scope}"
        prefix = f"longstraw-prefix-adapter-{self.longstraw.prefix_adapter}"
        given = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*given, scope, prefix])

    # Checks

    def _check_prompt_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        limit = self.longstraw.bound.max_positions
        for i, ids in enumerate(prompt_ids):
            if not len(ids):
                raise InputError(f"sample {i} of the generation batch has an empty prompt; remove it from the dataset")
            if limit is not None and len(ids) + self.max_completion_length > limit:
                start = self._tokenizer.decode(list(ids[:16]))
                raise InputError(
                    f"sample {i} of the generation batch (prompt of {len(ids)} tokens, starting {start!r}) and "
                    f"max_completion_length={self.max_completion_length} pass the model's max_position_embeddings="
                    f"{limit}; nothing is truncated: remove the sample, or configure longer positions"
                )


def _key_of(prompt: torch.Tensor) -> bytes:
    return prompt.cpu().numpy().tobytes()
