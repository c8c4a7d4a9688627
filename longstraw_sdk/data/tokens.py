"""How long a prompt is: the ids that TRL will make of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from datasets import Dataset

Prompt = str | list[dict[str, str]]
"""What TRL takes as `prompt`: text, or a conversation of `{"role": ..., "content": ...}`."""

MAX_FITS = 8
MARGIN_TOKENS = 16  # joints of text move the length by a few tokens; this far inside the bounds the first fit holds


def load_tokenizer(path_or_id: str) -> Any:
    """The tokenizer of a model folder or hub id."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path_or_id)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no tokenizer could be loaded from {path_or_id!r} ({str(error).splitlines()[0]}); give a model folder or "
            "a hub id"
        ) from error


def require_chat_template(tokenizer: Any) -> None:
    """Raise unless `tokenizer` can render conversations."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(
            f"prompts are conversations, but the tokenizer {tokenizer.name_or_path!r} has no chat template; use an "
            "instruct model's tokenizer, set tokenizer.chat_template, or give prompts as text"
        )


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The token ids of `prompt` as TRL's GRPOTrainer makes them (without tools and template options)."""
    if isinstance(prompt, str):
        encoded = tokenizer(text=prompt, verbose=False)
    else:
        encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def require_bounds(prompt_tokens: tuple[int, int]) -> None:
    """Raise unless `prompt_tokens` is (least, most) with 1 <= least <= most."""
    two = isinstance(prompt_tokens, tuple | list) and len(prompt_tokens) == 2
    if not two or any(type(n) is not int for n in prompt_tokens) or not 1 <= prompt_tokens[0] <= prompt_tokens[1]:
        raise ConfigurationError(f"prompt_tokens must be (least, most) with 1 <= least <= most, got {prompt_tokens!r}")


def as_prompt(text: str, conversational: bool) -> Prompt:
    """`text` as it is, or as one user message."""
    return [{"role": "user", "content": text}] if conversational else text


def text_of(prompt: Prompt) -> str:
    """The text of what `as_prompt` made."""
    return prompt if isinstance(prompt, str) else prompt[0]["content"]


def as_dataset(rows: list[dict[str, Any]], conversational: bool) -> Dataset:
    """`rows` as a data set whose prompts may have more than 2 GiB together, where Arrow's plain strings end."""
    from datasets import Dataset, List, Value

    features = Dataset.from_list([rows[0] | {"prompt": as_prompt("", conversational)}]).features
    text = Value("large_string")
    features["prompt"] = List({"role": Value("string"), "content": text}) if conversational else text
    return Dataset.from_list(rows, features=features)


def draw_target(prompt_tokens: tuple[int, int], rng: random.Random) -> int:
    """A length for `fit_prompt`, uniform within the bounds but for their margins."""
    least, most = prompt_tokens
    margin = min(MARGIN_TOKENS, (most - least) // 2)
    return rng.randint(least + margin, most - margin)


def fit_prompt(
    build: Callable[[int, int], Prompt], tokenizer: Any, prompt_tokens: tuple[int, int], target: int
) -> tuple[Prompt, int] | None:
    """A prompt within `prompt_tokens` and its length: `build` with as many filler tokens as bring it near `target`.

    None if no number of them was found. `build(n_filler, n_first)` is told the first number that was tried, so that
    later ones change the filler's end only: cuts elsewhere would move the length again. The whole prompt is tokenised
    once where joints of text cost what they cost alone; every miss costs once more.
    """
    least, most = prompt_tokens
    n_fixed = len(prompt_ids(build(0, 0), tokenizer))
    if n_fixed > most:
        raise InputError(
            f"the prompt needs {n_fixed} tokens before any filler, but prompt_tokens allows {most}; raise it"
        )
    n_first = n_filler = max(0, target - n_fixed)
    tried = set()
    for _ in range(MAX_FITS):
        prompt = build(n_filler, n_first)
        n_tokens = len(prompt_ids(prompt, tokenizer))
        if least <= n_tokens <= most:
            return prompt, n_tokens
        tried.add(n_filler)
        wanted = max(0, n_filler + target - n_tokens)
        near = range(max(0, wanted - MAX_FITS), wanted + MAX_FITS)
        n_filler = min((n for n in near if n not in tried), key=lambda n: abs(n - wanted))
    return None
