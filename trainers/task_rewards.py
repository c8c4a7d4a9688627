r"""Reward functions for mathematics with checkable answers and for long-context tasks, in TRL's signature.

They read the data set's `answer` column, take completions as text or as conversations, and can stand beside any other:

    reward_funcs=[dapo_math_reward, get_soft_overlong_punishment(max_completion_len=20480, soft_punish_cache=4096)]

is DAPO's reward (arXiv 2503.14476): +1 or -1 for the answer, plus TRL's linear penalty on the last `soft_punish_cache`
tokens.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from longstraw_sdk.data.answers import answer_fault, answers_agree, final_answer
from longstraw_sdk.errors import InputError

Completion = str | list[dict[str, Any]]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def dapo_math_reward(completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float]:
    r"""+1.0 where the completion's final answer is the right one by math-verify, otherwise -1.0.

    The final answer is the last `\boxed{...}` or `Answer: ...` line, whichever comes later. A completion without one,
    or with one that cannot be read, gets -1.0; a right answer that cannot be read raises, because every reward of its
    group would be wrong.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        fault = answer_fault(right) if isinstance(right, str) else "it is not text"
        if fault is not None:
            raise InputError(
                f"the right answer {right!r} cannot be compared: {fault}; audit the data set (`longstraw audit`) and "
                "train on the cleaned copy"
            )
        given = final_answer(_text(completion))
        rewards.append(1.0 if given is not None and answers_agree(right, given) else -1.0)
    return rewards


def needle_recall_reward(completions: list[Completion], answer: list[list[str]], **kwargs: Any) -> list[float]:
    """The fraction of the values asked for that the completion names, each as a word of its own.

    What else it names costs nothing, so leave it little room: `max_completion_length` a few tokens above the answer's.
    """
    rewards = []
    for completion, asked in zip(completions, answer, strict=True):
        text = _text(completion)
        values = _answers(asked)
        found = sum(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None for value in values)
        rewards.append(found / len(values))
    return rewards


def document_answer_reward(completions: list[Completion], answer: list[list[str]], **kwargs: Any) -> list[float]:
    """The best F1 of words between the completion and any right answer; 1.0 where they are the same.

    As SQuAD scores answers (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, without ASCII punctuation and English
    articles. The whole completion is compared, so what surrounds the answer lowers the reward.
    """
    return [
        max(_word_f1(_text(completion), right) for right in _answers(rights))
        for completion, rights in zip(completions, answer, strict=True)
    ]


def _word_f1(given: str, right: str) -> float:
    given_words, right_words = _words(given), _words(right)
    if not given_words or not right_words:
        return float(given_words == right_words)
    n_common = sum((Counter(given_words) & Counter(right_words)).values())
    return 2 * n_common / (len(given_words) + len(right_words))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _answers(found: Any) -> list[str]:
    answers = [found] if isinstance(found, str) else found
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(f"the answer column has {found!r}; allowed: text or a list of texts, none of them empty")
    return answers


def _text(completion: Completion) -> str:
    """The completion's text; of a conversation, that of its last message (its answer, after tools)."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""
