"""What megatron-core 0.16.1 needs on a CPU, where it asks for CUDA devices. Nothing here does anything with CUDA.

Patches are of this process and last only for the calls that need them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron's buffers, exchanges and checkpoints take "the current CUDA device" for the CPU."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as undo:
        _replace(undo, torch.cuda, "current_device", lambda: torch.device("cpu"))
        _replace(undo, torch.cuda, "synchronize", lambda *args, **kwargs: None)
        yield


@contextmanager
def dispatching() -> Iterator[None]:
    """`on_cpu` for calls of a token dispatcher, whose exchanges remember it until their backward."""
    with on_cpu(), ExitStack() as undo:
        if not torch.cuda.is_available():
            from megatron.core.transformer.moe import token_dispatcher

            _replace(undo, token_dispatcher, "all_to_all", _cpu_exchange().apply)
        yield


@cache
def dispatcher_class() -> Any:
    """`MoEAlltoAllTokenDispatcher`; on a CPU without the stream on which it copies counts to the host."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    if torch.cuda.is_available():
        return MoEAlltoAllTokenDispatcher

    class CpuDispatcher(MoEAlltoAllTokenDispatcher):
        def __init__(self, *args: Any, **kwargs: Any):
            with ExitStack() as undo:
                _replace(undo, MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object())
                super().__init__(*args, **kwargs)

        def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
            if point == self.cuda_dtoh_point:
                for name in ("input_splits", "output_splits", "output_splits_tp"):
                    if torch.is_tensor(getattr(self, name)):
                        setattr(self, name, getattr(self, name).tolist())
            return tokens_per_expert

    return CpuDispatcher


@cache
def _cpu_exchange() -> Any:
    """Megatron's exchange, which allocates on the current CUDA device in backward too."""
    from megatron.core.tensor_parallel.mappings import _AllToAll

    class CpuExchange(_AllToAll):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with on_cpu():
                return _AllToAll.forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            with on_cpu():
                return _AllToAll.backward(ctx, *grad_outputs)

    return CpuExchange


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
