"""Rows of mathematics problems in the layout of DAPO-Math-17k and its variants, read as they are.

A row of the published set is `{"data_source", "prompt": [{"role", "content"}], "ability", "reward_model":
{"ground_truth", "style"}, "extra_info": {"index"}}`, and the set repeats each of its 17 thousand problems about a
hundred times. Variants have `prompt` as text and the answer in `answer` or `solution`. Rows that fit neither stay in
the sequence and say what is wrong with them; `audit_rows` counts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .answers import final_answer
from .jsonl import BadLine, read_jsonl, strict_json
from .tokens import Prompt

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_READERS = (".parquet", ".jsonl", ".json")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class MathRow:
    """One problem. `row` is its index in the source; `faults` say what in the row's layout is not known."""

    row: int
    prompt: Prompt | None
    answer: str | None
    faults: tuple[str, ...] = ()


class MathRows(Sequence[MathRow]):
    """The rows of `raw` (mappings, `BadLine` objects or a `datasets.Dataset`), each a `MathRow` as it is read."""

    def __init__(self, raw: Sequence[Any]) -> None:
        self._raw = raw

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return math_row(self._raw[row], row)

    def __iter__(self) -> Iterator[MathRow]:
        for row, raw in enumerate(self._raw):
            yield math_row(raw, row)


def load_math_rows(source: str | Path, split: str = "train") -> MathRows:
    """The rows of a parquet, JSONL or JSON file, of a folder of `datasets.save_to_disk`, or of a hub data set.

    What exists on this machine comes first; the hub is asked only for `owner/name`. `split` picks one of several splits
    of a folder or hub data set.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return MathRows(_saved(path, split))
    if path.is_file():
        return MathRows(_file(path))
    if not _HUB_ID.fullmatch(str(source)) or path.suffix.lower() in _READERS:
        raise InputError(
            f"{str(source)!r} does not exist; give a {', '.join(_READERS)} file, a folder of datasets.save_to_disk, or "
            "a hub data set as owner/name"
        )
    import datasets

    try:
        found = datasets.load_dataset(str(source))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{str(source)!r} does not exist here, nor does the hub serve it ({type(error).__name__}: {error})"
        ) from error
    return MathRows(_one_split(found, split, str(source)))


def _saved(folder: Path, split: str) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} is not a folder of datasets.save_to_disk ({error}); to audit a file inside it give that file"
        ) from error
    return _one_split(found, split, str(folder))


def _one_split(found: Any, split: str, source: str) -> Any:
    if not isinstance(found, Mapping):
        return found
    if split not in found:
        raise InputError(f"{source!r} has no split {split!r}; it has {', '.join(found)}")
    return found[split]


def _file(path: Path) -> Sequence[Any]:
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    if path.suffix.lower() == ".jsonl":
        return [value for _, value in read_jsonl(path)]
    if path.suffix.lower() == ".json":
        try:
            rows = strict_json(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON ({error}); one object a line is read from a .jsonl file") from error
        if not isinstance(rows, list):
            raise InputError(f"{path} holds {_kind(rows)}; a .json file must hold a list of rows")
        return rows
    raise InputError(f"{path} has the suffix {path.suffix!r}; allowed: {', '.join(_READERS)}")


def _parquet(path: Path) -> Sequence[Any]:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table: Sequence[Any] = datasets.Dataset(pq.read_table(path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read as parquet ({type(error).__name__}: {error})") from error
    return table


def math_row(raw: Any, row: int) -> MathRow:
    """`raw` as prompt and answer, or what keeps it from having them."""
    if isinstance(raw, BadLine):
        return MathRow(row, None, None, (raw.detail,))
    if not isinstance(raw, Mapping):
        return MathRow(row, None, None, (f"the row is {_kind(raw)}, not an object with prompt and answer",))
    prompt, prompt_fault = _prompt(raw)
    answer, answer_fault = _answer(raw)
    faults = tuple(fault for fault in (prompt_fault, answer_fault) if fault is not None)
    return MathRow(row, prompt, answer, faults)


def _prompt(raw: Mapping[str, Any]) -> tuple[Prompt | None, str | None]:
    if "prompt" not in raw:
        return None, f"no field prompt; the row has {_fields(raw)}"
    prompt = raw["prompt"]
    if prompt is None:
        return "", None
    if isinstance(prompt, str):
        return (prompt, None) if _is_unicode(prompt) else (None, "prompt has half of a surrogate pair")
    if not isinstance(prompt, list):
        return None, f"prompt is {_kind(prompt)}, not text or a list of messages"
    messages = []
    for i, message in enumerate(prompt):
        fault = _message_fault(message)
        if fault is not None:
            return None, f"prompt[{i}] {fault}"
        messages.append({"role": message["role"], "content": message["content"]})
    if messages and messages[-1]["role"] != "user":
        return None, f"the last message of prompt is the {messages[-1]['role']}'s, not the user's"
    return messages, None


def _message_fault(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f"is {_kind(message)}, not a message with role and content"
    for field in ("role", "content"):
        if not isinstance(message.get(field), str):
            return f"has {_kind(message.get(field))} as {field}, not text"
    if message["role"] not in _ROLES:
        return f"has the role {message['role']!r}; known: {', '.join(_ROLES)}"
    extra = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
    if extra:
        return f"has the field {extra[0]!r} beside role and content"
    return None if _is_unicode(message["content"]) else "has half of a surrogate pair"


def _answer(raw: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The answer from `reward_model.ground_truth`, `answer` or `solution`, the first that is there and not null."""
    judge = raw.get("reward_model")
    if judge is not None and not isinstance(judge, Mapping):
        return None, f"reward_model is {_kind(judge)}, not an object with ground_truth"
    found = {"reward_model.ground_truth": judge["ground_truth"]} if judge and "ground_truth" in judge else {}
    found |= {field: raw[field] for field in ("answer", "solution") if field in raw}
    if not found:
        return (
            None,
            f"no reward_model.ground_truth, answer or solution; the row has {_fields(raw)}",
        )
    texts: dict[str, str] = {}
    for field, value in found.items():
        text = _answer_text(value)
        if text is None:
            return None, f"{field} is {_kind(value)}, not text or a finite number"
        if not _is_unicode(text):
            return None, f"{field} has half of a surrogate pair"
        if value is not None:
            texts[field] = text
    stated = {texts[field] for field in texts if field != "solution"}  # a solution may be worked out at length
    if len(stated) > 1:
        return None, f"reward_model.ground_truth and answer differ: {sorted(stated)}"
    return next(iter(texts.values()), ""), None


def _answer_text(value: Any) -> str | None:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if not isinstance(value, str):
        return str(value) if math.isfinite(value) else None
    stated = final_answer(value) if r"\boxed" in value else None
    return (stated if stated is not None else value).strip()


def _fields(raw: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, raw)) or "none"


def _is_unicode(text: str) -> bool:
    """Lone surrogates come from JSON escapes and can be neither tokenised nor written."""
    return _SURROGATE.search(text) is None


def _kind(value: Any) -> str:
    names = {type(None): "null", str: "text", int: "a number", float: "a number", bool: "a truth value", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}")
