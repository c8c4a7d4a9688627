"""Benchmarks of whole steps: every system computes the same gradient, and the rows say what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import rank_trainers
import torch

from longstraw_sdk.bench import group_steps, systems
from longstraw_sdk.bench.group_steps import Run, StepPlan, run_steps
from longstraw_sdk.bench.result import ROW_FIELDS
from longstraw_sdk.bench.systems import (
    Group,
    Options,
    Phases,
    longstraw_step,
    measure,
    prefix_grouper_step,
    transformers_step,
)
from longstraw_sdk.errors import ConfigurationError
from longstraw_sdk.evidence.parity import randomize_lora, relative_l2
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.planner.geometry import TINY_QWEN3, TINY_QWEN36
from longstraw_sdk.planner.work import Ceilings, ModelWork, Work

CPU = torch.device("cpu")
GROUP = Group(prompt_tokens=60, size=3, response_tokens=9)
WARM_UP = Group(prompt_tokens=20, size=2, response_tokens=5)
OPTIONS = Options(chunk_tokens=16, page_tokens=16)
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def built(geometry):
    model = geometry.build(2, 1, CPU)
    randomize_lora(model)
    return model.train()


def gradient(model, step):
    model.zero_grad()
    step(model, GROUP, Phases(CPU))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("geometry", "others"),
    [(TINY_QWEN36, []), (TINY_QWEN3, [prefix_grouper_step])],
    ids=["hybrid", "dense"],
)
def test_systems_that_are_compared_compute_the_same_gradient(geometry, others):
    model = built(geometry)
    wanted = gradient(model, transformers_step)
    for step in (longstraw_step("full", 18, OPTIONS), *others):
        assert relative_l2(gradient(model, step), wanted) < 1e-4
    assert relative_l2(gradient(model, longstraw_step("response", 18, OPTIONS)), wanted) > 0.05, "another gradient"


def plan(**changes):
    known = StepPlan(
        preset="test",
        models=((replace(TINY_QWEN3, n_units=1), ("transformers", "prefix-grouper")),),
        groups=(GROUP, replace(GROUP, prompt_tokens=80)),
        runs=(Run("response", 18), Run("full", 9, checkpointing=False)),
        options=replace(OPTIONS, sampled_tokens=2),
        warm_up=WARM_UP,
        ceiling_tokens=64,
        device=CPU,
    )
    return replace(known, **changes)


def test_rows_hold_phases_that_add_up(tmp_path):
    *partial, result = run_steps(plan(), lambda done: None)
    assert [len(r.steps) for r in partial] == list(range(1, 6))
    assert json.loads(result.write(tmp_path).read_text()) == result.rows()
    assert result.plot(tmp_path).read_bytes().startswith(b"\x89PNG")
    rows = result.rows()
    assert [(r["system"], r["gradient_scope"], r["replay_tokens"], r["prompt_tokens"]) for r in rows] == [
        ("longstraw", "response", 18, 60),
        ("longstraw", "full", 9, 60),
        ("transformers", "full", None, 60),
        ("prefix-grouper", "full", None, 60),
        ("longstraw", "response", 18, 80),
        ("longstraw", "full", 9, 80),
    ], "peers take the first group alone"
    for row in rows:
        assert row.keys() >= set(ROW_FIELDS)
        phases = [row[f"{name}_seconds"] for name in ("capture", "sample", "replay", "sweep", "finalize")]
        assert sum(filter(None, phases)) == pytest.approx(row["step_seconds"])
        ours = row["system"] == "longstraw"
        swept = ours and row["gradient_scope"] == "full"
        assert [seconds is not None for seconds in phases] == [ours, ours, True, swept, ours]
        assert 0 < row["roofline_share"] < 1
        assert row["peak_gib"] > row["weights_gib"] > 0 and row["date"] and row["device"]
        assert (row["state_gib"] is not None) == ours
        assert row["checkpointing"] == (row["replay_tokens"] != 9)


def test_layers_are_checkpointed_as_a_run_says_and_afterwards_as_before(monkeypatch):
    found = []

    def note(model, step, warm_up, group):
        flags = {layer.gradient_checkpointing for layer in base_model_of(model).base_model.layers}
        found.append((model, flags))
        return systems.Measured({}, None, 0)

    monkeypatch.setattr(group_steps, "measure", note)
    runs = (Run("response", 18), Run("response", 18, checkpointing=False))
    list(run_steps(plan(runs=runs, groups=(GROUP,)), lambda done: None))
    assert [flags for _, flags in found] == [{True}, {False}, {True}, {True}], "two runs of ours and two peers"


def test_a_system_without_memory_has_a_row(monkeypatch):
    asked = []

    def too_large(model, group, phases):
        asked.append((group.prompt_tokens, group.size))
        if group == GROUP:
            raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setitem(group_steps.PEERS, "transformers", too_large)
    *_, result = run_steps(plan(runs=(), models=((TINY_QWEN3, ("transformers",)),)), lambda done: None)
    assert asked == [(20, 1), (60, 3)], "one response as a warm-up, and the first group"
    [row] = result.rows()
    assert row["step_seconds"] is row["peak_gib"] is row["roofline_share"] is None
    assert "no memory" in {text for column in result.table().columns for text in column._cells}


def test_a_missing_peer_is_said_and_left_out(monkeypatch):
    said = []
    monkeypatch.setattr(group_steps, "find_spec", lambda name: None)
    *_, result = run_steps(plan(runs=(Run("full", 18),), groups=(GROUP,)), said.append)
    assert [row["system"] for row in result.rows()] == ["longstraw", "transformers"]
    assert 'prefix-grouper is not installed: pip install "longstraw-sdk[bench]"' in said


def test_gradients_of_a_measurement_do_not_stay():
    model = built(TINY_QWEN3)
    found = measure(model, transformers_step, WARM_UP, GROUP)
    assert all(p.grad is None for p in model.parameters())
    assert found.peak_bytes > sum(p.nbytes for p in model.parameters())
    assert found.seconds.keys() == {"replay"}


def test_phases_of_one_name_add_up(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0])
    monkeypatch.setattr(systems.time, "perf_counter", lambda: next(clock))
    phases = Phases(CPU)
    for _ in range(2):
        with phases.timed("replay"):
            pass
    assert phases.seconds == {"replay": 3.0}


def test_work_is_what_a_count_by_hand_says():
    """Three layers of a tiny Qwen3; 2 FLOPs per weight and token, 4 per pair and element of a head."""
    model = built(replace(TINY_QWEN3, n_units=1))
    work = ModelWork.of(model)
    config = base_model_of(model).config
    per_layer = 32 * (4 * 16) * 2 + 32 * (2 * 16) * 2 + 3 * 32 * 48
    assert work == ModelWork(3 * per_layer, 97 * 32, 4 * 16 * config.num_hidden_layers)
    assert work.capture(100) == Work(2 * work.layer_parameters * 100, 4 * work.attention_width * 5000, 0)
    response, full = (work.replay(100, 10, scope) for scope in ("response", "full"))
    assert response.attention == full.attention == 4 * work.attention_width * (1000 + 50)
    assert full.attention_backward - response.attention_backward == 4 * work.attention_width * 1000
    step = work.step(100, 10, 3, "full")
    assert step.products == work.capture(100).products * 2 + 3 * full.products
    assert Work(6.0, 8.0, 10.0).seconds(Ceilings(2.0, 4.0, 5.0)) == 7.0


def test_presets_for_a_large_gpu_are_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for preset in (group_steps.h200_27b_32k, group_steps.h200_27b_128k, group_steps.h200_27b_1m):
        with pytest.raises(ConfigurationError, match="needs a CUDA device of at least 130 GiB, and there is none"):
            next(preset(lambda done: None))


def test_a_plan_runs_on_as_many_processes_as_it_asks_for():
    with pytest.raises(ConfigurationError, match="cpu-cp2 runs on 2 processes, and 1 run; start it with torchrun"):
        next(group_steps.cpu_cp2(lambda done: None))


@pytest.mark.slow
def test_ranks_of_a_context_have_rows_with_what_they_received(rank_pools):
    for rows in rank_pools[2].run(rank_trainers.bench_of_two):
        alone, together = rows
        assert (alone["ranks"], together["ranks"]) == (1, 2)
        assert alone["received_bytes"] is alone["replay_bytes"] is None
        assert together["received_bytes"]["replay"] == together["replay_bytes"] > 0
        assert together["received_bytes"]["capture"] > 0 and together["chunk_tokens"] == 32
        assert together["state_gib"] < alone["state_gib"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_rows(path):
    rows = json.loads(path.read_text())
    assert rows and all(row.keys() >= set(ROW_FIELDS) for row in rows)
    assert all(row["preset"] in path.stem and path.stem.startswith(row["date"]) and row["device"] for row in rows)
