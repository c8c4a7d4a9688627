"""The needle task: a Greek letter hidden once in thousands of bytes of prose, asked for at the end of the prompt.

Greek, because the prose is ASCII: finding the letter then needs no matching of phrases, which would take a tiny model
far longer to learn than the demo lasts. A letter is two bytes, so two tokens; all fifteen begin with the same one.
"""

import random
from dataclasses import dataclass
from typing import Any, Literal

from datasets import Dataset

from longstraw_sdk.demo.text import load_prose

FACT = "\n\nThe magic letter is {answer}.\n\n"
CUE = "\n\nThe magic letter is "
ANSWERS = "αβγδεζηθ"

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Needle:
    """One prompt and the only completion that is right (one letter, then end of sequence)."""

    prompt: str
    answer: str


def make_needle(text: str, n_tokens: int, rng: random.Random) -> Needle:
    """A prompt of exactly `n_tokens` byte tokens: an excerpt of `text`, the fact at a uniform place, the cue."""
    answer = rng.choice(ANSWERS)
    fact = FACT.format(answer=answer)
    n_prose = n_tokens - len(fact.encode()) - len(CUE)
    if not 0 <= n_prose < len(text):
        raise ValueError(f"n_tokens={n_tokens} leaves {n_prose} characters of prose; allowed: 0 to {len(text) - 1}")
    start = rng.randrange(len(text) - n_prose)
    prose = text[start : start + n_prose]
    place = rng.randrange(n_prose + 1)
    return Needle(prompt=prose[:place] + fact + prose[place:] + CUE, answer=answer)


def needle_dataset(
    split: Split, n_prompts: int, seed: int = 0, n_tokens_min: int = 4000, n_tokens_max: int = 4400
) -> Dataset:
    """`n_prompts` rows with columns `prompt` and `answer`; the two splits share no paragraph of prose.

    The same arguments give the same rows on every machine.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split={split!r}; allowed: 'train', 'held_out'")
    rng = random.Random(f"{split}/{seed}")
    text = getattr(load_prose(), split)
    needles = [make_needle(text, rng.randint(n_tokens_min, n_tokens_max), rng) for _ in range(n_prompts)]
    return Dataset.from_dict(
        {"prompt": [needle.prompt for needle in needles], "answer": [needle.answer for needle in needles]}
    )


def needle_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """TRL reward function: 1.0 where the completion is the answer and nothing else, otherwise 0.0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
