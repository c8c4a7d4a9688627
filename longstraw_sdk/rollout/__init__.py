"""Samplers: who draws the responses of a prompt. The resident state does where a trainer is given none of these."""

from .adapter_export import ExportedAdapter, export_adapter
from .directory import DirectorySampler
from .http import HttpSampler
from .protocol import Completion, RolloutRequest, Sampler, prompt_identities, prompt_identity
from .vllm_engine import VllmSampler

__all__ = [
    "Completion",
    "DirectorySampler",
    "ExportedAdapter",
    "HttpSampler",
    "RolloutRequest",
    "Sampler",
    "VllmSampler",
    "export_adapter",
    "prompt_identities",
    "prompt_identity",
]
