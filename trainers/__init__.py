"""The GRPO trainer on top of TRL, imported as `longstraw_sdk.trainers`.

The two names are loaded on first use, so that importing this package does not import trl.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "longstraw_sdk.trainers":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is packaged as longstraw_sdk.trainers: "
        "write `from longstraw_sdk.trainers import LongStrawGRPOTrainer, LongStrawGRPOConfig`"
    )

if TYPE_CHECKING:
    from longstraw_sdk.trainers.grpo_config import LongStrawGRPOConfig
    from longstraw_sdk.trainers.grpo_trainer import LongStrawGRPOTrainer

__all__ = ["LongStrawGRPOConfig", "LongStrawGRPOTrainer"]

_MODULE_OF = {"LongStrawGRPOConfig": "grpo_config", "LongStrawGRPOTrainer": "grpo_trainer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
