"""sha256 of tensors and of the tokens that an update was made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..lora import is_lora_parameter
from ..types import CausalLM, local

_SAMPLE_BYTES = 65536
_LARGEST = 16


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor.detach()))
    return digest.hexdigest()


def adapter_digest(model: CausalLM) -> str:
    """Of the LoRA weights that are trained: which policy this is."""
    return tensors_digest((n, p) for n, p in model.named_parameters() if is_lora_parameter(n) and p.requires_grad)


def frozen_digest(model: CausalLM) -> str:
    """Of the first 64 KiB of every frozen weight that this rank holds: cheap, and another for other checkpoints."""
    frozen = ((n, local(p)) for n, p in model.named_parameters() if not p.requires_grad)
    return tensors_digest((n, p.detach().flatten()[: _SAMPLE_BYTES // p.element_size()]) for n, p in frozen)


def gradient_witness(model: CausalLM) -> dict[str, Any]:
    """Norm and digest of the whole gradient, and of the largest of its tensors: bounded, whatever the model."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    norms = {name: float(grad.double().norm()) for name, grad in grads.items()}
    largest = sorted(norms, key=lambda name: (-norms[name], name))[:_LARGEST]
    return {
        "n_tensors": len(grads),
        "norm": sum(norm**2 for norm in norms.values()) ** 0.5,
        "sha256": tensors_digest(grads.items()),
        "largest": [{"name": n, "norm": norms[n], "sha256": tensors_digest([(n, grads[n])])} for n in largest],
    }


def row_identity(prompt_sha256: str, token_ids: Sequence[int]) -> str:
    """One response and the prompt that it answers."""
    return hashlib.sha256(f"{prompt_sha256} {' '.join(map(str, token_ids))}".encode()).hexdigest()


def facts_digest(facts: Mapping[str, Any]) -> str:
    """Of JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def seal(content: Mapping[str, Any]) -> str:
    """Of JSON values that hold it under "sha256", without that."""
    return facts_digest({name: value for name, value in content.items() if name != "sha256"})


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
