"""LongStraw SDK: reinforcement learning on very long prompts, with the prompt computed once per group."""

from __future__ import annotations

from importlib import metadata

from .adapter import DecoderOutput, ResidentStateAdapter, StateView, adapter_for, register_adapter
from .errors import (
    ConfigurationError,
    InputError,
    LifecycleError,
    LongStrawError,
    NumericsError,
    PlacementError,
    RankLostError,
    RegistryError,
    SamplerError,
    StaleStateError,
    UnsupportedModelError,
    UseAfterReleaseError,
    WitnessError,
)
from .positions import PositionConfig, positions_identity, require_same_positions, vllm_arguments
from .prefix import Prefix
from .session import LongStrawSession
from .types import FinalizeResult, ReplayOutput

__version__ = metadata.version("longstraw-sdk")

__all__ = [
    "ConfigurationError",
    "DecoderOutput",
    "FinalizeResult",
    "InputError",
    "LifecycleError",
    "LongStrawError",
    "LongStrawSession",
    "NumericsError",
    "PlacementError",
    "PositionConfig",
    "Prefix",
    "RankLostError",
    "RegistryError",
    "ReplayOutput",
    "ResidentStateAdapter",
    "SamplerError",
    "StaleStateError",
    "StateView",
    "UnsupportedModelError",
    "UseAfterReleaseError",
    "WitnessError",
    "__version__",
    "adapter_for",
    "positions_identity",
    "register_adapter",
    "require_same_positions",
    "vllm_arguments",
]
