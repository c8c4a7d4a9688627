"""Real English prose that ships with Python: the language reference inside `pydoc_data.topics`, split in two."""

from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

HELD_OUT_FRACTION = 0.2

_TO_ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "..."})


@dataclass(frozen=True)
class Prose:
    """Two ASCII texts that share no paragraph, so one character is one byte and one token."""

    train: str
    held_out: str


def _is_prose(paragraph: str) -> bool:
    """Tables and rulers repeat across topics, so they would be shared by the two parts."""
    n_prose = sum(character.isalpha() or character == " " for character in paragraph)
    return "|" not in paragraph and n_prose >= 0.75 * len(paragraph) > 0


@cache
def load_prose() -> Prose:
    """All topics in alphabetical order, every paragraph once, cut at a paragraph into train and held-out.

    Topics quote each other, so the split is by distinct paragraph (whitespace ignored) and not by topic.
    """
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        text = topics[name].translate(_TO_ASCII).encode("ascii", "ignore").decode("ascii")
        for paragraph in text.split("\n\n"):
            key = " ".join(paragraph.split())
            if _is_prose(key):
                paragraphs.setdefault(key, paragraph.strip("\n"))
    ordered = list(paragraphs.values())
    n_train_chars = (1 - HELD_OUT_FRACTION) * sum(len(paragraph) for paragraph in ordered)
    n_chars, cut = 0, 0
    while n_chars < n_train_chars:
        n_chars += len(ordered[cut])
        cut += 1
    return Prose(train="\n\n".join(ordered[:cut]), held_out="\n\n".join(ordered[cut:]))
