"""Reports optimizer steps of a trainer to the demo's progress display."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def progress_callback(progress: Callable[[str, int, int, str], None], part: str) -> Any:
    """A transformers callback that reports each logged step with its mean reward."""
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress(part, 0, state.max_steps, "")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                progress(part, state.global_step, state.max_steps, f"mean reward {logs['reward']:.2f}")

    return Report()
