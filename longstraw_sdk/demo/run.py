"""The demo from start to finish: warm up, GRPO with LongStraw, the same with TRL's own trainer, report."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..adapter import adapter_for
from ..errors import ConfigurationError
from ..evidence.memory import MemoryTrace, trace_memory
from ..session import LongStrawSession
from ..types import CausalLM
from .model import tiny_dense, tiny_glm52, tiny_qwen36
from .progress import progress_callback
from .task import needle_dataset, needle_reward
from .text import load_prose
from .tokenizer import byte_tokenizer
from .warmup import warm_up

DemoModel = Literal["qwen36", "dense", "glm52"]
BUILDERS = {"qwen36": tiny_qwen36, "dense": tiny_dense, "glm52": tiny_glm52}
GROUP = 8
N_ANSWERS = 8  # per held-out prompt
TRL_SPARSE_ROWS = 2  # per micro-batch of TRL's trainer, instead of a whole group, for a model with indexers
TRL_PREFILL_TOKENS = 512  # and prompt tokens per forward in its sampling


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Sizes of a demo run. `n_compare_steps` optimizer steps are repeated with TRL's own trainer."""

    model: DemoModel = "qwen36"
    seed: int = 0
    n_steps: int = 44
    prompts_per_step: int = 4
    n_held_out: int = 32
    n_compare_steps: int = 2
    learning_rate: float = 4e-3
    lora_rank: int = 8
    max_completion_tokens: int = 4
    chunk_tokens: int = 1024
    page_tokens: int = 1024


@dataclass(frozen=True)
class DemoResult:
    """What a demo run measured; `metrics()` is what goes to metrics.json."""

    config: DemoConfig
    mean_reward_before: float
    mean_reward_after: float
    seconds: float
    seconds_by_part: dict[str, float]
    warm_up: dict[str, Any]
    reward_curve: list[float]
    trl_reward_curve: list[float]
    phase_seconds: dict[str, float]
    prompt_tokens_forwarded: int
    prompt_tokens_without_sharing: int
    seconds_per_step: float
    trl_seconds_per_step: float | None
    memory: MemoryTrace
    trl_memory: MemoryTrace

    def metrics(self) -> dict[str, Any]:
        return {
            "mean_reward_before": self.mean_reward_before,
            "mean_reward_after": self.mean_reward_after,
            "seconds": self.seconds,
            "gradient_scope": "full",
            "config": asdict(self.config),
            "seconds_by_part": self.seconds_by_part,
            "warm_up": self.warm_up,
            "reward_curve": self.reward_curve,
            "trl_reward_curve": self.trl_reward_curve,
            "phase_seconds": self.phase_seconds,
            "prompt_tokens_forwarded": self.prompt_tokens_forwarded,
            "prompt_tokens_without_sharing": self.prompt_tokens_without_sharing,
            "seconds_per_step": self.seconds_per_step,
            "trl_seconds_per_step": self.trl_seconds_per_step,
            "peak_bytes": self.memory.peak_bytes,
            "peak_bytes_by_phase": self.memory.peak_by_phase,
            "trl_peak_bytes": self.trl_memory.peak_bytes,
            "trl_peak_bytes_by_phase": self.trl_memory.peak_by_phase,
        }


Progress = Callable[[str, int, int, str], None]
"""Called with (part, done, total, remark)."""

Reward = Callable[..., list[float]]


def run_demo(config: DemoConfig, output_dir: Path, progress: Progress) -> DemoResult:
    """Run every part, write adapter, base model and metrics.json into `output_dir`, and return what was measured."""
    if config.model not in BUILDERS:
        raise ConfigurationError(f"model {config.model!r} is not known; allowed: {', '.join(BUILDERS)}")
    output_dir.mkdir(parents=True, exist_ok=True)
    clock = _Clock()
    tokenizer = byte_tokenizer()

    with clock.part("warm-up"):
        progress("warm-up", 0, 1, "supervised, all weights")
        base = BUILDERS[config.model](tokenizer, config.seed)
        warmed = warm_up(base, load_prose().train, config.seed)
        progress("warm-up", 1, 1, f"{warmed.seconds:.0f} s")
    base.save_pretrained(output_dir / "base_model")
    tokenizer.save_pretrained(output_dir / "base_model")

    train_set = needle_dataset("train", config.n_steps * config.prompts_per_step, config.seed)
    held_out = needle_dataset("held_out", config.n_held_out, config.seed)
    runs = _Trainers(config, output_dir, tokenizer, train_set)
    ours = runs.longstraw(copy.deepcopy(base), config.n_steps, progress)
    with clock.part("evaluation before"):
        before = _held_out_reward(ours.longstraw, tokenizer, held_out, config, progress, "held-out before")
    stats = ours.longstraw.stats
    sampled_before = (stats.captured_tokens, dict(stats.seconds))
    with clock.part("GRPO"):
        ours.train()
    tokens = stats.captured_tokens + stats.swept_tokens - sampled_before[0]
    phase_seconds = {k: v - sampled_before[1].get(k, 0.0) for k, v in stats.seconds.items()}
    ours.model.save_pretrained(output_dir / "adapter")
    with clock.part("evaluation after"):
        after = _held_out_reward(ours.longstraw, tokenizer, held_out, config, progress, "held-out after")

    with clock.part("memory traces"):
        progress("memory traces", 0, 2, "LongStraw")
        memory = _traced_step(runs.longstraw(copy.deepcopy(base), 1, None, _uneven_reward))
        progress("memory traces", 1, 2, "TRL")
        trl_memory = _traced_step(runs.trl(copy.deepcopy(base), 1, None, _uneven_reward))
        progress("memory traces", 2, 2, "")
    theirs = None
    if config.n_compare_steps:
        with clock.part("TRL comparison"):
            theirs = runs.trl(copy.deepcopy(base), config.n_compare_steps, progress)
            theirs.train()

    prefix_tokens = sum(len(tokenizer(text)["input_ids"]) - 1 for text in train_set["prompt"])
    result = DemoResult(
        config=config,
        mean_reward_before=before,
        mean_reward_after=after,
        seconds=clock.total(),
        seconds_by_part=clock.parts,
        warm_up=asdict(warmed),
        reward_curve=_rewards(ours),
        trl_reward_curve=_rewards(theirs) if theirs is not None else [],
        phase_seconds=phase_seconds,
        prompt_tokens_forwarded=tokens,
        prompt_tokens_without_sharing=2 * GROUP * prefix_tokens,
        seconds_per_step=_step_seconds(ours),
        trl_seconds_per_step=_step_seconds(theirs) if theirs is not None else None,
        memory=memory,
        trl_memory=trl_memory,
    )
    (output_dir / "metrics.json").write_text(json.dumps(result.metrics(), indent=2))
    return result


class _Trainers:
    """Makes the two trainers of the comparison from one set of options, so that they differ in nothing else."""

    def __init__(self, config: DemoConfig, output_dir: Path, tokenizer: Any, train_set: Any):
        self.config, self.output_dir, self.tokenizer, self.train_set = config, output_dir, tokenizer, train_set

    def longstraw(self, base: CausalLM, n_steps: int, progress: Progress | None, reward: Reward | None = None) -> Any:
        from ..trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer

        config = self.config
        args = LongStrawGRPOConfig(
            **self._options(), chunk_tokens=config.chunk_tokens, page_tokens=config.page_tokens, replay_tokens=64
        )
        callbacks = [progress_callback(progress, "GRPO", n_steps)] if progress else None
        return self._make(LongStrawGRPOTrainer, args, base, reward, callbacks)

    def trl(self, base: CausalLM, n_steps: int, progress: Progress | None, reward: Reward | None = None) -> Any:
        from trl import GRPOConfig, GRPOTrainer

        callbacks = [progress_callback(progress, "TRL comparison", n_steps)] if progress else None
        options = self._options()
        if self.config.model == "glm52":
            # The stock indexer copies its keys for every query: 18 GB for one group at once. The samples are the same.
            options |= {
                "per_device_train_batch_size": TRL_SPARSE_ROWS,
                "steps_per_generation": GROUP // TRL_SPARSE_ROWS,
                "gradient_accumulation_steps": self.config.prompts_per_step * GROUP // TRL_SPARSE_ROWS,
                "generation_kwargs": {"prefill_chunk_size": TRL_PREFILL_TOKENS},
            }
        return self._make(GRPOTrainer, GRPOConfig(**options), base, reward, callbacks)

    def _make(self, cls: Any, args: Any, base: CausalLM, reward: Reward | None, callbacks: list[Any] | None) -> Any:
        from transformers import PrinterCallback

        trainer = cls(
            base,
            reward_funcs=reward or needle_reward,
            args=args,
            train_dataset=self.train_set,
            processing_class=self.tokenizer,
            peft_config=adapter_for(base).lora_config(r=self.config.lora_rank),
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            "output_dir": str(self.output_dir / "trainer"),
            "use_cpu": True,
            "bf16": False,
            "seed": config.seed,
            "per_device_train_batch_size": GROUP,
            "num_generations": GROUP,
            "gradient_accumulation_steps": config.prompts_per_step,
            "steps_per_generation": 1,
            "max_completion_length": config.max_completion_tokens,
            "learning_rate": config.learning_rate,
            "lr_scheduler_type": "cosine",
            "max_steps": config.n_steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }


def _held_out_reward(
    session: LongStrawSession, tokenizer: Any, held_out: Any, config: DemoConfig, progress: Progress, part: str
) -> float:
    """Mean reward of `N_ANSWERS` answers per held-out prompt, sampled at temperature 1 from the resident state."""
    total = 0.0
    for i, (text, answer) in enumerate(zip(held_out["prompt"], held_out["answer"], strict=True)):
        prompt = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad(), session.capture(prompt) as prefix:
            rows = prefix.sample(N_ANSWERS, max_new_tokens=config.max_completion_tokens, seed=config.seed + i)
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        total += sum(needle_reward(texts, [answer] * N_ANSWERS))
        progress(part, i + 1, len(held_out), f"mean reward {total / (N_ANSWERS * (i + 1)):.2f}")
    return total / (N_ANSWERS * len(held_out))


def _uneven_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Gives every response another advantage, so that a traced step replays all of them."""
    return [float(i) for i in range(len(completions))]


def _traced_step(trainer: Any) -> MemoryTrace:
    """Live tensor bytes of one group's micro-batch, generation included."""
    trainer.current_gradient_accumulation_steps = 1
    group = next(iter(trainer.get_train_dataloader()))
    trainer.model_wrapped = trainer.model
    if trainer.args.activation_checkpointing:  # `train()` would have done so
        trainer.model.activation_checkpointing_enable(trainer.args.activation_checkpointing_kwargs)
    with trace_memory() as trace:
        if hasattr(trainer, "longstraw"):
            trainer.longstraw.stats.observer = trace.phase
            trainer.training_step(trainer.model, group, None)
        else:
            _traced_stock_step(trainer, group, trace)
    return trace


def _traced_stock_step(trainer: Any, group: Any, trace: MemoryTrace) -> None:
    trainer.model.train()
    with trace.phase("sample"):
        inputs = trainer._prepare_inputs(group)
    with trace.phase("forward"):
        loss = trainer.compute_loss(trainer.model, inputs)
    with trace.phase("backward"):
        loss.backward()


def _rewards(trainer: Any) -> list[float]:
    return [h["reward"] for h in trainer.state.log_history if "reward" in h]


def _step_seconds(trainer: Any) -> float:
    seconds = [h["step_time"] for h in trainer.state.log_history if "step_time" in h]
    return sum(seconds) / len(seconds)


class _Clock:
    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[name] = time.perf_counter() - start

    def total(self) -> float:
        return time.perf_counter() - self.start
