"""Resident state: what survives of a prompt, who owns it, and the proof that nobody touched it."""

from .pool import Page, PagePool
from .resident import PagedLayerState, PagedView, RecurrentLayerState, ResidentState
from .specs import (
    AttentionKVSpec,
    Component,
    IndexerKeySpec,
    MLALatentSpec,
    PagedSpec,
    RecurrentSpec,
    StateKey,
    StateSpec,
)
from .staging import CudaLink, Link, Placement
from .witness import Witness

__all__ = [
    "AttentionKVSpec",
    "Component",
    "CudaLink",
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
    "ResidentState",
    "StateKey",
    "StateSpec",
    "Witness",
]
