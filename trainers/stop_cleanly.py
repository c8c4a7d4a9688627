"""Ctrl-C and SIGTERM end a run between two updates, with a checkpoint."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopCleanly(TrainerCallback):
    """Ends training after the update that runs, and lets it be saved. A second Ctrl-C ends it at once.

    Ranks agree, because a signal reaches each at its own time. A launcher that waits shorter than an update takes
    (torchrun: 30 seconds) kills the run before; then the last checkpoint stands.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.asked: int | None = None
        """The signal that came, on this rank."""
        self.stopped = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block the signals are taken; afterwards they do what they did before."""
        before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = number
        logger.warning("%s: ends after this update; once more ends at once", signal.Signals(number).name)

    def on_step_end(self, args, state, control, **kwargs):
        world = self.trainer.longstraw.backend.world
        if self.asked is not None if world is None else not world.agree(self.asked is None):
            self.stopped = control.should_training_stop = control.should_save = True
        return control
