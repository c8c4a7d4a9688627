"""Decoding in memory of a fixed size, so that a step of one token per row can be one CUDA graph.

A step of a large model on a few tokens launches thousands of small kernels and waits for Python between them; a graph
launches all of them at once. It needs every tensor at the same place in every step: rows go to buffers for all tokens
that may come, and recurrent states are written where they were read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..environment import DECODE as VARIABLE
from ..environment import asked
from ..ops.trial import first_line
from ..types import CausalLM
from .cache import FixedRows, KVLayer, RecurrentLayer, ResidentCache

_LOG = logging.getLogger(__name__)

FEWEST_TOKENS = 32
"""Recording a graph takes as long as some tens of steps."""


def why_no_graph(model: CausalLM, cache: Any, n_new: int | None) -> str | None:
    """What keeps steps of `cache` from being recorded, or None."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"graphs need CUDA, not {device.type}"
    if n_new is None or n_new < FEWEST_TOKENS:
        return f"recording pays from {FEWEST_TOKENS} tokens on, and max_new_tokens={n_new}"
    return why_not_fixed(model, cache)


def why_not_fixed(model: CausalLM, cache: Any) -> str | None:
    """What keeps `cache` from decoding in memory of a fixed size, or None."""
    layers = cache.layers if isinstance(cache, ResidentCache) else ()
    if not layers or any(type(layer) not in (KVLayer, RecurrentLayer) for layer in layers):
        return "only layers of keys and values and recurrent layers decode in memory of a fixed size"
    pages = [layer.pages for layer in layers if isinstance(layer, KVLayer)]
    if any(p.context is not None or p.layer_state.stager is not None for p in pages):
        return "pages on other ranks or in host memory are fetched anew in each step"
    if "forward" in vars(model.base_model):
        return "something replaced the decoder's forward, as accelerate's hooks do"
    return None


@contextmanager
def recorded_steps(model: CausalLM, cache: Any, n_new: int | None) -> Iterator[None]:
    """Within the block steps of `model.generate(cache=cache)` are replays of a CUDA graph, where they can be."""
    if asked(VARIABLE) == "eager":
        yield
        return
    reason = why_no_graph(model, cache, n_new)
    if reason is not None:
        _LOG.warning("%s='graph', but decoding step by step, because %s", VARIABLE, reason)
        yield
        return
    assert n_new is not None
    with fixed_steps(model, cache, n_new, record=True):
        yield


@contextmanager
def fixed_steps(model: CausalLM, cache: ResidentCache, n_new: int, *, record: bool) -> Iterator[Steps]:
    """Within the block the decoder of `model` runs `cache`, which may decode `n_new` tokens, through `Steps`."""
    decoder: Any = model.base_model
    steps = Steps(decoder.forward, cache, n_new, next(decoder.parameters()).device, record=record)
    decoder.forward = steps
    try:
        yield steps
    finally:
        del decoder.forward


class Steps:
    """The decoder's forward for one token per row: the first as ever, the others recorded once if `record`."""

    def __init__(
        self, forward: Callable[..., Any], cache: ResidentCache, n_new: int, device: torch.device, *, record: bool
    ):
        self._forward = forward
        self._cache = cache
        self._record = record
        self._done = torch.zeros(1, dtype=torch.long, device=device)
        self._first = cache.get_seq_length()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ids = self._hidden = torch.empty(0)
        self.n_replays = 0
        for layer in cache.layers:
            if isinstance(layer, KVLayer):
                layer.fixed = FixedRows(n_new, self._done)

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> Any:
        if options.get("cache") is not self._cache:  # as classifier-free guidance has one of its own
            return self._forward(input_ids=input_ids, **options)
        assert input_ids.shape[1] == 1, "the last token of the prompt, and then one token at a time"
        hidden = self._replay(input_ids) if self._graph is not None else self._run(input_ids)
        for layer in self._cache.layers:
            if isinstance(layer, KVLayer):
                layer.n_decoded += 1
            else:
                layer.in_place = True  # the first step's own tensors; before it there may be those of the prompt
        if self._record and self._graph is None:
            self._graph = self._recorded(input_ids)
        return BaseModelOutputWithPast(last_hidden_state=hidden, cache=self._cache)

    def _run(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = (self._done + self._first).expand(len(input_ids), 1)
        out = self._forward(input_ids=input_ids, position_ids=positions, cache=self._cache, use_cache=False)
        self._done.add_(1)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def _recorded(self, input_ids: torch.Tensor) -> torch.cuda.CUDAGraph | None:
        self._ids = input_ids.clone()
        graph, device, done = torch.cuda.CUDAGraph(), self._done.device, self._done.clone()
        try:
            # A graph records on one stream; the default one is of whatever device was current when it was made.
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                self._hidden = self._run(self._ids)
        except RuntimeError as error:
            _LOG.warning("decoding step by step, because a step could not be recorded: %s", first_line(error))
            self._record = False
            self._done.copy_(done)
            return None
        return graph

    def _replay(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert self._graph is not None
        self._ids.copy_(input_ids)
        self._graph.replay()
        self.n_replays += 1
        return self._hidden.clone()
