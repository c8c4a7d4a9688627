"""Contexts that share experts but not prompts: they run their passes together, and who has none serves the others.

An expert's rank is needed by every forward and backward of every context that may route a token to it, while contexts
differ in prompts, lengths and numbers of responses. So before each pass all ranks of a set of experts say what they are
about to do. The first kind in the order below has its turn: ranks that asked for it run their own pass, the others run
the same pass over one token, whose result is dropped and whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from .adapter import StateView
from .bound import BoundModel
from .errors import LifecycleError
from .state import ContextGroup, PagePool, ResidentState


class Kind(IntEnum):
    """What a pass consists of; passes of one kind reach the experts in the same order."""

    FORWARD = 0
    """Without a graph: capture, sampling, scoring."""
    REPLAY = 1
    """With a graph, and a backward from the last hidden state."""
    SWEEP = 2
    """With a graph, and a backward from the states that layers produced."""
    IDLE = 3
    """No pass before all ranks are idle."""


class ExpertTurns:
    """Turns of the ranks of `group`, which hold one set of experts together."""

    def __init__(self, group: ContextGroup, bound: BoundModel, pool: PagePool, context: ContextGroup | None):
        self.group = group
        self.bound = bound
        self._ids = torch.zeros(0, dtype=torch.long, device=bound.device)
        self._state = ResidentState(bound.specs, self._ids, pool, "passes of others", bound.device, context=context)
        self._sweeping = self._serving = False
        self._open_replay = False
        self._hook = bound.base.base_model.register_forward_pre_hook(self._before_pass)

    def close(self) -> None:
        self._hook.remove()
        self._state.release()

    def join(self) -> None:
        """Serve the other ranks until all have joined."""
        self._take_turn(Kind.IDLE)

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """Passes with a graph within the block are of a sweep."""
        self._sweeping = True
        try:
            yield
        finally:
            self._sweeping = False

    def backward_began(self) -> None:
        """The backward of the last replay runs now."""
        self._open_replay = False

    def _before_pass(self, module: Any, args: Any) -> None:
        if self._serving:
            return
        if not torch.is_grad_enabled():
            self._take_turn(Kind.FORWARD)
        elif self._sweeping:
            self._take_turn(Kind.SWEEP)
        else:
            self._take_turn(Kind.REPLAY)
            self._open_replay = True

    def _take_turn(self, own: Kind) -> None:
        if self._open_replay:
            raise LifecycleError(
                "a replay is open whose backward has not run; with expert_parallel_size above context_parallel_size "
                "the other ranks wait for that backward: call it before the next replay, score, capture or finalize"
            )
        wish = torch.tensor([own], device=self.bound.device)
        while True:
            kind = Kind(int(self.group.gather(wish).min()))
            if kind == own:
                return
            self._serve(kind)

    def _serve(self, kind: Kind) -> None:
        self._serving = True
        try:
            with torch.set_grad_enabled(kind != Kind.FORWARD):
                n_tokens = self._state.min_forward_tokens
                out = self.bound.adapter.forward(
                    self.bound.base, self._ids.new_zeros(1, n_tokens), StateView(self._state, 0)
                )
                if kind == Kind.REPLAY:
                    _drop_backward([out.hidden])
                elif kind == Kind.SWEEP:
                    _drop_backward([tensor for by_name in out.produced.values() for tensor in by_name.values()])
        finally:
            self._serving = False


def _drop_backward(results: list[torch.Tensor]) -> None:
    """The backward pass of a real one, with a gradient of zero."""
    roots = [tensor for tensor in results if tensor.requires_grad]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
