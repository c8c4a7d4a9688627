"""Reports optimizer steps of a trainer to the demo's progress display."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def progress_callback(progress: Callable[[str, int, int, str], None], part: str, n_steps: int) -> Any:
    """A transformers callback that reports each logged step with its mean reward and stops after `n_steps`.

    Stopping early, unlike a smaller `max_steps`, leaves the learning-rate schedule as it is.
    """
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress(part, 0, n_steps, "")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                progress(part, state.global_step, n_steps, f"mean reward {logs['reward']:.2f}")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step >= n_steps

    return Report()
