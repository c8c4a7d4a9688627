"""Folders of text files as documents: read once, tokenised once, cut anywhere.

What is read does not depend on the machine: files in the order of their relative paths, UTF-8, line ends as line feeds.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import ConfigurationError, InputError

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 0.2
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Document:
    """A text file. Token t begins at character `starts[t]`; the last entry is the end of the text."""

    name: str
    text: str
    starts: array[int]

    @property
    def n_tokens(self) -> int:
        return len(self.starts) - 1

    def between(self, first: int, last: int) -> str:
        """The text of tokens `first` up to but not including `last`."""
        return self.text[self.starts[first] : self.starts[last]]


@dataclass(frozen=True)
class Piece:
    """Tokens `first` up to but not including `last` of a document."""

    document: Document
    first: int
    last: int

    @property
    def n_tokens(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Corpus:
    """The documents of one split of a folder, in the order of their names, and the tokenizer that measured them."""

    folder: Path
    split: Split | None
    documents: tuple[Document, ...]
    tokenizer: Any

    @property
    def n_tokens(self) -> int:
        return sum(document.n_tokens for document in self.documents)


def read_corpus(
    folder: str | Path, tokenizer: Any, *, suffixes: Sequence[str] | None = None, split: Split | None = None
) -> Corpus:
    """Every text file below `folder`, tokenised with a fast tokenizer.

    Args:
        suffixes: take files that end so, such as `(".txt", ".md")`. None takes every file, and a file that is not UTF-8
            text raises, whichever way it was taken.
        split: "train" or "held_out" for the documents whose relative path falls into that part by its hash (80 to 20),
            so that the two share no document, on any machine, whatever is added later. None takes all.
    """
    if split is not None and split not in get_args(Split):
        raise ConfigurationError(f"split={split!r}; allowed: {', '.join(get_args(Split))} or None")
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(f"{type(tokenizer).__name__} gives no character offsets; use a fast tokenizer")
    paths = document_paths(folder, suffixes)
    names = [name for name in paths if split in (None, split_of(name))]
    if not names:
        raise InputError(f"none of the {len(paths)} files in {folder} falls into split {split!r}; add files")
    documents = tuple(_document(name, paths[name], tokenizer) for name in names)
    return Corpus(Path(folder), split, documents, tokenizer)


def split_of(name: str) -> Split:
    """The split of a document by the hash of its relative path."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "held_out" if share < HELD_OUT_SHARE else "train"


def document_paths(folder: str | Path, suffixes: Sequence[str] | None = None) -> dict[str, Path]:
    """Relative path (with slashes, composed Unicode) -> file, in the order of the former.

    A link inside the folder names a file that is found at its own place, so it adds nothing.
    """
    if isinstance(suffixes, str) or any(not suffix.startswith(".") for suffix in suffixes or ()):
        raise ConfigurationError(f"suffixes={suffixes!r}; allowed: a sequence such as ('.txt', '.md'), or None for all")
    root = Path(folder).expanduser().resolve()
    if not root.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give a folder of text files")
    found: dict[str, Path] = {}
    for path in _files(root):
        if suffixes is None or path.suffix.lower() in {suffix.lower() for suffix in suffixes}:
            name = unicodedata.normalize("NFC", path.relative_to(root).as_posix())
            if name in found:
                raise InputError(f"{found[name]} and {path} have one name in composed Unicode; rename one")
            found[name] = path
    if not found:
        wanted = "" if suffixes is None else f" that ends in {', '.join(suffixes)}"
        raise InputError(f"{root} has no file{wanted}")
    return dict(sorted(found.items()))


def _files(root: Path) -> Iterable[Path]:
    """Regular files below `root`. Links that leave it, and what is neither file nor folder, raise."""
    for parent, folders, files in os.walk(root, onerror=_raise):
        for path in [Path(parent, name) for name in [*folders, *files]]:
            if path.is_symlink():
                if not path.exists() or not path.resolve().is_relative_to(root):
                    raise InputError(f"the link {path} leads out of {root} or nowhere; copy what it should bring in")
            elif path.is_file():
                yield path
            elif not path.is_dir():
                raise InputError(f"{path} is neither a file nor a folder; remove it")


def _raise(error: OSError) -> None:
    raise InputError(f"{error.filename} cannot be listed ({error.strerror})") from error


def _document(name: str, path: Path, tokenizer: Any) -> Document:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); convert it, or choose files with suffixes=") from error
    if "\0" in text:
        raise InputError(f"{path} has NUL characters, so it is not text; remove it, or choose files with suffixes=")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    # Tokens inside one character share its start; the first may begin after white space that belongs to it.
    starts = array("q", accumulate((start for start, _ in encoded["offset_mapping"]), max))
    if starts:
        starts[0] = 0
    starts.append(len(text))
    return Document(name, text, starts)


def n_text_tokens(text: str, tokenizer: Any) -> int:
    """Tokens of `text` alone, without special ones."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
