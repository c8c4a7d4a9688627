"""Questions about a document that lies whole among others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .documents import Corpus, Document, document_paths, n_text_tokens
from .jsonl import BadLine, read_jsonl
from .tokens import (
    MARGIN_TOKENS,
    Prompt,
    as_dataset,
    as_prompt,
    draw_target,
    fit_prompt,
    require_bounds,
    require_chat_template,
)

if TYPE_CHECKING:
    from datasets import Dataset

HEADING = "Document: {name}\n\n"
END = "\n\n"
QUESTION = "Question: {question}\nAnswer in as few words as possible.\n"


@dataclass(frozen=True)
class Question:
    """A question about the document of this relative path, and every answer that is right."""

    document: str
    question: str
    answers: tuple[str, ...]


def document_qa_dataset(
    corpus: Corpus,
    questions: str | Path,
    *,
    prompt_tokens: tuple[int, int],
    seed: int = 0,
    conversational: bool = False,
) -> Dataset:
    """A row for `document_answer_reward` per question of the JSONL file `questions` whose document is in `corpus`.

    A line is `{"document": relative path, "question": text, "answer": text or list of texts}`. A prompt holds the whole
    document and others in random order, the last of which is cut, then the question. Questions about documents of the
    other split are left to it; documents that the folder does not have, or that are too long to be shown whole, raise.

    Columns: `prompt`, `answer` (a list), `document`, `question` and `n_prompt_tokens`.

    Args:
        prompt_tokens: least and most tokens of a whole prompt, counted on the ids that TRL makes of it.
        conversational: prompts are one user message, and the chat template counts.
    """
    require_bounds(prompt_tokens)
    if conversational:
        require_chat_template(corpus.tokenizer)
    documents = {document.name: document for document in corpus.documents}
    costs = {name: n_text_tokens(HEADING.format(name=name) + END, corpus.tokenizer) for name in documents}
    rows = []
    for i, question in enumerate(read_questions(questions, corpus)):
        rng = random.Random(f"questions/{corpus.split}/{seed}/{i}")
        others = [document for document in corpus.documents if document.name != question.document]
        rng.shuffle(others)
        among = _Among(documents[question.document], others, costs, rng.random())
        rows.append(_row(among, question, corpus, prompt_tokens, conversational, rng))
    return as_dataset(rows, conversational)


def read_questions(path: str | Path, corpus: Corpus) -> list[Question]:
    """The questions about documents of `corpus`, in the order of the file."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{str(path)!r} is not a file; give JSON Lines of document, question and answer")
    here = {document.name for document in corpus.documents}
    known: set[str] | None = None
    found = []
    for number, value in read_jsonl(path):
        question = _question(value, f"{path}, line {number}")
        if question.document in here:
            found.append(question)
            continue
        known = known if known is not None else set(document_paths(corpus.folder))
        if corpus.split is None or question.document not in known:
            raise InputError(
                f"{path}, line {number}: the document {question.document!r} is not in {corpus.folder}; write its path "
                "below that folder, with slashes, and read the folder with suffixes that take it"
            )
    if not found:
        raise InputError(f"{path} has no question about the {len(here)} documents of split {corpus.split}; add some")
    return found


def _question(value: Any, where: str) -> Question:
    if isinstance(value, BadLine):
        raise InputError(f"{where}: {value.detail}")
    fields = value if isinstance(value, dict) else {}
    for field in ("document", "question"):
        if not isinstance(fields.get(field), str) or not fields[field].strip():
            raise InputError(f"{where}: {field} must be text, got {fields.get(field)!r}")
    answers = fields.get("answer")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(f"{where}: answer must be text or a list of texts, got {fields.get('answer')!r}")
    return Question(fields["document"], fields["question"], tuple(answers))


@dataclass(frozen=True)
class _Among:
    """A document among `others` (in this order), before the fraction `place` of those that are shown."""

    document: Document
    others: Sequence[Document]
    costs: dict[str, int]
    place: float

    def text(self, n_filler: int) -> str:
        """The whole document and as many others, the last one cut, as cost `n_filler` tokens."""
        shown: list[str] = []
        for other in self.others:
            n_tokens = min(other.n_tokens, n_filler - self.costs[other.name])
            if n_tokens <= 0 < other.n_tokens:
                break
            shown.append(HEADING.format(name=other.name) + other.between(0, max(0, n_tokens)) + END)
            n_filler -= n_tokens + self.costs[other.name]
        else:
            if n_filler > MARGIN_TOKENS:
                raise InputError(f"{n_filler} tokens are too few in all documents; add some or lower prompt_tokens")
        whole = HEADING.format(name=self.document.name) + self.document.text + END
        shown.insert(int(self.place * (len(shown) + 1)), whole)
        return "".join(shown)


def _row(
    among: _Among,
    question: Question,
    corpus: Corpus,
    prompt_tokens: tuple[int, int],
    conversational: bool,
    rng: random.Random,
) -> dict[str, Any]:
    least, most = prompt_tokens
    available = sum(document.n_tokens + among.costs[document.name] for document in corpus.documents)

    def build(n_filler: int, _: int) -> Prompt:
        return as_prompt(among.text(n_filler) + QUESTION.format(question=question.question), conversational)

    try:
        fit = fit_prompt(build, corpus.tokenizer, prompt_tokens, draw_target(prompt_tokens, rng))
        if fit is None:
            raise InputError("no cut of the last document gives such a length; widen prompt_tokens")
    except InputError as error:
        raise InputError(
            f"the question about {question.document!r} ({among.document.n_tokens} tokens; all documents with headings "
            f"have {available}) cannot be asked in {least} to {most} tokens: {error}"
        ) from error
    prompt, n_tokens = fit
    return {
        "prompt": prompt,
        "answer": list(question.answers),
        "document": question.document,
        "question": question.question,
        "n_prompt_tokens": n_tokens,
    }
