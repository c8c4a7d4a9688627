"""transformers `Cache` classes that show a resident state to one forward, or to one generation.

`ResidentCache` is functional: an update returns only the new rows, remembers them as `produced` and writes nothing, so
checkpoint recompute may call it again. In a generation its layers also keep what each row decoded so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from ..adapter import StateView
from ..errors import UnsupportedModelError
from ..ops import Recall
from ..state import StateKey, TokenSlice
from .attention import RESIDENT_KWARG, ResidentRows


class ResidentLayer(Protocol):
    """A cache layer of `ResidentCache`."""

    produced: dict[StateKey, dict[str, torch.Tensor]]
    """What the forward computed of every state kind of this layer."""

    sealed: bool
    """Set when `produced` was taken: from then on updates leave it alone."""


class PagedCacheLayer(CacheLayerMixin):
    """A layer whose prefix lies on pages. `keep_rows` is for generation: what rows decode is kept per row."""

    is_sliding = False
    supports_early_init = False
    is_croppable = False

    def __init__(self, *, keep_rows: bool):
        super().__init__()
        self.keep_rows = keep_rows
        self.produced: dict[StateKey, dict[str, torch.Tensor]] = {}
        self.sealed = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class FixedRows(NamedTuple):
    """Memory for `limit` rows that each row of a generation may decode, of which `done` [1] are there."""

    limit: int
    done: torch.Tensor


class KVLayer(PagedCacheLayer):
    """One attention layer over resident pages of keys and values; `output_unused` as in `ResidentRows`."""

    fixed: FixedRows | None = None
    """Set where a generation decodes in memory of a fixed size; whoever runs the steps counts `n_decoded`."""
    n_decoded = 0

    def __init__(self, view: StateView, layer: int, *, keep_rows: bool, output_unused: bool):
        super().__init__(keep_rows=keep_rows)
        self.key: StateKey = (layer, "kv")
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.pages = view.paged(self.key, split=not keep_rows)
        self.resident = ResidentRows(self.pages, Recall(), output_unused)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs = options.get("kwargs")
        if kwargs is None:
            raise UnsupportedModelError(
                "the attention layer calls cache.update without `kwargs=`, so its pages cannot reach the attention "
                "function; this architecture needs an adapter of its own"
            )
        kwargs[RESIDENT_KWARG] = self.resident
        if not self.sealed:
            self.produced = {self.key: {"k": key_states, "v": value_states}}
        if not self.keep_rows:
            return key_states, value_states
        if self.fixed is not None:
            kwargs[RESIDENT_KWARG] = self.resident._replace(last=self.fixed.done)
            return self._write(self.fixed, key_states, value_states)
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], 2)
            value_states = torch.cat([self.values, value_states], 2)
        self.keys, self.values, self.n_decoded = key_states, value_states, key_states.shape[2]
        return key_states, value_states

    def _write(
        self, fixed: FixedRows, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.values is None:
            self.keys, self.values = (
                new.new_zeros(*new.shape[:2], fixed.limit, new.shape[3]) for new in (key_states, value_states)
            )
        self.keys.index_copy_(2, fixed.done, key_states)
        self.values.index_copy_(2, fixed.done, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.pages.first_new + self.n_decoded


class RecurrentLayer(LinearAttentionLayer):
    """One linear-attention layer that starts from a boundary state.

    `record_past` makes the model take the functional convolution path for one-token forwards too; the stock path
    writes into the state it was given.
    """

    in_place = False
    """Write a new state where the one before it is, which must then be this generation's own."""

    def __init__(self, view: StateView, layer: int, *, keep_rows: bool):
        super().__init__(number_of_states=1)
        self.key: StateKey = (layer, "recurrent")
        self.record_past = True
        self.keep_rows = keep_rows
        self.context = None if keep_rows else view.state.context
        self.slice_of = view.state.slice_of
        self.produced: dict[StateKey, dict[str, torch.Tensor]] = {self.key: {}}
        self.sealed = False
        recurrent = view.state.recurrent[self.key]
        state = recurrent.leaves(view.boundary) if view.accumulate else recurrent.at(view.boundary)
        if state is not None and view.n_rows > 1:
            state = {n: t.expand(view.n_rows, *t.shape[1:]).contiguous() for n, t in state.items()}
        self._start_from(state)

    def _start_from(self, state: dict[str, torch.Tensor] | None) -> None:
        known = state is not None
        self.has_previous_state[0] = known
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = known
        self.conv_states[0] = state.get("conv") if state is not None else None
        self.recurrent_states[0] = state["recurrent"] if state is not None else None

    def tail_of(self, columns: torch.Tensor, size: int) -> torch.Tensor:
        """The columns [B, C, size] before the forward whose own are `columns`; zeros at the start of a text."""
        tail: torch.Tensor | None = self.conv_states[0]
        return columns.new_zeros(*columns.shape[:-1], size) if tail is None else tail

    def state_of(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """The recurrent state before the forward; zeros of `shape` at the start of a text."""
        state: torch.Tensor | None = self.recurrent_states[0]
        return like.new_zeros(shape) if state is None else state

    def produce(self, **states: torch.Tensor) -> None:
        """What a layer that updates no cache left behind."""
        if not self.sealed:
            self.produced[self.key] = states

    def _require_whole(self) -> None:
        """The stock forward, which calls the updates, knows nothing of the slices before its own."""
        if self.context is not None:
            raise UnsupportedModelError(
                f"the linear-attention layer {self.key[0]} ran its stock forward on one rank's slice of the tokens: "
                "something replaced `forward` on the instance, as accelerate's hooks do (device_map=...). Load the "
                "model without a device_map, or take the hooks off: accelerate.hooks.remove_hook_from_submodules(model)"
            )

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        self._require_whole()
        assert conv_kernel_size is not None, "the layer names the kernel size"
        tail = self.tail_of(conv_states, conv_kernel_size - 1)
        full = torch.cat([tail, conv_states], -1)
        if not self.sealed:
            # A copy: the slice alone would keep the whole concatenation alive, one per layer.
            self.produced[self.key]["conv"] = full[..., full.shape[-1] - tail.shape[-1] :].clone()
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self._require_whole()
        if not self.sealed:
            self.produced[self.key]["recurrent"] = recurrent_states
        if self.keep_rows and self.in_place:
            self.conv_states[0].copy_(self.produced[self.key]["conv"])
            self.recurrent_states[0].copy_(recurrent_states)
        elif self.keep_rows:
            self._start_from(self.produced[self.key])
        return recurrent_states


class ResidentCache(Cache):
    """Shows a resident state to one functional forward; `take_produced()` returns the new state with its graph."""

    is_compileable = False
    new_ids: torch.Tensor | None = None
    """LongTensor [B, T], the tokens of a forward on all ranks together; None in a generation."""
    part: TokenSlice | None = None
    """Those that this rank runs."""

    def __init__(self, layers: Sequence[ResidentLayer]):
        super().__init__(layers=list(layers))

    def take_produced(self) -> dict[StateKey, dict[str, torch.Tensor]]:
        """What the forward produced. The cache keeps nothing of it, now or later.

        A checkpointed layer updates the cache again when it recomputes. Keeping what it then produces would keep the
        recomputed graph of every layer alive to the end of the backward pass (36 GiB for a chunk of 4,096 tokens at
        the Qwen3.6-27B geometry).
        """
        taken = {key: tensors for layer in self.layers for key, tensors in layer.produced.items()}
        for layer in self.layers:
            layer.produced, layer.sealed = {}, True
        return taken
