r"""Final answers of mathematics: where a completion states one, and whether two are the same by math-verify.

math-verify's own time limit is a signal, which only the main thread may set and which makes a result depend on the
machine. So what is handed to it is bounded first, by length, nesting and the size of the numbers that it would compute,
and the time limit is a second net where it works. What exceeds the bounds is compared as text.
"""

from __future__ import annotations

import math
import re
import threading
from functools import lru_cache
from typing import Any

from ..errors import ConfigurationError

MAX_ANSWER_CHARS = 400
MAX_NESTING = 8  # parsing takes 1 s at 8 levels of parentheses and 11 s at 14 of braces
MAX_NUMBER_BITS = 2**16  # 10^{19000} is computed, 9^{9^9} is not
MAX_SYMBOLIC_BITS = 1600  # simplifying (x+1)^{300} takes 1 s, (x+1)^{1000} 13 s
TIME_LIMIT_SECONDS = 5

_BOX = re.compile(r"\\boxed\s*\{")
_ANSWER_LINE = re.compile(r"\banswer[*_]*[ \t]*:[*_]*[ \t]*(\S[^\n]*)", re.IGNORECASE)
_COMPUTED_BY_PARSER = re.compile(r"binom|choose|gcd|lcm|Gamma")
_BIG_NUMBER = re.compile(r"\d{5}|\^")
_COMMANDS = re.compile(r"\\(?:begin|end|text\w*|mathrm|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{4,}")
_UNBOUNDED = ("Integral", "Sum", "Product", "Limit", "Derivative")


def final_answer(completion: str) -> str | None:
    r"""What the last `\boxed{...}` or `Answer: ...` line states, whichever begins later; None without either.

    A box inside an answer line begins later than it. A last box that is never closed states nothing.
    """
    box = _last(_BOX, completion)
    line = _last(_ANSWER_LINE, completion)
    if box is None and line is None:
        return None
    if line is not None and (box is None or line.start() > box.start()):
        return tidy(line[1])
    assert box is not None
    content = _until_brace_closes(completion, box.end())
    return None if content is None else tidy(content)


def tidy(answer: str) -> str:
    """`answer` without surrounding spaces, dollar signs, emphasis and a final full stop."""
    return answer.strip().strip("*_").rstrip(".").strip("$ \t\r\n").rstrip(".")


@lru_cache(maxsize=2**14)
def answer_fault(answer: str) -> str | None:
    """Why `answer` cannot serve as the right answer of a row, or None."""
    answer = tidy(answer)
    fault = _text_fault(answer)
    if fault is not None:
        return fault
    parsed = _parsed(answer)
    if not parsed:
        return "math-verify finds no mathematics in it"
    word = _word_read_as_letters(answer, parsed[0])
    return None if word is None else f"math-verify reads {word!r} as a product of letters; write \\text{{{word}}}"


def answers_agree(right: str, given: str) -> bool:
    """Whether `given` is `right`, by math-verify (which is not symmetric: `x = 5` answers `5`) or letter by letter."""
    right, given = tidy(right), tidy(given)
    if "".join(right.split()) == "".join(given.split()):
        return True
    if not (_is_bounded(right) and _is_bounded(given)):
        return False
    from math_verify import verify

    return bool(verify(list(_parsed(right)), list(_parsed(given)), timeout_seconds=_time_limit()))


def _text_fault(answer: str) -> str | None:
    """What in the text of `answer` could keep the parser busy for long."""
    if len(answer) > MAX_ANSWER_CHARS:
        return f"it has {len(answer)} characters, at most {MAX_ANSWER_CHARS} are parsed"
    if _nesting(answer) > MAX_NESTING:
        return f"its brackets nest {_nesting(answer)} levels, at most {MAX_NESTING} are parsed"
    if _COMPUTED_BY_PARSER.search(answer) and _BIG_NUMBER.search(answer):
        return "it has a binomial, gcd, lcm or Gamma beside a power or a number above 9999"
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _until_brace_closes(text: str, start: int) -> str | None:
    """`text` from `start` to the brace that closes the one before it; escaped braces do not count."""
    depth, escaped = 1, False
    for i, character in enumerate(text[start : start + 8 * MAX_ANSWER_CHARS]):
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start : start + i]
        escaped = character == "\\" and not escaped
    return None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth -= 1
    return deepest


@lru_cache(maxsize=2**14)
def _parsed(answer: str) -> tuple[Any, ...]:
    """math-verify's reading of `answer` as the content of a box; empty if it has none. Sympy objects are immutable."""
    try:
        from math_verify import LatexExtractionConfig, parse
    except ImportError as error:
        raise ConfigurationError('comparing answers needs math-verify: pip install "longstraw-sdk[math]"') from error
    found = parse(
        f"\\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=_time_limit(),
    )
    return tuple(found)


def _time_limit() -> int | None:
    return TIME_LIMIT_SECONDS if threading.current_thread() is threading.main_thread() else None


def _is_bounded(answer: str) -> bool:
    if _text_fault(answer) is not None:
        return False
    for expression in _parsed(answer):
        limit = MAX_SYMBOLIC_BITS if getattr(expression, "free_symbols", None) else MAX_NUMBER_BITS
        if _bits(expression) > limit:
            return False
    return True


def _bits(expression: Any) -> float:
    """An upper estimate of log2 of the numbers, or of the count of terms, that evaluating `expression` makes."""
    name = type(expression).__name__
    if name in _UNBOUNDED:
        return math.inf
    if getattr(expression, "is_Rational", False):
        return float(abs(expression.p).bit_length() + expression.q.bit_length() - 1)
    parts: list[Any] = list(expression.flat() if hasattr(expression, "flat") else getattr(expression, "args", ()))
    bits = [_bits(part) for part in parts]
    if name == "exp":
        parts, bits = [name, *parts], [2, *bits]
    if name in ("Pow", "MatPow", "factorial", "exp"):
        if bits[-1] > math.log2(MAX_NUMBER_BITS):
            return math.inf
        return bits[0] * _n_terms(parts[0], math.ceil(2.0 ** bits[-1]))
    return 1 + sum(bits) + (not bits and getattr(expression, "is_number", False))


def _n_terms(base: Any, exponent: int) -> int:
    """How many terms `base` to this power expands to; for a number, how often it is multiplied."""
    n_variables = len(getattr(base, "args", ())) if getattr(base, "is_Add", False) and base.free_symbols else 1
    return exponent if n_variables < 2 else math.comb(exponent + n_variables - 1, n_variables - 1)


def _word_read_as_letters(answer: str, expression: Any) -> str | None:
    symbols = {str(symbol).lower() for symbol in getattr(expression, "free_symbols", ())}
    for word in _WORD.findall(_COMMANDS.sub(" ", answer)):
        if set(word.lower()) - set("ei") <= symbols:  # e and i are numbers
            return str(word)
    return None
