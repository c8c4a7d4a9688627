"""`longstraw train`: options as of `trl grpo`, from a YAML file and flags, and the run that they describe."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import ModelConfig, TrlParser, get_quantization_config
from trl.scripts.grpo import GRPOScriptArguments

from longstraw_sdk.adapter import ResidentStateAdapter, adapter_for
from longstraw_sdk.data.rows import load_rows
from longstraw_sdk.doctor import Check, Subject, examine
from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.models.glm52 import GLM52Adapter, load_expert_shard

from .grpo_config import LongStrawGRPOConfig
from .grpo_trainer import LongStrawGRPOTrainer
from .stop_cleanly import StopCleanly

logger = logging.getLogger(__name__)

USAGE = "longstraw train [--config FILE.yaml] [--OPTION VALUE ...]"

OUR_REWARDS = ("dapo_math_reward", "needle_recall_reward", "document_answer_reward")


@dataclass
class ModelOptions(ModelConfig):
    """TRL's, with defaults that work here: bfloat16 weights, LoRA on every linear, no dropout."""

    dtype: str | None = field(default="bfloat16", metadata={"help": "Weights' dtype; LoRA stays in float32."})
    use_peft: bool = field(default=True, metadata={"help": "LongStraw trains LoRA: true."})
    lora_dropout: float = field(default=0.0, metadata={"help": "0: every replay of a token must be the same."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.use_peft:
            raise ConfigurationError("use_peft=False: LongStraw trains LoRA; leave it on")
        if self.lora_dropout:
            raise ConfigurationError(
                f"lora_dropout={self.lora_dropout}: a token that is forwarded again must come out the same; use 0"
            )


@dataclass
class RunOptions:
    """How the command behaves."""

    doctor: bool = field(default=True, metadata={"help": "Examine machine, model and data first; refuse on a fault."})
    quiet: bool = field(default=False, metadata={"help": "No progress bar and no metrics, errors alone."})
    json: bool = field(default=False, metadata={"help": "One JSON object per line: metrics, then a summary."})
    tape: Literal["off", "record", "replay"] = field(
        default="replay",
        metadata={"help": "Of GLM-5.2: whether all passes over a token take the same experts and selections."},
    )


@dataclass(frozen=True)
class Request:
    """Everything that was asked for."""

    script: GRPOScriptArguments
    model: ModelOptions
    config: LongStrawGRPOConfig
    run: RunOptions


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `stopped_by` is the number of the signal that ended it early."""

    output_dir: str
    updates: int
    stopped_by: int | None
    metrics: dict[str, Any]


def parse(args: Sequence[str]) -> Request:
    """Flags over `--config FILE.yaml` over defaults. Raises `ConfigurationError` for options that are not known."""
    if not args:
        raise ConfigurationError(f"a model, data and a reward are needed: {USAGE}; --help lists the options")
    kinds = (GRPOScriptArguments, ModelOptions, LongStrawGRPOConfig, RunOptions)
    parser = TrlParser(kinds, prog="longstraw train", usage=USAGE)
    try:
        return Request(*parser.parse_args_and_config(list(args)))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"longstraw train: {error}") from error


def rewards_of(script: GRPOScriptArguments) -> list[str | Callable[..., Any]]:
    """The reward model and the reward functions: names of TRL's and ours, or dotted paths of your own."""
    from trl import rewards as stock

    from longstraw_sdk import trainers as ours

    known: dict[str, Any] = {
        "get_soft_overlong_punishment": stock.get_soft_overlong_punishment(
            max_completion_len=1280, soft_punish_cache=256
        )
    }
    known |= {n: getattr(stock, n) for n in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")}
    found: list[str | Callable[..., Any]] = [script.reward_model_name_or_path] * bool(script.reward_model_name_or_path)
    for name in script.reward_funcs or ():
        if name in known:
            found.append(known[name])
        elif name in OUR_REWARDS:
            found.append(getattr(ours, name))
        else:
            found.append(_imported(name, [*known, *OUR_REWARDS]))
    if not found:
        raise ConfigurationError(
            f"no reward: give reward_funcs, names of {', '.join([*known, *OUR_REWARDS])} or dotted paths of your own"
        )
    return found


def _imported(name: str, known: Sequence[str]) -> Callable[..., Any]:
    module, dot, function = name.rpartition(".")
    if not dot:
        raise ConfigurationError(f"reward_funcs {name!r} is not known; allowed: {', '.join(known)}, or module.function")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"reward_funcs {name!r} cannot be imported from {here}: {error}") from error
    return found


def examined(request: Request) -> list[Check]:
    """What the doctor says of the request."""
    script, model, config = request.script, request.model, request.config
    options = {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    return examine(
        Subject(
            model=model.model_name_or_path,
            model_options=options,
            dataset=script.dataset_name,
            dataset_config=script.dataset_config,
            dataset_split=script.dataset_train_split,
            output_dir=Path(config.output_dir or "trainer_output"),
            response_tokens=config.max_completion_length,
            group=config.num_generations,
            scope=config.gradient_scope,
        )
    )


def run(request: Request) -> Outcome:
    """Train, save the adapter in the output folder and say how it ended."""
    script, config = request.script, request.config
    if not request.model.model_name_or_path or not script.dataset_name:
        raise ConfigurationError("model_name_or_path and dataset_name must be given, as flags or in the --config file")
    if script.dataset_streaming:
        raise ConfigurationError("dataset_streaming=True: runs are resumed by row; load the data set as a whole")
    if request.run.quiet or request.run.json:
        config.disable_tqdm = True
    rewards = rewards_of(script)
    model = _load(request)
    adapter = adapter_for(model)
    if isinstance(adapter, GLM52Adapter):
        adapter = GLM52Adapter(tape=request.run.tape)
    trainer = LongStrawGRPOTrainer(
        model,
        adapter=adapter,
        reward_funcs=rewards,
        args=config,
        train_dataset=load_rows(script.dataset_name, script.dataset_config, script.dataset_train_split),
        eval_dataset=(
            load_rows(script.dataset_name, script.dataset_config, script.dataset_test_split)
            if config.eval_strategy != "no"
            else None
        ),
        processing_class=AutoTokenizer.from_pretrained(
            request.model.model_name_or_path, revision=request.model.model_revision, padding_side="left"
        ),
        peft_config=_lora(request.model, adapter),
    )
    stop = StopCleanly(trainer)
    trainer.add_callback(stop)
    if request.run.quiet or request.run.json:
        trainer.remove_callback(PrinterCallback)
    if request.run.json:
        trainer.add_callback(_JsonLines())
    resume = config.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(resume).lower(), resume)  # flags are text
    with stop.listening():
        output = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(config.output_dir)
    return Outcome(
        output_dir=str(config.output_dir),
        updates=trainer.state.global_step,
        stopped_by=(stop.asked or 15) if stop.stopped else None,
        metrics=dict(output.metrics),
    )


def summary(outcome: Outcome) -> str:
    """One JSON line."""
    return json.dumps({"summary": asdict(outcome)}, default=str)


def _load(request: Request) -> Any:
    options, config = request.model, request.config
    name = options.model_name_or_path
    if config.expert_parallel_size > 1:
        rank = int(os.environ.get("RANK", "0"))
        return load_expert_shard(name, rank % config.expert_parallel_size, config.expert_parallel_size)
    given: dict[str, Any] = {
        "revision": options.model_revision,
        "dtype": options.dtype,
        "attn_implementation": options.attn_implementation,
        "quantization_config": get_quantization_config(options),
        "trust_remote_code": config.trust_remote_code,
    }
    given = {key: value for key, value in given.items() if value is not None}
    return AutoModelForCausalLM.from_pretrained(name, **given | (config.model_init_kwargs or {}))


def _lora(options: ModelOptions, adapter: ResidentStateAdapter) -> Any:
    given: dict[str, Any] = {}
    if options.lora_target_modules is not None:
        given["target_modules"] = options.lora_target_modules
    if options.use_rslora:
        given["use_rslora"] = True
    if options.use_dora or options.lora_modules_to_save or options.lora_target_parameters:
        raise ConfigurationError(
            "use_dora, lora_modules_to_save and lora_target_parameters are not served by longstraw train; make the "
            "LoraConfig in a script of your own"
        )
    return adapter.lora_config(r=options.lora_r, lora_alpha=options.lora_alpha, **given)


class _JsonLines(TrainerCallback):
    """Every log as one line of JSON on standard output, of the main process."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            print(json.dumps({"step": state.global_step} | dict(logs), default=str), flush=True)
