"""Resident state: what survives of a prompt, who owns it, and the proof that nobody touched it."""

from .agreement import check_same_weights, in_step
from .context import ContextGroup, GatherReplicated, TokenSlice
from .pool import Page, PagePool
from .resident import PagedLayerState, PagedView, RecurrentLayerState, ResidentState
from .specs import (
    AttentionKVSpec,
    Component,
    IndexerKeySpec,
    MLALatentSpec,
    PagedSpec,
    RecurrentSpec,
    StateBytes,
    StateKey,
    StateSpec,
    min_forward_tokens,
)
from .staging import KEPT_FREE, CudaLink, Link, Placement, cuda_room, spread_over_host
from .witness import Witness

__all__ = [
    "KEPT_FREE",
    "AttentionKVSpec",
    "Component",
    "ContextGroup",
    "CudaLink",
    "GatherReplicated",
    "IndexerKeySpec",
    "Link",
    "MLALatentSpec",
    "Page",
    "PagePool",
    "PagedLayerState",
    "PagedSpec",
    "PagedView",
    "Placement",
    "RecurrentLayerState",
    "RecurrentSpec",
    "StateBytes",
    "ResidentState",
    "StateKey",
    "StateSpec",
    "TokenSlice",
    "Witness",
    "check_same_weights",
    "cuda_room",
    "in_step",
    "min_forward_tokens",
    "spread_over_host",
]
