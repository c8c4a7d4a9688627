"""Byte arithmetic of the specs: against numbers computed by hand, and against memory that is really allocated."""

import dataclasses

import pytest
import torch
import transformers

from longstraw_sdk.models.qwen36 import Qwen36Adapter
from longstraw_sdk.state import (
    AttentionKVSpec,
    IndexerKeySpec,
    MLALatentSpec,
    PagedSpec,
    PagePool,
    RecurrentLayerState,
    RecurrentSpec,
    ResidentState,
)

CPU = torch.device("cpu")
KV = AttentionKVSpec(layer=3, n_kv_heads=4, key_dim=256, value_dim=256)
UNEVEN_KV = AttentionKVSpec(layer=0, n_kv_heads=2, key_dim=24, value_dim=16, dtype=torch.float32)
MLA = MLALatentSpec(layer=5)
INDEXER = IndexerKeySpec(layer=5)
GDN = RecurrentSpec(layer=0, n_heads=48, key_dim=128, value_dim=128, conv_channels=10240, conv_tail=3)
NO_CONV = RecurrentSpec(layer=1, n_heads=2, key_dim=8, value_dim=4, state_dtype=torch.float64)


@pytest.mark.parametrize(
    ("spec", "per_token", "accumulators"),
    [
        (KV, 2 * 4 * 256 * 2, 2 * 4 * 256 * 4),
        (UNEVEN_KV, 2 * (24 + 16) * 4, 2 * (24 + 16) * 4),
        (dataclasses.replace(KV, dtype=torch.float64), 2 * 4 * 256 * 8, 2 * 4 * 256 * 8),
        (MLA, (512 + 64) * 2, (512 + 64) * 4),
        (INDEXER, 128 * 2, 0),
    ],
    ids=["kv", "uneven kv", "float64 kv", "mla", "indexer"],
)
def test_bytes_per_token(spec, per_token, accumulators):
    assert spec.bytes_per_token == per_token
    assert spec.accumulator_bytes_per_token == accumulators


@pytest.mark.parametrize(
    ("spec", "per_boundary", "accumulators"),
    [
        (GDN, 48 * 128 * 128 * 4 + 10240 * 3 * 2, 48 * 128 * 128 * 4 + 10240 * 3 * 4),
        (NO_CONV, 2 * 8 * 4 * 8, 2 * 8 * 4 * 8),
    ],
    ids=["gdn", "without convolution"],
)
def test_bytes_per_boundary(spec, per_boundary, accumulators):
    assert spec.bytes_per_boundary == per_boundary
    assert spec.accumulator_bytes == accumulators
    assert len(spec.components) == 1 + bool(spec.conv_tail)


@pytest.mark.parametrize("spec", [KV, UNEVEN_KV, MLA, INDEXER], ids=lambda s: s.kind)
@pytest.mark.parametrize(("n_tokens", "n_pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (48, 3)])
def test_resident_bytes_count_the_last_page_whole_and_equal_what_is_allocated(spec, n_tokens, n_pages):
    assert spec.resident_bytes(n_tokens, 16) == n_pages * 16 * spec.bytes_per_token
    pool = PagePool(16)
    state = ResidentState((spec,), torch.arange(n_tokens), pool, "prompt", CPU)
    layer = state.paged[spec.key]
    rows = {c.name: torch.zeros(1, *c.leading, n_tokens, *c.trailing, dtype=c.dtype) for c in spec.components}
    if n_tokens:
        layer.append(rows)
    assert len(layer.pages) == n_pages
    slabs = {page.slab for page in layer.pages}
    storage = sum(slab.tensors[c.name].untyped_storage().nbytes() for slab in slabs for c in spec.components)
    assert storage == spec.resident_bytes(n_tokens, 16) == layer.n_bytes == state.n_bytes == pool.live_bytes
    if n_pages:
        list(layer.blocks(n_tokens, with_grads=True))
        assert pool.live_bytes - storage == n_pages * 16 * spec.accumulator_bytes_per_token
        assert layer.has_gradient == bool(layer.cotangents(0, n_tokens)) == (spec is not INDEXER)


@pytest.mark.parametrize("spec", [GDN, NO_CONV], ids=["gdn", "without convolution"])
def test_boundary_bytes_equal_what_is_allocated(spec):
    state = RecurrentLayerState(spec)
    tensors = {c.name: torch.zeros(1, *c.leading, *c.trailing, dtype=c.dtype) for c in spec.components}
    for boundary in (1, 2):
        state.put(boundary, tensors, keep_earlier=True)
    stored = [t for boundary in state.boundaries.values() for t in boundary.values()]
    assert sum(t.untyped_storage().nbytes() for t in stored) == 2 * spec.bytes_per_boundary == state.n_bytes
    sum(leaf.float().sum() for leaf in state.leaves(2).values()).backward()
    assert state.n_bytes == 2 * spec.bytes_per_boundary + spec.accumulator_bytes


@pytest.mark.parametrize("spec", [KV, MLA, INDEXER, GDN], ids=lambda s: s.kind)
def test_specs_are_frozen_values(spec):
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.layer = 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.components = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.components[0].dtype = torch.float32
    copy = dataclasses.replace(spec, layer=spec.layer)
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert dataclasses.replace(spec, layer=9).key == (9, spec.kind) != spec.key


def test_one_layer_may_hold_latents_and_indexer_keys():
    state = ResidentState((MLA, INDEXER), torch.arange(2), PagePool(4), "prompt", CPU)
    assert set(state.paged) == {(5, "mla_latent"), (5, "indexer_key")}


def test_token_axis_lies_between_heads_and_width():
    k, v = UNEVEN_KV.components
    assert k.empty_rows(16, CPU).shape == (2, 16, 24)
    assert v.empty_rows(16, CPU).shape == (2, 16, 16)
    assert v.empty_rows(16, CPU).stride() == (16, 2 * 16, 1), "token after token"
    assert k.token_dim == 1
    assert MLA.components[0].empty_rows(16, CPU).shape == (16, 512)
    assert MLA.components[0].token_dim == 0


def test_qwen36_27b():
    """64 layers, one in four with attention of 4 key-value heads of 256; 48 GDN layers of 48 heads 128 x 128."""
    config = transformers.Qwen3_5TextConfig(
        num_hidden_layers=64,
        hidden_size=5120,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    adapter = Qwen36Adapter()
    kinds = enumerate(config.layer_types)
    specs = [adapter.layer_spec(config, i, kind, torch.bfloat16) for i, kind in kinds]
    paged = [s for s in specs if isinstance(s, PagedSpec)]
    recurrent = [s for s in specs if isinstance(s, RecurrentSpec)]
    assert (len(paged), len(recurrent)) == (16, 48)
    assert [s.layer for s in paged] == list(range(3, 64, 4))
    assert {dataclasses.replace(s, layer=0) for s in recurrent} == {GDN}
    assert sum(s.bytes_per_token for s in paged) == 65_536
    assert sum(s.accumulator_bytes_per_token for s in paged) == 131_072
    assert sum(s.bytes_per_boundary for s in recurrent) == 48 * (3_145_728 + 61_440) == 153_944_064
    assert sum(s.resident_bytes(2**20, 4096) for s in paged) == 64 * 2**30


def test_glm_52():
    """78 layers of latents, 21 of them with indexer keys."""
    specs = [MLALatentSpec(layer=i) for i in range(78)] + [IndexerKeySpec(layer=i) for i in range(21)]
    assert len({s.key for s in specs}) == 99
    assert sum(s.bytes_per_token for s in specs) == 78 * 1152 + 21 * 256 == 95_232
