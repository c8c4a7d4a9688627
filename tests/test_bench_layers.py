"""The benchmark of single layers: what it counts, and what its rows say."""

import json
from dataclasses import replace

import pytest
import torch

from longstraw_sdk.bench import glm_slice
from longstraw_sdk.bench.glm_slice import SlicePlan, layer_flops, measure_slice
from longstraw_sdk.bench.result import ROW_FIELDS
from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.planner.geometry import TINY_GLM52

CPU = torch.device("cpu")
PLAN = SlicePlan(
    preset="test",
    geometry=TINY_GLM52,
    n_units=1,
    expert_ranks=1,
    depths=(64, 160),
    stock_depth=64,
    chunk_tokens=32,
    page_tokens=32,
    n_runs=1,
    device=CPU,
)


def test_rows_of_all_layer_kinds_systems_and_depths(tmp_path):
    said = []
    *partial, result = measure_slice(PLAN, said.append)
    assert len(partial) == 2 and len(said) == 3
    rows = result.rows()
    kinds = ["selecting, dense", "sharing, MoE", "selecting, MoE"]
    runs = [("longstraw", 64), ("longstraw", 160), ("transformers", 64)]
    assert [(r["system"], r["prompt_tokens"], r["layer_kind"]) for r in rows] == [
        (*run, k) for run in runs for k in kinds
    ]
    assert [r["n_layers"] for r in rows] == [1, 2, 1] * 3
    for row in rows:
        assert row.keys() >= set(ROW_FIELDS)
        assert 0 < row["capture_seconds"] == row["layer_seconds"] < row["chunk_seconds"]
        assert 0 < row["roofline_share"] < 1
    assert json.loads(result.write(tmp_path).read_text()) == rows
    assert result.plot(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert "160" in "".join(text for column in result.table().columns for text in column._cells)


def test_a_system_that_does_not_fit_has_rows_without_figures(monkeypatch, tmp_path):
    def too_large(*args):
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(glm_slice, "_stock_forward", too_large)
    *_, result = measure_slice(replace(PLAN, depths=(64,)), lambda done: None)
    ours, stock = ([r for r in result.rows() if r["system"] == name] for name in ("longstraw", "transformers"))
    assert all(r["layer_seconds"] is not None for r in ours) and len(stock) == 3
    assert all(r["layer_seconds"] is r["roofline_share"] is r["peak_gib"] is None for r in stock)
    assert "no memory" in {text for column in result.table().columns for text in column._cells}
    result.plot(tmp_path)


def test_no_clock_stays_on_the_model(monkeypatch):
    built = []
    build = type(TINY_GLM52).build
    monkeypatch.setattr(type(TINY_GLM52), "build", lambda self, *a: built.append(build(self, *a)) or built[-1])
    list(measure_slice(replace(PLAN, depths=(64,)), lambda done: None))
    layers = base_model_of(built[0]).base_model.layers
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def test_products_of_a_layer_are_what_a_count_by_hand_says():
    """Weights that a token meets, scores of 8 heads of 16, and 4 heads on the 64 tokens that were selected."""
    base = base_model_of(TINY_GLM52.build(1, 1, CPU))
    config, layers = base.config, base.base_model.layers
    attention = 32 * 24 + 24 * 4 * 20 + 32 * 24 + 16 * 4 * 22 + 4 * 10 * 32
    indexer = 24 * 8 * 16 + 32 * 16 + 32 * 8
    experts = 3 * 32 * 20 * (2 + config.n_shared_experts)
    attended = 4 * (16 + 16 + 8) * 64
    seen = 1000 + 16

    def count(layer, kind):
        return layer_flops(config, layers[layer], kind, 1000, 32) / (2 * 32)

    assert count(0, ("full", "dense")) == attention + indexer + 3 * 32 * 48 + 8 * 16 * seen + attended
    assert count(1, ("shared", "sparse")) == attention + experts + attended
    assert count(2, ("full", "sparse")) == attention + indexer + experts + 8 * 16 * seen + attended


def test_the_preset_for_a_large_gpu_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="needs a CUDA device of at least 130 GiB, and there is none"):
        next(glm_slice.h200_glm_slice(lambda done: None))
