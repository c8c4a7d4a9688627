"""What is wrong with rows of mathematics problems: every rejected row with all its reasons, every kept row counted."""

from __future__ import annotations

import hashlib
import statistics
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigurationError, require_at_least
from .answers import answer_fault, answers_agree
from .dapo_math import MathRow, MathRows
from .tokens import Prompt, prompt_ids, require_chat_template

FAULT_KINDS = {
    "schema": "the row has another layout",
    "empty_prompt": "the prompt is empty",
    "empty_answer": "the answer is empty",
    "unparsable_answer": "the answer cannot be compared",
    "too_long": "the prompt has too many tokens",
    "duplicate": "an earlier row has the same prompt and answer",
    "conflicting_answers": "the same prompt has different answers",
}
"""Every reason to reject a row. Only the first of duplicates is kept, and none of a prompt with conflicting answers."""


@dataclass(frozen=True)
class TokenLengths:
    """Prompt lengths in tokens over `n_rows` rows; median and p95 are lengths that occur (nearest rank)."""

    n_rows: int
    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Args:
        n_rows: rows that were audited.
        kept: indices of the rows without a fault, ascending.
        faults: kind of fault -> what exactly -> indices of the rows, ascending. A row may be listed under several.
        prompt_tokens: lengths of all prompts that could be read, of rejected rows too; None without a tokenizer.
        max_prompt_tokens: the limit that was applied, if any.
    """

    n_rows: int
    kept: tuple[int, ...]
    faults: Mapping[str, Mapping[str, tuple[int, ...]]]
    prompt_tokens: TokenLengths | None = None
    max_prompt_tokens: int | None = None

    @property
    def n_kept(self) -> int:
        return len(self.kept)

    @property
    def n_rejected(self) -> int:
        return len(self.reasons())

    def count(self, kind: str) -> int:
        """How many rows have a fault of this kind."""
        return len({row for rows in self.faults.get(kind, {}).values() for row in rows})

    def reasons(self) -> dict[int, list[tuple[str, str]]]:
        """Every rejected row, ascending, with (kind, what exactly) of each of its faults."""
        found: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        for kind in FAULT_KINDS:
            for detail, rows in self.faults.get(kind, {}).items():
                for row in rows:
                    found[row].append((kind, detail))
        return dict(sorted(found.items()))

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON. Kept rows are those that no fault lists."""
        return {
            "n_rows": self.n_rows,
            "n_kept": self.n_kept,
            "n_rejected": self.n_rejected,
            "max_prompt_tokens": self.max_prompt_tokens,
            "prompt_tokens": asdict(self.prompt_tokens) if self.prompt_tokens else None,
            "faults": {
                kind: {
                    "n_rows": self.count(kind),
                    "rows": {detail: list(rows) for detail, rows in self.faults.get(kind, {}).items()},
                }
                for kind in FAULT_KINDS
            },
        }


def audit_rows(
    rows: MathRows | Sequence[Any], tokenizer: Any = None, max_prompt_tokens: int | None = None
) -> AuditReport:
    """Audit rows of `load_math_rows`, or raw rows in any layout that it reads.

    Lengths are those of the ids that TRL makes of the prompt, chat template included. Rows with a fault of their own
    take no part in the search for duplicates.
    """
    if max_prompt_tokens is not None:
        require_at_least("max_prompt_tokens", max_prompt_tokens, 1)
        if tokenizer is None:
            raise ConfigurationError(f"max_prompt_tokens={max_prompt_tokens} needs the model's tokenizer; give one")
    audit = _Audit(tokenizer, max_prompt_tokens)
    n_rows = 0
    for row in rows if isinstance(rows, MathRows) else MathRows(rows):
        audit.add(row)
        n_rows += 1
    return audit.report(n_rows)


class _Audit:
    def __init__(self, tokenizer: Any, max_prompt_tokens: int | None) -> None:
        self._tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._faults: dict[str, defaultdict[str, list[int]]] = {kind: defaultdict(list) for kind in FAULT_KINDS}
        self._rejected: set[int] = set()
        self._rows_of: defaultdict[bytes, dict[str, list[int]]] = defaultdict(dict)  # by prompt, then by answer
        self._length_of: dict[bytes, int | str] = {}
        self._lengths: list[int] = []
        self._rows_of_kind: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, row: MathRow) -> None:
        """Judge `row` by itself and remember what the search for duplicates needs."""
        n_rejected = len(self._rejected)
        for detail in row.faults:
            self._reject(row.row, "schema", detail)
        if row.prompt is not None:
            self._judge_prompt(row.row, row.prompt)
        if row.answer is not None:
            self._judge_answer(row.row, row.answer)
        if len(self._rejected) == n_rejected and row.prompt is not None and row.answer is not None:
            answers = self._rows_of[_key(row.prompt)]
            same = next((known for known in answers if _same(known, row.answer)), row.answer)
            answers.setdefault(same, []).append(row.row)

    def report(self, n_rows: int) -> AuditReport:
        for answers in self._rows_of.values():
            self._judge_repeated(answers)
        for kind, rows in sorted(self._rows_of_kind.items(), key=lambda item: -len(item[1]))[1:]:
            for row in rows:
                self._reject(row, "schema", f"prompt is {kind}, unlike most; TRL takes one kind in a data set")
        kept = tuple(row for row in range(n_rows) if row not in self._rejected)
        faults = {
            kind: {detail: tuple(rows) for detail, rows in found.items()}
            for kind, found in self._faults.items()
            if found
        }
        return AuditReport(n_rows, kept, faults, _summary(self._lengths), self._max_prompt_tokens)

    def _reject(self, row: int, kind: str, detail: str) -> None:
        self._faults[kind][detail].append(row)
        self._rejected.add(row)

    def _judge_prompt(self, row: int, prompt: Prompt) -> None:
        text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt if m["role"] == "user")
        if not text.strip():
            self._reject(row, "empty_prompt", "no text in it")
            return
        self._rows_of_kind["text" if isinstance(prompt, str) else "a list of messages"].append(row)
        if self._tokenizer is not None:
            self._measure(row, prompt)

    def _judge_answer(self, row: int, answer: str) -> None:
        if not answer.strip():
            self._reject(row, "empty_answer", "no text in it")
            return
        fault = answer_fault(answer)
        if fault is not None:
            self._reject(row, "unparsable_answer", f"{_shortened(answer)}: {fault}")

    def _judge_repeated(self, answers: dict[str, list[int]]) -> None:
        rows = sorted(row for found in answers.values() for row in found)
        if len(answers) > 1:
            stated = ", ".join(f"{_shortened(answer)} (row {found[0]})" for answer, found in answers.items())
            for row in rows:
                self._reject(row, "conflicting_answers", f"the answers are {stated}")
            return
        for row in rows[1:]:
            self._reject(row, "duplicate", f"same prompt and answer as row {rows[0]}")

    def _measure(self, row: int, prompt: Prompt) -> None:
        key = _digest(repr(prompt))
        if key not in self._length_of:
            self._length_of[key] = _length(prompt, self._tokenizer)
        length = self._length_of[key]
        if isinstance(length, str):
            self._reject(row, "schema", length)
            return
        self._lengths.append(length)
        if self._max_prompt_tokens is not None and length > self._max_prompt_tokens:
            self._reject(row, "too_long", f"{length} tokens, allowed are {self._max_prompt_tokens}")


def _key(prompt: Prompt) -> bytes:
    """Equal for prompts that differ in white space and Unicode composition only."""
    parts = [prompt] if isinstance(prompt, str) else [f"{m['role']}\x1f{m['content']}" for m in prompt]
    text = "\x1e".join(" ".join(unicodedata.normalize("NFC", part).split()) for part in parts)
    return _digest(text)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _same(one: str, other: str) -> bool:
    return answers_agree(one, other) or answers_agree(other, one)


def _length(prompt: Prompt, tokenizer: Any) -> int | str:
    from jinja2 import TemplateError

    if not isinstance(prompt, str):
        require_chat_template(tokenizer)
    try:
        return len(prompt_ids(prompt, tokenizer))
    except TemplateError as error:
        return f"the chat template refuses the prompt: {error}"


def _summary(lengths: list[int]) -> TokenLengths | None:
    if not lengths:
        return None
    ordered = sorted(lengths)
    p95 = ordered[-(-95 * len(ordered) // 100) - 1]
    return TokenLengths(len(ordered), ordered[0], statistics.median_low(ordered), p95, ordered[-1])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
