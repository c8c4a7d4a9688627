"""The GRPO trainer on top of TRL and rewards for it, imported as `longstraw_sdk.trainers`.

The names are loaded on first use, so that importing this package does not import trl.
"""

from typing import TYPE_CHECKING

from longstraw_sdk.lazy import lazy_names

if __name__ != "longstraw_sdk.trainers":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is packaged as longstraw_sdk.trainers: "
        "write `from longstraw_sdk.trainers import LongStrawGRPOTrainer, LongStrawGRPOConfig`"
    )

if TYPE_CHECKING:
    from longstraw_sdk.trainers.grpo_config import LongStrawGRPOConfig
    from longstraw_sdk.trainers.grpo_trainer import LongStrawGRPOTrainer
    from longstraw_sdk.trainers.task_rewards import dapo_math_reward, document_answer_reward, needle_recall_reward

__all__ = [
    "LongStrawGRPOConfig",
    "LongStrawGRPOTrainer",
    "dapo_math_reward",
    "needle_recall_reward",
    "document_answer_reward",
]

_MODULE_OF = {
    "LongStrawGRPOConfig": "grpo_config",
    "LongStrawGRPOTrainer": "grpo_trainer",
    "dapo_math_reward": "task_rewards",
    "needle_recall_reward": "task_rewards",
    "document_answer_reward": "task_rewards",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
