"""Most that the layers of a model hold in one pass: a chunk of capture or sweep, or a pack of responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .ledger import Ledger


def capture_peak(layers: Sequence[Ledger]) -> float:
    """A forward without autograd that leaves every layer's new state behind."""
    before = _running([book.produced for book in layers])
    peaks = {book: book.forward_peak(grad=False) for book in set(layers)}
    return max(b + book.x.n_bytes + peaks[book] for b, book in zip(before, layers, strict=True))


def score_peak(layers: Sequence[Ledger], head: float) -> float:
    """The same, whose last hidden state goes through the LM head, which takes `head` beside it."""
    return max(capture_peak(layers), sum(b.produced for b in layers) + layers[-1].y.n_bytes + head)


def replay_peak(
    layers: Sequence[Ledger], head: float, *, checkpointing: bool, arriving: Sequence[float] | None = None
) -> float:
    """Forward and backward of a pack.

    Args:
        head: what the LM head takes beside the last hidden state.
        arriving: bytes per layer that the first backward through it allocates, as accumulators; None if they are there.
    """
    held = [book.x.n_bytes + (book.recalled if checkpointing else book.kept) for book in layers]
    forward = _forward_peak(layers, held, checkpointing=checkpointing)
    at_head = sum(held) + layers[-1].y.n_bytes + head
    backward = _backward_peak(layers, held, 0.0, checkpointing=checkpointing, rows=False, arriving=arriving)
    return max(forward, at_head, backward)


def sweep_peak(layers: Sequence[Ledger], cotangents: float, *, checkpointing: bool) -> float:
    """Forward of a chunk and backward from the rows that it produced, whose gradients take `cotangents`."""
    held = [book.x.n_bytes + (book.recalled if checkpointing else book.kept) for book in layers]
    forward = _forward_peak(layers, held, checkpointing=checkpointing)
    rows = sum(b.produced if checkpointing else b.produced_unkept for b in layers)
    return max(forward, _backward_peak(layers, held, rows + cotangents, checkpointing=checkpointing, rows=True))


def _forward_peak(layers: Sequence[Ledger], held: Sequence[float], *, checkpointing: bool) -> float:
    peaks = {book: book.forward_peak(grad=not checkpointing) for book in set(layers)}
    left = [h + (b.produced if checkpointing else b.produced_unkept) for h, b in zip(held, layers, strict=True)]
    return max(before + book.x.n_bytes + peaks[book] for before, book in zip(_running(left), layers, strict=True))


def _backward_peak(
    layers: Sequence[Ledger],
    held: Sequence[float],
    others: float,
    *,
    checkpointing: bool,
    rows: bool,
    arriving: Sequence[float] | None = None,
) -> float:
    def own_peak(book: Ledger, *, last: bool) -> float:
        found = book.backward_peak(of_output=not last, of_rows=rows)
        if not checkpointing:
            return found
        return max(found, book.forward_peak(grad=True, again=True) + (0.0 if last else book.y.n_bytes))

    peaks = {book: own_peak(book, last=False) for book in set(layers)}
    still = list(accumulate(reversed(arriving)))[::-1] if arriving else [0.0] * len(layers)
    found = [
        before + book.x.n_bytes + peaks[book] + others + arrived
        for before, book, arrived in zip(_running(held), layers, still, strict=True)
    ]
    if rows:  # nothing differentiates the output of the last layer
        found[-1] += own_peak(layers[-1], last=True) - peaks[layers[-1]]
    return max(found)


def _running(sizes: Sequence[float]) -> list[float]:
    """What is there before each."""
    return [0.0, *accumulate(sizes)][: len(sizes)]
