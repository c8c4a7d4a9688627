"""TRL's `use_vllm`: which of our samplers it means, and which of its options none of them uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.positions import asked_positions
from longstraw_sdk.rollout import HttpSampler, Sampler, VllmSampler

UNUSED: dict[str, dict[str, Any]] = {
    "server": {"vllm_structured_outputs_regex": None, "vllm_server_timeout": 240.0, "vllm_group_port": 51216},
    "colocate": {
        "vllm_structured_outputs_regex": None,
        "vllm_model_impl": "vllm",
        "vllm_tensor_parallel_size": 1,
        "vllm_server_base_url": None,
        "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000,
        "vllm_server_timeout": 240.0,
        "vllm_group_port": 51216,
    },
}
"""By `vllm_mode`: TRL's options that mean nothing to `HttpSampler` or `VllmSampler`, with TRL's defaults."""

_WHERE = {
    "server": (HttpSampler, "a vLLM server that loads the adapter as it is"),
    "colocate": (VllmSampler, "an engine of one GPU that loads the adapter as it is"),
}


def sampler_of(args: Any, sampler: Sampler | None, model: Any, quantization_config: object) -> Sampler | None:
    """`sampler`, or the one that `use_vllm=True` asks for: it loads the adapter, so nothing is merged.

    Args:
        model, quantization_config: what the trainer was given; a colocated engine reads the base weights by their name.
    """
    if not args.use_vllm:
        return sampler
    if sampler is not None:
        raise ConfigurationError(f"use_vllm=True and sampler={sampler.name} both draw responses; give one of them")
    kind, what = _WHERE[args.vllm_mode]
    set_away = [
        f"{name}={getattr(args, name)!r}"
        for name, stock in UNUSED[args.vllm_mode].items()
        if getattr(args, name) != stock
    ]
    if set_away:
        raise ConfigurationError(
            f"{', '.join(set_away)}: not used by LongStraw, for which vllm_mode={args.vllm_mode!r} is {what}; leave it "
            f"unset, or see {kind.__name__}"
        )
    if args.vllm_mode == "server":
        return HttpSampler(args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}")
    return _engine_of(args, model, quantization_config)


def _engine_of(args: Any, model: Any, quantization_config: object) -> VllmSampler:
    own = "give sampler=VllmSampler(folder, engine_arguments={...}) instead of use_vllm"
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
    if not name:
        raise ConfigurationError(
            f"this {type(model).__name__} was not loaded from a folder or by a name, where vLLM could read the base "
            f"weights; save it and {own}"
        )
    if quantization_config is not None or getattr(model, "quantization_method", None) is not None:
        raise ConfigurationError(f"vLLM would load the base weights of {name} unquantised; {own}")
    if asked_positions(None) is not None:
        raise ConfigurationError(
            f"LONGSTRAW_POSITIONS extends the trainer's positions and not vLLM's; {own}, with vllm_arguments among them"
        )
    assert args.steps_per_generation is not None, "TRL sets it"
    arguments = {
        "max_model_len": args.vllm_max_model_length,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_num_seqs": args.per_device_train_batch_size * args.steps_per_generation,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }
    if isinstance(args.model_init_kwargs, dict) and "revision" in args.model_init_kwargs:
        arguments["revision"] = args.model_init_kwargs["revision"]
    return VllmSampler(name, sleep=args.vllm_enable_sleep_mode, engine_arguments=arguments)


@contextmanager
def without_vllm(args: Any) -> Iterator[None]:
    """Within the block TRL builds no vLLM client or engine of its own, which would merge LoRA into the base weights."""
    asked, args.use_vllm = args.use_vllm, False
    try:
        yield
    finally:
        args.use_vllm = asked
