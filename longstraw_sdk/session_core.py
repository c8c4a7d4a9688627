"""What a session and its prefixes share: options, totals, and how far the open update is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from .bound import BoundModel
from .errors import LifecycleError
from .lora import weights_fingerprint
from .state import ContextGroup, PagePool, Placement
from .turns import ExpertTurns
from .types import GradientScope, PrefixAdapter


@dataclass
class SessionStats:
    """Running totals of a session. Seconds of replay are of the forward; the backward belongs to the caller.

    `observer`, if set, is entered around every phase with its name; memory traces use it.
    """

    captured_tokens: int = 0
    scored_tokens: int = 0
    replayed_tokens: int = 0
    swept_tokens: int = 0
    sampled_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    observer: Callable[[str], AbstractContextManager[None]] | None = None

    @contextmanager
    def timed(self, phase: str, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with nullcontext() if self.observer is None else self.observer(phase):
                yield
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass
class SessionCore:
    """What a session shares with its prefixes."""

    bound: BoundModel
    pool: PagePool
    gradient_scope: GradientScope
    prefix_adapter: PrefixAdapter
    chunk_tokens: int
    replay_tokens: int | None
    temperature: float
    verify_content: bool
    placement: Placement
    context: ContextGroup | None = None
    turns: ExpertTurns | None = None
    """Set where contexts share experts."""
    stats: SessionStats = field(default_factory=SessionStats)
    weights_epoch: int = 0
    update_is_open: bool = False
    needs_finalize: bool = False
    """Whether responses were replayed since the last finalize."""
    half_added: str | None = None
    """Why the gradients of the open update are not whole: a backward or sweep that runs, or that ended in an error."""
    n_sweeps: int = 0
    n_swept_tokens: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether no other rank runs the same passes."""
        return self.context is None and self.turns is None

    def backward_ended(self) -> None:
        self.half_added = None

    def check_whole(self) -> None:
        """Raise `LifecycleError` if gradients of the open update were added by half."""
        if self.half_added is not None:
            raise LifecycleError(
                f"{self.half_added}, so the gradients of this update are not whole; call session.discard() and take "
                "the update again from its first capture"
            )

    def weights_key(self) -> tuple[int, int]:
        """Changes when the weights that a capture depends on change."""
        live = self.prefix_adapter == "live"
        fingerprint = weights_fingerprint(self.bound.base, with_adapters=live)
        return (fingerprint, self.weights_epoch if live else 0)
