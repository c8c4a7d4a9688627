"""Importing megatron-core: late, at once, and without its warnings of optional packages that are missing."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigurationError

_NEEDED = {"megatron-core": "megatron.core", "einops": "einops"}
_MODULES = ("parallel_state", "process_groups_config", "distributed", "optimizer", "dist_checkpointing", "transformer")


def load_megatron() -> None:
    """Import what the backend uses. Raises `ConfigurationError` if megatron-core or einops is not installed."""
    # Found now, because an initialisation that fails halfway for want of einops leaves the other ranks waiting.
    missing = [package for package, module in _NEEDED.items() if not _installed(module)]
    if missing:
        raise ConfigurationError(
            f'backend="megatron" needs {" and ".join(missing)}: pip install "longstraw-sdk[megatron]", or use '
            'backend="accelerate"'
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*_MODULES, "transformer.moe.token_dispatcher"):
            import_module(f"megatron.core.{name}")


def transformer_config(**options: Any) -> Any:
    """A `TransformerConfig` for parts of Megatron that read parallelism from it and no shape."""
    from megatron.core.transformer import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, **options)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
