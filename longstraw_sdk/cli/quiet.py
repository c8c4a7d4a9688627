"""Library chatter off; our own warnings stay."""

from __future__ import annotations

import os
import warnings


def quiet_libraries() -> None:
    """Before the first import of transformers, which reads the environment then."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module=r"(transformers|trl|peft|torch|accelerate)\.")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
