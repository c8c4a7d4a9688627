"""How fast a device is: ceilings of large operations, and the shares of them that whole phases reached."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from ..errors import ConfigurationError
from .work import Ceilings


def memory_of(device: torch.device) -> int:
    """Bytes of a device here; those of the host for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class SparseSeconds:
    """A forward of 8,192 tokens through one layer of GLM-5.2.

    Args:
        dense, experts: of a layer by its MLP.
        selecting: more, if the layer selects, and `per_prefix_token` of it per token before the forward.
    """

    dense: float
    experts: float
    selecting: float
    per_prefix_token: float

    def layer(self, *, experts: bool, selects: bool, n_prefix: float) -> float:
        """Seconds of one layer behind `n_prefix` tokens."""
        known = self.experts if experts else self.dense
        return known + selects * (self.selecting + self.per_prefix_token * n_prefix)

    def slower(self, factor: float) -> SparseSeconds:
        return SparseSeconds(*(factor * value for value in astuple(self)))


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One GPU. Seconds of a phase are FLOPs over `ceilings` over the phase's share of them.

    Args:
        products: share of products in a forward without autograd.
        training_products: the same in a pack's forward and backward.
        attention, query_gradient, all_gradients: of attention forward, of its backward in response and in full scope.
        launch_seconds: least time of a pack per layer, forward and backward: Python launches no faster.
        decode_seconds: of one token of all rows per layer, beside reading the state at `decode_bytes` per second.
        host_bytes: per second from pinned host memory.
        source: where the figures come from.
    """

    name: str
    ceilings: Ceilings
    products: float
    training_products: float
    attention: float
    query_gradient: float
    all_gradients: float
    launch_seconds: float
    decode_seconds: float
    decode_bytes: float
    host_bytes: float
    sparse: SparseSeconds
    source: str

    def with_ceilings(
        self, *, products: float | None, attention: float | None, attention_backward: float | None
    ) -> DeviceProfile:
        """The same shares of other ceilings in FLOP/s; None leaves one as it is."""
        given = {"products": products, "attention": attention, "attention_backward": attention_backward}
        changed = {name: value for name, value in given.items() if value is not None}
        for name, value in changed.items():
            if value <= 0:
                raise ConfigurationError(f"{name} must be a positive number of FLOP/s, got {value}")
        if not changed:
            return self
        told = ", ".join(f"{name} {value / 1e12:g} TFLOP/s" for name, value in changed.items())
        slower = self.ceilings.products / changed.get("products", self.ceilings.products)
        return replace(
            self,
            name=f"{self.name} with other ceilings",
            ceilings=replace(self.ceilings, **changed),
            sparse=self.sparse.slower(slower),
            source=f"{self.source}; scaled to given ceilings ({told}), which nobody measured as a whole",
        )


# Shares solve seconds = products / (ceiling * share) + attention / (ceiling * share) for capture at 32,768 and
# 1,048,576 tokens, and in the same way for eight replays in packs of 4,096. 131,072 tokens then agree within 1%.
# Full scope has one measured row: its share of the backward is what that row says.
H200 = DeviceProfile(
    name="h200",
    ceilings=Ceilings(products=790e12, attention=690e12, attention_backward=401e12),
    products=0.640,
    training_products=0.547,
    attention=1.00,
    query_gradient=1.71,
    all_gradients=0.70,
    launch_seconds=1.626 / 64,  # one response of 1,024 tokens through 64 layers
    decode_seconds=(0.3415 - 0.0425) / 64,  # eight rows behind 1,048,576 tokens: 0.34 s per token
    decode_bytes=1.617e12,  # eight rows, keys split over the batch
    host_bytes=51e9,
    # Selecting is not linear in the prefix; this line is within a tenth at 8,192, 131,072 and 1,048,576.
    sparse=SparseSeconds(dense=0.0285, experts=0.0424, selecting=0.0135, per_prefix_token=2.6e-7),
    source="benchmarks/results/2026-11-30-h200-27b-{32k,128k,1m}.json and h200-glm-slice.json (one H200)",
)

PROFILES = {profile.name: profile for profile in (H200,)}


def load_profile(device: str) -> DeviceProfile:
    """A name of `PROFILES`, or a JSON file of `longstraw bench` whose rows hold measured ceilings."""
    if device in PROFILES:
        return PROFILES[device]
    path = Path(device)
    if not path.is_file():
        raise ConfigurationError(
            f"--device {device!r} is neither a known device ({', '.join(PROFILES)}) nor a JSON file that longstraw "
            "bench wrote"
        )
    try:
        rows = json.loads(path.read_text())
        found = next(
            (row, setting["ceilings"])
            for row in rows
            for setting in (row.get("settings") or {}).values()
            if isinstance(setting, dict) and "ceilings" in setting
        )
        measured = Ceilings(**found[1])
    except (ValueError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigurationError(
            f"{path} holds no measured ceilings; give the file of a preset that measures whole steps, as h200-27b-32k"
        ) from error
    return replace(
        H200.with_ceilings(
            products=measured.products,
            attention=measured.attention,
            attention_backward=measured.attention_backward,
        ),
        name=str(found[0].get("device", path.stem)),
        source=f"ceilings of {path.name}; shares of {H200.source}",
    )
