"""Prompts that are too long, found before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from longstraw_sdk.errors import InputError

N_LONGEST = 16
"""Prompts that are tokenised: all would take minutes for a gigabyte of text, the longest by bytes take seconds."""


def check_longest_prompts(prompts: Iterable[Any], n_tokens: Callable[[Any], int], room: int) -> None:
    """Raise `InputError`, naming rows, if one of the longest `prompts` has more than `room` tokens.

    Bytes do not order prompts as tokens do, so what passes here is still checked when it is sampled.

    Args:
        prompts: texts or conversations, in the order of the dataset.
        n_tokens: tokens of one of them.
    """
    n_bytes = [len(json.dumps(prompt, ensure_ascii=False, default=str).encode()) for prompt in prompts]
    longest = sorted(range(len(n_bytes)), key=lambda i: -n_bytes[i])[:N_LONGEST]
    chosen = {i: prompt for i, prompt in enumerate(prompts) if i in longest}
    found = {i: n for i in sorted(longest) if (n := n_tokens(chosen[i])) > room}
    if found:
        listed = ", ".join(f"row {i} of {n} tokens" for i, n in found.items())
        raise InputError(
            f"prompts of the dataset have more than the {room} tokens that the model's positions leave beside a "
            f"response: {listed}, among the {len(longest)} longest; nothing is truncated: remove them, or configure "
            "longer positions"
        )
