"""Memory of one layer, operation by operation, without running it.

A ledger lists what a layer's forward computes, as tensors of a size, which of them autograd keeps, and what operators
allocate beside their results. Lifetimes follow: a tensor lives until its last reader, or, kept for the backward, until
the first operation that kept it has been differentiated. What Python still names is a reader too (`hold`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(eq=False)
class Sized:
    """A tensor of `n_bytes`. Views of it are itself."""

    n_bytes: float


@dataclass(frozen=True)
class _Operation:
    """`work` and `back_work` are bytes that forward and backward allocate beside results and gradients; `extra` are
    bytes kept for the backward that are no tensor of the ledger. `passes`: the gradient of the result is that of the
    inputs, the same tensor. `once`: a checkpointed layer that runs again remembers the result."""

    out: Sized | None
    reads: tuple[Sized, ...]
    saves: tuple[Sized, ...]
    extra: float
    work: float
    back_work: float
    passes: bool
    once: bool


class Ledger:
    """One layer from its input `x` to its output, read once it is written. All figures are bytes and leave `x` out."""

    def __init__(self, n_bytes: float):
        self.x = Sized(n_bytes)
        self.y = self.x
        self._operations: list[_Operation] = []
        self._produced: list[Sized] = []
        self._constants: set[Sized] = set()
        self.recalled = 0.0

    def op(
        self,
        n_bytes: float,
        *reads: Sized,
        saves: tuple[Sized, ...] = (),
        extra: float = 0.0,
        work: float = 0.0,
        back_work: float = 0.0,
        passes: bool = False,
        constant: bool = False,
        once: bool = False,
    ) -> Sized:
        """A result of `n_bytes`, computed from `reads`; `constant` if no gradient flows through it."""
        out = Sized(n_bytes)
        self._operations.append(_Operation(out, reads, saves, extra, work, back_work, passes, once))
        if constant:
            self._constants.add(out)
        self.y = out
        return out

    def save(self, tensor: Sized) -> None:
        """The last operation keeps its own result, or another `tensor`, for its backward."""
        self._operations[-1] = replace(self._operations[-1], saves=(*self._operations[-1].saves, tensor))

    def recall(self, *found: float) -> None:
        """A checkpointed layer keeps these bytes from its forward to its backward, so as not to compute them again."""
        self.recalled = sum(found)

    def hold(self, *names: Sized) -> None:
        """`names` are variables of a function that returns here."""
        self._operations.append(_Operation(None, names, (), 0.0, 0.0, 0.0, False, False))

    def produce(self, *rows: Sized) -> None:
        """`rows` become resident state: they live until the chunk is stored."""
        self._produced += rows

    @cached_property
    def kept(self) -> float:
        """What autograd keeps after a forward."""
        tensors = {tensor for op in self._operations for tensor in op.saves} - {self.x}
        return sum(t.n_bytes for t in tensors) + sum(op.extra for op in self._operations)

    @cached_property
    def produced(self) -> float:
        """What a forward leaves behind as new state."""
        return sum(tensor.n_bytes for tensor in self._produced)

    @cached_property
    def produced_unkept(self) -> float:
        """The part of `produced` that autograd does not keep anyhow."""
        saved = {tensor for op in self._operations for tensor in op.saves}
        return sum(tensor.n_bytes for tensor in self._produced if tensor not in saved)

    def forward_peak(self, *, grad: bool, again: bool = False) -> float:
        """Most that lives at once in a forward, the output and what is kept included; `again` before a backward."""
        last = {tensor: i for i, op in enumerate(self._operations) for tensor in op.reads}
        kept = {tensor for op in self._operations for tensor in op.saves} if grad else set()
        stays = kept | {self.x, self.y, *self._produced}
        live, extra, peak = 0.0, 0.0, 0.0
        alive: set[Sized] = set()
        for i, op in enumerate(self._operations):
            if op.out is not None:
                alive.add(op.out)
                live += op.out.n_bytes
            extra += op.extra if grad else 0.0
            peak = max(peak, live + extra + (0.0 if again and op.once else op.work))
            dead = {t for t in alive if last.get(t, i) <= i and t not in stays}
            alive -= dead
            live -= sum(t.n_bytes for t in dead)
        return peak

    def backward_peak(self, *, of_output: bool = True, of_rows: bool = False) -> float:
        """Most that lives at once in a backward, with all that is kept at its start.

        Args:
            of_output: a gradient of the output comes in.
            of_rows: gradients of the produced rows come in, which the caller holds to the end and counts itself.
        """
        first: dict[Sized, int] = {}
        for i, op in enumerate(self._operations):
            for tensor in op.saves:
                first.setdefault(tensor, i)
        kept = self.kept
        gradients = {self.y: _Gradient(self.y.n_bytes)} if of_output else {}
        if of_rows:
            gradients |= {tensor: _Gradient(0.0, owners=2) for tensor in self._produced}
        peak = kept + _live(gradients)
        for i, op in reversed(list(enumerate(self._operations))):
            given = None if op.out is None else gradients.pop(op.out, None)
            if given is not None:
                targets = [t for t in dict.fromkeys(op.reads) if t not in self._constants]
                incoming = [given if op.passes else _Gradient(t.n_bytes) for t in targets]
                peak = max(peak, kept + _live(gradients, given, *incoming) + op.back_work)
                given.owners -= 1
                for target, gradient in zip(targets, incoming, strict=True):
                    known = gradients.get(target)
                    if known is None:
                        gradient.owners += op.passes
                        gradients[target] = gradient
                    elif known.owners > 1:  # somebody else holds it: autograd adds into a new tensor
                        known.owners -= 1
                        gradients[target] = _Gradient(target.n_bytes)
                        peak = max(peak, kept + _live(gradients, known, gradient))
            kept -= op.extra + sum(t.n_bytes for t, begins in first.items() if begins == i and t is not self.x)
        return peak


@dataclass(eq=False)
class _Gradient:
    n_bytes: float
    owners: int = 1


def _live(gradients: dict[Sized, _Gradient], *others: _Gradient) -> float:
    return sum(gradient.n_bytes for gradient in {*gradients.values(), *others})
