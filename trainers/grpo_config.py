"""Configuration of `LongStrawGRPOTrainer`: TRL's `GRPOConfig` and what LongStraw adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from accelerate import ParallelismConfig
from accelerate.utils import parse_flag_from_env
from trl import GRPOConfig

from longstraw_sdk.backends.choice import NAMES
from longstraw_sdk.backends.ranks import check_sizes
from longstraw_sdk.errors import ConfigurationError, require_at_least
from longstraw_sdk.types import GradientScope, PrefixAdapter, StateDevice


@dataclass
class LongStrawGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus nine fields. Options of TRL that cannot work here raise `ConfigurationError`.

    Args:
        gradient_scope: "full", the gradient of conventional autograd, or "response", which treats the prompt's state
            as a constant (arXiv 2607.14952).
        prefix_adapter: "live" or "frozen"; frozen switches LoRA on from the last prompt token only.
        chunk_tokens: prompt tokens per forward in capture and sweep.
        page_tokens: rows per page of resident state.
        state_device: where the resident state lives: "auto", "cuda" or "cpu".
        replay_tokens: response tokens that one packed replay may hold; unset replays one response at a time.
        context_parallel_size: consecutive ranks that share one prompt; batch sizes count such a context as one process.
        expert_parallel_size: consecutive ranks that hold one set of experts together; each must be given a model with
            its part of them.
        sharding: "local" (one process), "accelerate" or "megatron" (several), or "auto", which picks by what is
            launched.

    Positions beyond the model's own are no field: the environment variable LONGSTRAW_POSITIONS holds a `PositionConfig`
    as JSON, so that a launcher can give trainer and sampler the same text. Unset, the model stays as it is.
    """

    gradient_scope: GradientScope = field(
        default="full",
        metadata={
            "help": "'full': exact gradient through the prompt. 'response': the prompt's state is a constant.",
        },
    )
    prefix_adapter: PrefixAdapter = field(
        default="live",
        metadata={
            "help": "'live': LoRA acts on the prompt. 'frozen': LoRA acts from the last prompt token on.",
        },
    )
    chunk_tokens: int = field(default=8192, metadata={"help": "Prompt tokens per forward in capture and sweep."})
    page_tokens: int = field(default=4096, metadata={"help": "Tokens per page of resident state."})
    state_device: StateDevice = field(
        default="auto",
        metadata={"help": "Where the resident state lives."},
    )
    replay_tokens: int | None = field(
        default=None,
        metadata={"help": "Response tokens that one packed replay may hold. Unset: one response at a time."},
    )
    context_parallel_size: int = field(default=1, metadata={"help": "Consecutive ranks that share one prompt."})
    expert_parallel_size: int = field(default=1, metadata={"help": "Ranks that hold one set of experts together."})
    sharding: Literal["auto", "local", "accelerate", "megatron"] = field(
        default="auto", metadata={"help": "Sharding backend."}
    )

    def __post_init__(self) -> None:
        self._refuse_parallelism()
        for option in ("context_parallel_size", "expert_parallel_size"):
            require_at_least(option, getattr(self, option), 1)
        size = self.context_parallel_size
        if self.generation_batch_size is not None:
            self.generation_batch_size *= size
        super().__post_init__()
        check_sizes(self.world_size, size, self.expert_parallel_size)
        assert self.generation_batch_size is not None, "TRL sets it"
        self.generation_batch_size //= size  # TRL counts processes, a context is one
        problems = list(self._problems())
        if problems:
            raise ConfigurationError("; ".join(problems))

    def _refuse_parallelism(self) -> None:
        """Of accelerate's own, from options or the launcher, before transformers acts on it."""
        if self.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            raise ConfigurationError(
                "deepspeed: it would shard weights that replay reads as they are; leave it unset and launch without it"
            )
        if parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
            raise ConfigurationError(
                "accelerate's Megatron-LM (distributed_type: MEGATRON_LM) would build a model of its own; launch with "
                "MULTI_GPU and set sharding='megatron'"
            )
        parallelism = self.parallelism_config
        if parallelism is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
            parallelism = ParallelismConfig()  # reads what `accelerate launch` was told
        sizes = {name: getattr(parallelism, name, 1) for name in ("cp_size", "sp_size", "tp_size", "dp_shard_size")}
        above = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        if above:
            raise ConfigurationError(
                f"parallelism_config with {', '.join(above)} would split TRL's padded batch or weights that replay "
                "reads as they are; leave all of them at 1. Ranks that share one prompt are LongStraw's "
                "context_parallel_size, over which accelerate's FSDP2 may spread the frozen weights"
            )

    def _problems(self) -> list[str]:
        reentrant = bool(
            self.gradient_checkpointing and (self.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        )
        assert self.steps_per_generation is not None, "TRL sets it"
        own_rows = self.per_device_train_batch_size * self.steps_per_generation
        checks = {
            f"per_device_train_batch_size={self.per_device_train_batch_size} times steps_per_generation="
            f"{self.steps_per_generation} gives {own_rows} rows, not a multiple of num_generations="
            f"{self.num_generations}: with several processes each must have whole groups, which share a prompt": (
                self.world_size > 1 and own_rows % self.num_generations != 0
            ),
            f"sharding={self.sharding!r} is not known; allowed: {', '.join(map(repr, NAMES))}": (
                self.sharding not in NAMES
            ),
            f"vllm_mode={self.vllm_mode!r} is not known; allowed: 'server' and 'colocate'": (
                self.use_vllm and self.vllm_mode not in ("server", "colocate")
            ),
            "use_transformers_continuous_batching=True: rows are sampled from the resident state; leave it off": (
                self.use_transformers_continuous_batching
            ),
            f"cache_implementation={self.cache_implementation!r}: rows decode on the resident state; leave it unset": (
                self.cache_implementation is not None
            ),
            "use_liger_kernel=True replaces model code that replay relies on; leave it off": self.use_liger_kernel,
            f"router_aux_loss_coef={self.router_aux_loss_coef}: the load-balancing loss needs router logits of the "
            "whole prompt, which are not kept; set it to 0": bool(self.router_aux_loss_coef),
            "gradient_checkpointing_kwargs={'use_reentrant': True} loses gradients of the resident state; use False": (
                reentrant
            ),
            "fp16=True: the loss scale of float16 was not tried with replays; use bf16=True, or neither": self.fp16,
            "torch_compile=True compiles the stock forward, which replay does not call; leave it off": (
                self.torch_compile
            ),
            "fsdp: it would shard weights that replay reads as they are; leave it unset": bool(self.fsdp),
        }
        return [message for message, found in checks.items() if found]
