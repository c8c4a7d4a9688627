"""The decision tape: which experts and which tokens were chosen, so that every pass over a token chooses the same.

Rounding flips such choices (bfloat16, another chunk size, another kernel), and one flip can change a gradient more than
all rounding together. The tape remembers the choice made for a token and gives it to later passes. A choice belongs to
a token and everything before it, so it is keyed by a hash chained over the token ids: capture, sampling, scoring,
replay, sweep and a conventional forward of the whole sequence find the same entry.

Router weights are always recomputed from the current logits at the remembered experts, which keeps their gradient (as
in rollout routing replay, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer, GlmMoeDsaTopkRouter

from longstraw_sdk.adapter import StateView
from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.hf.swap import swap_classes
from longstraw_sdk.ops import NOT_SELECTED
from longstraw_sdk.state import ContextGroup, ResidentState, TokenSlice
from longstraw_sdk.types import CausalLM

TapeMode = Literal["off", "record", "replay"]
_MODES = ("off", "record", "replay")
_NO_ENTRY = -2
_PADDING = -1  # no token has this id
_EMPTY = 0
"""The chain key of no tokens."""


def chain_keys(start: int, ids: Sequence[int]) -> list[int]:
    """64-bit key of each token: of its id and the key before it. The chance of any collision in 2M tokens is 1e-7."""
    keys = []
    for token in ids:
        start = hash((start, token))
        keys.append(start)
    return keys


class DecisionTape:
    """Remembered choices.

    Args:
        mode: "off" remembers nothing. "record" lets every pass choose for itself and remembers its choice. "replay"
            gives every pass the choice that is remembered, and remembers where there is none yet.
    """

    def __init__(self, mode: TapeMode = "off"):
        if mode not in _MODES:
            raise ConfigurationError(f"tape={mode!r} is not known; allowed: {', '.join(map(repr, _MODES))}")
        self.mode: TapeMode = mode
        self.current: TapePass | None = None
        """The pass whose layers run now. The attention of each layer sets it, so that recomputing a layer does too."""
        self.stock_pass: TapePass | None = None
        """The pass of stock forwards on a bound model, inside of `reference`."""
        self._prefix_keys: WeakKeyDictionary[ResidentState, list[int]] = WeakKeyDictionary()
        self.clear()

    def clear(self) -> None:
        """Forget all choices and counts."""
        self._slots: dict[int, int] = {}
        self._tables: dict[str, torch.Tensor] = {}
        self._seen: dict[str, int] = {}
        self._flipped: dict[str, int] = {}

    @property
    def n_tokens(self) -> int:
        """Tokens with a remembered choice."""
        return len(self._slots)

    @property
    def n_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    def flip_rates(self) -> dict[str, float]:
        """Per kind of choice ("experts", "selection"), the share of tokens and layers whose own choice differed."""
        return {kind: self._flipped[kind] / seen for kind, seen in self._seen.items()}

    def open_pass(self, start_keys: Sequence[int], input_ids: torch.Tensor, part: TokenSlice | None = None) -> TapePass:
        """A pass over `input_ids` [B, T], whose row b continues a sequence with key `start_keys[b]`.

        Only the layers' choices for `part` are asked for; its padding is a text of its own, which nobody looks up.
        """
        rows = [chain_keys(start, ids) for start, ids in zip(start_keys, input_ids.tolist(), strict=True)]
        ends = [row[-1] for row in rows]
        if part is not None:
            stop, padding = part.start + part.n_real, [_PADDING] * (part.width - part.n_real)
            rows = [row[part.start : stop] + chain_keys(end, padding) for row, end in zip(rows, ends, strict=True)]
        slots = [[self._slots.setdefault(key, len(self._slots)) for key in row] for row in rows]
        return TapePass(self, torch.tensor(slots), ends)

    def prefix_key(self, view: StateView) -> int:
        """Chain key of the prefix that `view` shows."""
        if view.n_tokens == 0:
            return _EMPTY
        state = view.state
        if state not in self._prefix_keys:
            self._prefix_keys[state] = chain_keys(_EMPTY, state.prefix_ids.tolist())
        return self._prefix_keys[state][view.n_tokens - 1]

    def decide(self, kind: str, layer: int, slots: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """What a pass takes [B, T, K], given that it would choose `own` [B, T, K or fewer]."""
        table = self._table(f"{kind}/{layer}", own.shape[-1])
        mine = _padded(own.cpu().int(), table.shape[-1])
        known = table[slots]
        missing = known[..., -1:] == _NO_ENTRY
        differs = (known.sort(-1).values != mine.sort(-1).values).any(-1, keepdim=True) & ~missing
        self._seen[kind] = self._seen.get(kind, 0) + int((~missing).sum())
        self._flipped[kind] = self._flipped.get(kind, 0) + int(differs.sum())
        table[slots] = torch.where(missing, mine, known) if self.mode == "replay" else mine
        # Read back: rows with equal tokens share an entry.
        return own if self.mode == "record" else table[slots].to(own.device, own.dtype)

    @contextmanager
    def reference(self, model: CausalLM, ids: torch.Tensor) -> Iterator[None]:
        """Let stock forwards of `model` take part: over `ids` [T] from the start, or behind a stock cache of the front.

        Args:
            model: the causal LM, bound or not; its own attention decides nothing new, it is run as it is.
        """
        restore = swap_deciders(model, self)

        def open_pass(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("cache")
            before = 0 if cache is None else cache.get_seq_length()
            start = chain_keys(_EMPTY, ids[:before].tolist())[-1] if before else _EMPTY
            self.current = self.stock_pass = self.open_pass([start], kwargs["input_ids"])

        hook = model.base_model.register_forward_pre_hook(open_pass, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            restore()
            self.current = self.stock_pass = None

    def share(self, context: ContextGroup) -> None:
        """Give every rank the choices of all: each remembers only those of the tokens that it ran."""
        mine = (list(self._slots), {name: table[: len(self._slots)] for name, table in self._tables.items()})
        for keys, tables in context.gather_objects(mine):
            slots = torch.tensor([self._slots.setdefault(key, len(self._slots)) for key in keys], dtype=torch.long)
            for name, theirs in tables.items():
                table = self._table(name, theirs.shape[-1])
                known = table[slots[: len(theirs)]]
                missing = known[..., -1:] == _NO_ENTRY
                table[slots[: len(theirs)]] = torch.where(missing, _padded(theirs, table.shape[-1]), known)

    def _table(self, name: str, width: int) -> torch.Tensor:
        """int32 [capacity, width], grown to hold every slot; it never gets narrower."""
        table = self._tables.get(name)
        if table is None:
            table = torch.full((len(self._slots), width), _NO_ENTRY, dtype=torch.int32)
        if len(table) < len(self._slots):
            added = max(len(self._slots) - len(table), len(table))  # doubled, so that growing costs O(1) per token
            table = nn.functional.pad(table, (0, 0, 0, added), value=_NO_ENTRY)
        if table.shape[1] < width:
            table = torch.where(table[:, -1:] == _NO_ENTRY, _NO_ENTRY, _padded(table, width))
        self._tables[name] = table
        return table


class TapePass:
    """One forward over tokens that the tape knows by slot."""

    def __init__(self, tape: DecisionTape, slots: torch.Tensor, end_keys: list[int]):
        self.tape = tape
        self.slots = slots  # LongTensor [B, T]
        self.end_keys = end_keys

    def decide(self, kind: str, layer: int, own: torch.Tensor) -> torch.Tensor:
        return self.tape.decide(kind, layer, self.slots, own)


def _padded(choice: torch.Tensor, width: int) -> torch.Tensor:
    """Absent entries go to the front, where selections have them."""
    return nn.functional.pad(choice, (width - choice.shape[-1], 0), value=NOT_SELECTED)


class TapedRouter(GlmMoeDsaTopkRouter):
    """`GlmMoeDsaTopkRouter` that asks the tape of the pass which experts to take."""

    tape: DecisionTape
    layer: int

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, own = super().forward(hidden_states)
        if self.tape.current is None:
            return logits, weights, own
        slots = self.tape.current.slots
        taken = self.tape.current.decide("experts", self.layer, own.view(*slots.shape, -1)).reshape_as(own)
        if torch.equal(taken, own):
            return logits, weights, own
        weights = logits.sigmoid().gather(1, taken)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, taken


class TapedIndexer(GlmMoeDsaIndexer):
    """`GlmMoeDsaIndexer` of the stock attention that asks the tape which tokens to select."""

    tape: DecisionTape

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = super().forward(*args, **kwargs)
        if self.tape.current is None:
            return own
        positions: torch.Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[4]
        # The stock indexer fills up with tokens that lie behind the query, which the causal mask then hides.
        visible = torch.where(own <= positions[..., None], own, NOT_SELECTED).sort(-1).values
        taken = self.tape.current.decide("selection", self.layer_idx, visible)
        # Where tokens are absent every visible one is selected, the first one too, so naming it again changes nothing.
        return taken.clamp(min=0).to(own.dtype)


def swap_deciders(model: CausalLM, tape: DecisionTape) -> Callable[[], None]:
    """Let routers and stock indexers of `model` ask `tape`; returns the function that puts the stock classes back."""
    swaps: list[tuple[Any, type, dict[str, Any]]] = []
    for layer, decoder in enumerate(model.base_model.layers):
        for module in decoder.modules():
            if type(module) is GlmMoeDsaTopkRouter:
                swaps.append((module, TapedRouter, {"tape": tape, "layer": layer}))
            elif type(module) is GlmMoeDsaIndexer:
                swaps.append((module, TapedIndexer, {"tape": tape}))
    return swap_classes(swaps)
