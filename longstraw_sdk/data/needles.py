"""Multi-needle recall: facts at uniform places in an excerpt of real documents, some of them asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, InputError, require_at_least
from .documents import SEPARATOR, Corpus, Piece, n_text_tokens
from .tokens import (
    Prompt,
    as_dataset,
    as_prompt,
    draw_target,
    fit_prompt,
    require_bounds,
    require_chat_template,
    text_of,
)

if TYPE_CHECKING:
    from datasets import Dataset

FACT = "\n\n{key}: {value}\n\n"
QUESTION = (
    "\n\nSomewhere above, lines of the form `name: number` were put between the lines of the text. "
    "Which numbers belong to these names: {keys}? Answer with the numbers only, separated by commas.\n"
)
MAX_DRAWS = 20
_FIRST = ("amber", "brisk", "coral", "dusky", "eager", "gentle", "hollow", "ivory", "jolly", "lively", "mellow")
_SECOND = ("anchor", "beacon", "cedar", "dagger", "ember", "falcon", "garnet", "harbor", "island", "kettle", "lantern")


@dataclass(frozen=True)
class NeedleTask:
    """What to hide and what to ask: `n_needles` facts `name: number`, the numbers of `n_asked` of them."""

    n_needles: int = 4
    n_asked: int = 1

    def __post_init__(self) -> None:
        require_at_least("n_needles", self.n_needles, 1)
        require_at_least("n_asked", self.n_asked, 1)
        n_names = len(_FIRST) * len(_SECOND)
        if not self.n_asked <= self.n_needles <= n_names:
            raise ConfigurationError(
                f"n_asked={self.n_asked} and n_needles={self.n_needles}; allowed: n_asked <= n_needles <= {n_names}"
            )


@dataclass(frozen=True)
class Needle:
    """A fact and its place, as a fraction of the excerpt's tokens before it."""

    key: str
    value: str
    place: float


def needle_dataset(
    corpus: Corpus,
    task: NeedleTask | None = None,
    *,
    prompt_tokens: tuple[int, int],
    n_prompts: int,
    seed: int = 0,
    conversational: bool = False,
) -> Dataset:
    """`n_prompts` rows for `needle_recall_reward`; the same arguments give the same rows on every machine.

    Columns: `prompt`, `answer` (the numbers asked for, in order), `keys` (their names), `places` (the fraction of the
    excerpt before each) and `n_prompt_tokens`. An excerpt runs through the documents in an order of its own, from a
    uniform place on; none of its tokens occurs twice.

    Args:
        prompt_tokens: least and most tokens of a whole prompt, counted on the ids that TRL makes of it. Lengths are
            drawn uniformly between them.
        conversational: prompts are one user message, and the chat template counts.
    """
    require_bounds(prompt_tokens)
    require_at_least("n_prompts", n_prompts, 1)
    if conversational:
        require_chat_template(corpus.tokenizer)
    if corpus.n_tokens == 0:
        raise InputError(f"the documents of {corpus.folder} (split {corpus.split}) are empty; add text")
    task = task or NeedleTask()
    n_separator = n_text_tokens(SEPARATOR, corpus.tokenizer)
    rows = []
    for i in range(n_prompts):
        rng = random.Random(f"needles/{corpus.split}/{seed}/{i}")
        draw = partial(_draw, corpus, task, rng, n_separator, conversational)
        rows.append(_row(corpus, draw, prompt_tokens, rng))
    return as_dataset(rows, conversational)


@dataclass(frozen=True)
class _Draw:
    """What chance decides about one prompt, its length excepted: the documents in a ring from token `start` on."""

    corpus: Corpus
    ring: list[Piece]
    needles: list[Needle]
    asked: list[Needle]
    n_separator: int
    conversational: bool

    def prompt(self, n_filler: int, n_first: int) -> Prompt:
        """The prompt with an excerpt that costs `n_filler` tokens, needles placed as in one that costs `n_first`."""
        n_places = sum(piece.n_tokens for piece in self._excerpt(n_first))
        question = QUESTION.format(keys=", ".join(needle.key for needle in self.asked))
        return as_prompt(with_needles(self._excerpt(n_filler), self.needles, n_places) + question, self.conversational)

    def _excerpt(self, n_tokens: int) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self.ring:
            n_left = n_tokens - (self.n_separator if pieces else 0)
            if n_left <= 0:
                return pieces
            if piece.n_tokens:
                taken = min(piece.n_tokens, n_left)
                pieces.append(Piece(piece.document, piece.first, piece.first + taken))
                n_tokens = n_left - taken
        if n_tokens > self.n_separator:
            raise InputError(
                f"{self.corpus.folder} (split {self.corpus.split}) has {self.corpus.n_tokens} tokens, {n_tokens} too "
                "few for one prompt; add documents or lower prompt_tokens"
            )
        return pieces


def _draw(corpus: Corpus, task: NeedleTask, rng: random.Random, n_separator: int, conversational: bool) -> _Draw:
    documents = rng.sample(corpus.documents, len(corpus.documents))
    start, at = rng.randrange(corpus.n_tokens), 0
    while start >= documents[at].n_tokens:
        start -= documents[at].n_tokens
        at += 1
    ring = [Piece(documents[at], start, documents[at].n_tokens)]
    ring += [Piece(document, 0, document.n_tokens) for document in documents[at + 1 :] + documents[:at]]
    ring.append(Piece(documents[at], 0, start))
    needles = _draw_needles(task.n_needles, rng)
    return _Draw(corpus, ring, needles, rng.sample(needles, task.n_asked), n_separator, conversational)


def _row(
    corpus: Corpus, draw: Callable[[], _Draw], prompt_tokens: tuple[int, int], rng: random.Random
) -> dict[str, Any]:
    """One row. All is drawn anew when the excerpt holds one of the names or numbers, or no cut of it fits."""
    for _ in range(MAX_DRAWS):
        target = draw_target(prompt_tokens, rng)
        drawn = draw()
        fit = fit_prompt(drawn.prompt, corpus.tokenizer, prompt_tokens, target)
        if fit is None:
            continue
        prompt, n_tokens = fit
        haystack = text_of(prompt).rpartition(QUESTION.partition("{")[0])[0]
        if all(haystack.count(needle.key) == haystack.count(needle.value) == 1 for needle in drawn.needles):
            return {
                "prompt": prompt,
                "answer": [needle.value for needle in drawn.asked],
                "keys": [needle.key for needle in drawn.asked],
                "places": [needle.place for needle in drawn.asked],
                "n_prompt_tokens": n_tokens,
            }
    raise InputError(
        f"{MAX_DRAWS} excerpts of {corpus.folder} all held a needle's name or number, or could not be cut to "
        f"{prompt_tokens[0]} to {prompt_tokens[1]} tokens; use other text or widen prompt_tokens"
    )


def _draw_needles(n_needles: int, rng: random.Random) -> list[Needle]:
    names = rng.sample([f"{first}-{second}" for first in _FIRST for second in _SECOND], n_needles)
    values = rng.sample(range(1_000_000, 10_000_000), n_needles)
    return [Needle(name, str(value), rng.random()) for name, value in zip(names, values, strict=True)]


def with_needles(pieces: list[Piece], needles: list[Needle], n_places: int) -> str:
    """The text of `pieces` with every needle after the fraction of `n_places` tokens that its place says."""
    waiting = sorted(((int(needle.place * (n_places + 1)), needle) for needle in needles), key=lambda item: item[0])
    parts: list[str] = []
    n_before = 0
    for i, piece in enumerate(pieces):
        if i:
            parts.append(SEPARATOR)
        first = piece.first
        while waiting and waiting[0][0] <= n_before + piece.n_tokens:
            place, needle = waiting.pop(0)
            cut = piece.first + place - n_before
            parts += [piece.document.between(first, cut), FACT.format(key=needle.key, value=needle.value)]
            first = cut
        parts.append(piece.document.between(first, piece.last))
        n_before += piece.n_tokens
    parts += [FACT.format(key=needle.key, value=needle.value) for _, needle in waiting]
    return "".join(parts)
