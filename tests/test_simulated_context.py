"""A simulated rank receives, keeps and does what a real one of 2 or 4 ranks does; and what is made of its figures."""

import dataclasses

import pytest
import rank_simulation as simulation
import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.bench import simulated_rank
from longstraw_sdk.bench.estimate import (
    PhaseEstimate,
    bend,
    depths_of,
    estimate,
    memory,
    scaled,
    summed,
)
from longstraw_sdk.bench.simulated_context import SimulatedBackend, SimulatedContext
from longstraw_sdk.bench.simulated_rank import Cost, SimulatedRank, Workload
from longstraw_sdk.bench.simulated_ranks import Plan, measured_case, simulate
from longstraw_sdk.bench.simulation_result import PHASES, table_rows
from longstraw_sdk.planner.geometry import GLM52, QWEN36_27B, TINY_GLM52, TINY_QWEN36
from longstraw_sdk.planner.links import Links
from longstraw_sdk.state import PagedSpec

CPU = torch.device("cpu")
WORKLOAD = Workload(
    chunk_tokens=64, page_tokens=24, response_tokens=16, max_runs=1, enough_seconds=0.0, device=CPU
)  # fmt: skip
PREFIX_TOKENS = 128
FETCHED_TOLERANCE = 0.1
"""Rows that a sparse layer fetches depend on what is selected. The mean over ranks differed by up to 6%: a rank's
selection of 16 in 128 tokens is one draw, and the simulation's queries draw alike for all ranks."""


@pytest.fixture(params=[2, 4])
def ranks(rank_pools, request):
    return rank_pools[request.param]


def simulated(rank, size, *case, context_class=SimulatedContext):
    backend = SimulatedBackend(rank, size, simulation.CHUNK_TOKENS)
    backend.context = context_class(rank, size, simulation.CHUNK_TOKENS)
    return simulation.received(backend, *case)


def evenly(found):
    return {phase: counts[0] for phase, counts in found.items()}


# --- bytes, beside real ranks ---


@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
@pytest.mark.parametrize(("n_prefix", "n_response"), [(PREFIX_TOKENS, 24), (75, 13), (3, 1)])
def test_bytes_are_those_of_every_real_rank(ranks, architecture, n_prefix, n_response):
    case = (architecture, n_prefix, n_response)
    for rank, real in enumerate(ranks.run(simulation.received_by_real_rank, *case)):
        assert simulated(rank, ranks.size, *case) == real
        assert all(sum(real[phase]) > 0 for phase in ("capture", "replay", "sweep", "finalize"))


def test_sparse_layers_receive_the_same_but_for_the_rows_that_are_selected(ranks):
    """Queries, candidates, new rows, counts and gradients are equal to the byte, fetched rows nearly on the mean."""
    case = ("glm52", PREFIX_TOKENS, 24)
    real = ranks.run(simulation.received_by_real_rank, *case)
    found = [simulated(rank, ranks.size, *case) for rank in range(ranks.size)]
    assert [evenly(one) for one in found] == [evenly(one) for one in real]
    for phase in ("capture", "replay", "sweep"):
        fetched, wanted = (sum(one[phase][1] for one in ranks_of) for ranks_of in (found, real))
        assert wanted > 0 and fetched == pytest.approx(wanted, rel=FETCHED_TOLERANCE), phase


class OfOwnRows(SimulatedContext):
    """Candidates of other ranks are copies, which name rows of this one."""

    def _of_their_rows(self, packed):
        return packed


def test_control_copied_candidates_leave_nothing_to_fetch(two_real_glm52):
    found = simulated(0, 2, *two_real_glm52[0], context_class=OfOwnRows)
    for phase in ("capture", "replay", "sweep"):
        assert found[phase][1] < (1 - FETCHED_TOLERANCE) * two_real_glm52[1][0][phase][1], phase


@pytest.fixture
def two_real_glm52(rank_pools):
    case = ("glm52", PREFIX_TOKENS, 24)
    return case, rank_pools[2].run(simulation.received_by_real_rank, *case)


class CountsItself(SimulatedContext):
    def _count(self, x, n):
        super()._count(x, n + 1)


class ForgetsExchanges(SimulatedContext):
    def start_exchange(self, x):
        before = self.received_bytes
        out = super().start_exchange(x)
        self.received_bytes = before
        return out


class ForgetsGathers(SimulatedContext):
    def gather(self, x):
        before = self.received_bytes
        out = super().gather(x)
        self.received_bytes = before
        return out


class CountsWideInputs(SimulatedContext):
    """As if everything travelled in float64."""

    def _count(self, x, n):
        self.received_bytes += n * x.numel() * 8


@pytest.mark.parametrize("context_class", [CountsItself, ForgetsExchanges, ForgetsGathers, CountsWideInputs])
def test_control_wrong_counts_are_not_those_of_a_real_rank(rank_pools, context_class):
    # An architecture that attends before its last layer, whose attention a filled state does without.
    case = ("llama" if context_class is ForgetsExchanges else "qwen36", PREFIX_TOKENS, 24)
    real = rank_pools[2].run(simulation.received_by_real_rank, *case)[1]
    found = simulated(1, 2, *case, context_class=context_class)
    for phase in ("capture", "replay", "sweep"):
        assert found[phase] != real[phase], phase


# --- collectives ---


def test_what_a_gather_gives_is_memory_of_its_own():
    context = SimulatedContext(1, 4, 32)
    x = torch.arange(6).view(2, 3).T
    out = context.gather(x)
    assert out.is_contiguous() and out.untyped_storage().nbytes() == 4 * x.nbytes
    assert all(torch.equal(entry, x) for entry in out)
    assert context.received_bytes == 3 * x.nbytes
    out[0] = -1
    assert torch.equal(out[1], x) and int(x.min()) == 0


def test_an_uneven_exchange_gives_the_rows_that_would_come():
    context = SimulatedContext(1, 3, 32)
    x = torch.arange(10).view(5, 2)
    out = context.exchange_uneven(x, [2, 2, 1], [3, 1, 4])
    assert torch.equal(out, x[[0, 1, 2, 3, 4, 0, 1, 2]])
    assert context.received_bytes == 7 * x[:1].nbytes
    assert context.exchange_uneven(x[:0], [0, 0, 0], [0, 2, 0]).tolist() == [[0, 0], [0, 0]]
    assert context.received_bytes == 7 * x[:1].nbytes


def test_candidates_of_another_rank_name_its_rows():
    from longstraw_sdk.ops.sparse_selection import pack_keys, unpack_positions

    context = SimulatedContext(1, 4, chunk_tokens=32)  # slices of 8: rank 1 has positions 8 to 15 and 40 to 47
    packed = pack_keys(torch.tensor([0.5, -1.0, 0.0]), torch.tensor([8, 15, 41]))
    absent = torch.tensor([torch.iinfo(torch.int64).min])
    out = context.exchange(torch.cat([packed, absent]).expand(4, 1, 1, -1))
    assert unpack_positions(out)[:, 0, 0].tolist() == [
        [0, 7, 33, -1], [8, 15, 41, -1], [16, 23, 49, -1], [24, 31, 57, -1]
    ]  # fmt: skip
    assert torch.equal(out >> 32, torch.cat([packed, absent]).expand(4, 1, 1, -1) >> 32), "scores stay"


# --- a prompt that nobody forwarded ---


@pytest.mark.parametrize("geometry", [TINY_QWEN36, TINY_GLM52], ids=lambda g: g.name)
@pytest.mark.parametrize("size", [2, 8])
def test_a_filled_state_lies_as_a_captured_one(geometry, size):
    with SimulatedRank(geometry, size, 1, 256, WORKLOAD) as filled:
        filled.fill(256)
        state = filled.state
        backend = SimulatedBackend(size - 1, size, WORKLOAD.chunk_tokens)
        filled.bound.unbind()
        with LongStrawSession(filled.model, backend=backend, chunk_tokens=64, page_tokens=24, probe=False) as session:
            captured = session.capture(torch.zeros(257, dtype=torch.long))._state
            assert (state.bounds, state.owned) == (captured.bounds, captured.owned)
            for ours, theirs in zip(locations(state), locations(captured), strict=True):
                assert torch.equal(ours, theirs)
            for key, paged in captured.paged.items():
                assert state.paged[key].components == paged.components
                assert state.paged[key].n_tokens == paged.n_tokens == 256 // size
                assert len(state.paged[key].pages) == len(paged.pages)
            for key, recurrent in captured.recurrent.items():
                ours, theirs = state.recurrent[key].at(4), recurrent.at(4)
                assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
                    n: (t.shape, t.dtype) for n, t in theirs.items()
                }


def locations(state):
    """Where all rows are, and which of them are this rank's."""
    positions = torch.arange(state.n_tokens)
    return [*state.row_map.locate(positions), state.row_map.own_positions(state.owned[-1], CPU)]


def test_chunks_behind_filled_rows_receive_what_those_of_a_session_do():
    """Dense layers receive the same behind any prefix, so the sums over a prompt are those of a real step."""
    with SimulatedRank(TINY_QWEN36, 2, 1, 256, WORKLOAD) as rank:
        capture, sweep = {}, {}
        for depth in (0, 64, 192):
            rank.fill(depth)
            capture[depth], sweep[depth] = rank.capture_chunk(), rank.sweep_chunk()
        replay, finalize = rank.replay(accumulate=True), rank.finalize()
        rank.bound.unbind()
        rank.model.zero_grad()
        backend = SimulatedBackend(1, 2, WORKLOAD.chunk_tokens)
        found = {}
        with LongStrawSession(rank.model, backend=backend, chunk_tokens=64, page_tokens=24, probe=False) as session:

            def received():
                before, backend.context.received_bytes = backend.context.received_bytes, 0
                return before

            checks = 2 * 8  # whether the ranks passed their checks and a hash of what they were given
            with session.capture(torch.zeros(257, dtype=torch.long)) as prefix:
                found["capture"] = received() - checks - 1  # and whether the prompt's last state is finite
                prefix.replay(torch.zeros(16, dtype=torch.long)).logps.sum().backward()
                found["replay"] = received() - checks
            found["sweep"] = received() - checks
            session.finalize()
            found["finalize"] = received()
    wanted = {"replay": replay.received_bytes, "finalize": finalize.received_bytes}
    wanted |= {"capture": summed(capture, 256, 64).received_bytes, "sweep": summed(sweep, 256, 64).received_bytes}
    assert found == wanted


def test_layers_that_are_forwarded_again_keep_less_and_receive_more():
    found = {}
    for checkpointing in (False, True):
        geometry = dataclasses.replace(TINY_QWEN36, checkpointing=checkpointing)
        with SimulatedRank(geometry, 2, 2, 128, WORKLOAD) as rank:
            rank.fill(64)
            rank.capture_chunk()
            found[checkpointing] = [rank.sweep_chunk(), rank.replay(accumulate=True)]
    for kept, again in zip(found[False], found[True], strict=True):
        assert again.workspace_bytes < 0.7 * kept.workspace_bytes
        assert again.received_bytes > kept.received_bytes


@pytest.mark.parametrize(("max_runs", "enough_seconds", "n_runs"), [(1, 9.0, 1), (3, 9.0, 3), (3, 0.02, 2)])
def test_short_measurements_are_repeated_and_the_fastest_counts(monkeypatch, max_runs, enough_seconds, n_runs):
    workload = dataclasses.replace(WORKLOAD, max_runs=max_runs, enough_seconds=enough_seconds)
    with SimulatedRank(TINY_QWEN36, 2, 0, 64, workload) as rank:
        seconds = iter([0.015, 0.01, 0.03])
        monkeypatch.setattr(simulated_rank, "seconds_of", lambda action, device: (action(), next(seconds))[1])
        calls = []
        found = rank._measure(lambda: calls.append("run"), lambda: calls.append("prepare"))
    assert calls == ["prepare", "run"] * (n_runs + 1), "and once under the memory trace"
    assert found.seconds == min([0.015, 0.01, 0.03][:n_runs])


def test_a_sweep_costs_more_behind_gradients_than_without_them():
    """Every component and boundary of a swept chunk has a cotangent."""
    with SimulatedRank(TINY_QWEN36, 2, 0, 192, WORKLOAD) as rank:
        rank.fill(128)
        rank.capture_chunk()
        rank._collect_gradients()
        assert all(paged.has_gradient for paged in rank.state.paged.values())
        assert all(recurrent.has_gradient for recurrent in rank.state.recurrent.values())
        assert all(len(paged._accumulators) == len(paged.pages) for paged in rank.state.paged.values())
        rank.sweep_chunk()
        gradients = [p.grad for name, p in rank.model.named_parameters() if p.requires_grad and "lora_B" in name]
    assert any(g is not None and bool(g.any()) for g in gradients)


# --- arithmetic ---


def cost(seconds, received_bytes=0.0, workspace_bytes=0.0):
    return Cost(seconds=seconds, received_bytes=received_bytes, workspace_bytes=workspace_bytes)


def test_a_prompt_is_the_sum_over_its_chunks_on_straight_lines():
    curve = {0: cost(1.0, 5.0, 7.0), 30: cost(4.0, 8.0, 3.0), 70: cost(2.0, 12.0, 9.0)}
    seconds = [1, 2, 3, 4, 3.5, 3, 2.5, 2]
    found = summed(curve, 80, 10)
    assert found.seconds == pytest.approx(sum(seconds))
    assert found.received_bytes == pytest.approx(sum(5 + d / 10 for d in range(0, 80, 10)))
    assert found.workspace_bytes == 9.0
    assert summed(curve, 40, 10).seconds == pytest.approx(sum(seconds[:4])), "a shorter prompt on the same curve"


def test_the_bend_is_the_distance_from_the_line_between_neighbours():
    curve = {0: cost(1.0), 10: cost(4.0), 20: cost(3.0), 40: cost(5.0)}
    assert bend(curve, 30) == pytest.approx((4 - 2) / 4)
    assert bend(curve, 50) == pytest.approx(max((4 - 2) / 4, (13 / 3 - 3) / 3))
    assert bend({0: cost(1.0), 10: cost(2.0), 30: cost(4.0)}, 40) == pytest.approx(0.0)


def test_depths_end_where_the_last_chunk_of_each_length_begins():
    assert depths_of([4096, 8192], 512) == [0, 1536, 3584, 5632, 7680]
    assert depths_of([8192], 512) == [0, 3584, 7680]


def test_layers_are_scaled_without_embedding_and_head():
    front, longer = cost(10.0 + 2.0, 1.0, 4.0), cost(10.0 + 2 * 2.0, 1.5, 4.0)
    assert scaled(front, longer, 15) == cost(10.0 + 16 * 2.0, 8.5, 4.0)


@pytest.mark.parametrize(
    ("geometry", "tolerance"), [(TINY_QWEN36, 0.0), (TINY_GLM52, FETCHED_TOLERANCE)], ids=["qwen", "glm"]
)
def test_a_whole_model_receives_what_scaling_says(geometry, tolerance):
    """To the byte, but for the rows that its sparse layers select; workspace nearly, for peaks need not coincide."""
    n_units, found = 3, []
    workload = dataclasses.replace(WORKLOAD, response_tokens=64)  # few queries would be few draws of a selection
    for n in (0, 1, n_units):
        with SimulatedRank(geometry, 4, n, 192, workload) as rank:
            rank.fill(128)
            found.append([rank.capture_chunk(), rank.sweep_chunk(), rank.replay(accumulate=True), rank.finalize()])
    for front, longer, whole in zip(*found, strict=True):
        wanted = scaled(front, longer, n_units)
        assert wanted.received_bytes == pytest.approx(whole.received_bytes, rel=tolerance, abs=0)
        assert wanted.workspace_bytes == pytest.approx(whole.workspace_bytes, rel=0.1)


def test_bytes_of_another_node_take_its_link():
    links = Links(node_ranks=8, within_node=400e9, between_nodes=50e9)
    assert links.seconds(400e9, 8) == pytest.approx(1.0)
    assert links.seconds(31e9, 32) == pytest.approx(7 / 400 + 24 / 50)
    assert links.seconds(400e9, 2) == pytest.approx(1.0)


@pytest.mark.parametrize("geometry", [TINY_QWEN36, TINY_GLM52], ids=lambda g: g.name)
def test_resident_bytes_and_accumulators_are_those_of_a_state(geometry):
    short, size = dataclasses.replace(geometry, n_units=1), 4
    zero = PhaseEstimate(seconds=0, received_bytes=0, expert_bytes=0, link_seconds=0, workspace_bytes=0)
    held = memory(short.whole(size), dict.fromkeys(PHASES, zero), 0, 256 // size, 4, 24)
    backend = SimulatedBackend(size - 1, size, 64)
    for scope, wanted in (("response", held.resident_response), ("full", held.resident_full)):
        model = short.build(1, size, CPU)
        options = {"chunk_tokens": 64, "page_tokens": 24, "probe": False, "gradient_scope": scope}
        with LongStrawSession(model, backend=backend, **options) as session:
            prefix = session.capture(torch.zeros(257, dtype=torch.long))
            assert prefix.n_bytes == wanted
            prefix.replay(torch.zeros(16, dtype=torch.long)).logps.sum().backward()
            assert prefix.n_bytes == wanted + (held.accumulators if scope == "full" else 0)
    assert held.peak_full == held.weights + held.resident_full + held.accumulators


def test_weights_of_one_rank():
    """The released sizes: 26.9 billion parameters, and 744 billion of which each of 32 ranks has an eighth of 256."""
    qwen, glm = QWEN36_27B.whole(8), GLM52.whole(32)
    assert qwen.weights_bytes == pytest.approx(2 * 26.9e9, rel=1e-3)
    experts = 75 * 256 * 3 * 6144 * 2048 * 2
    assert GLM52.whole(1).weights_bytes - glm.weights_bytes == experts * 31 // 32
    assert sum(spec.bytes_per_token for spec in glm.specs) == 95_232
    assert sum(spec.bytes_per_token for spec in qwen.specs if isinstance(spec, PagedSpec)) == 65_536
    assert glm.routed_bytes_per_token == 75 * 8 * 6144 * 2
    assert qwen.routed_bytes_per_token == 0
    kinds = GLM52.config(18).indexer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [0, 1, 2, *range(6, 78, 4)] and len(kinds) == 78
    assert QWEN36_27B.config(15).layer_types.count("full_attention") == 16


def test_routed_experts_are_those_of_one_rank_and_their_gradients_stay():
    with SimulatedRank(TINY_GLM52, 8, 1, 128, WORKLOAD) as rank:
        assert rank.bound.base.config.n_routed_experts == 16 // 8
        rank.fill(64)
        rank.capture_chunk()
        rank.replay(accumulate=False)
        names = [name for name, p in rank.model.named_parameters() if p.requires_grad]
        shared = [p for name, p in rank.model.named_parameters() if p.requires_grad and ".experts." not in name]
        assert len(shared) < len(names) and any("shared_experts" in name for name in names)
        found = rank.finalize().received_bytes
    n_elements = sum(p.numel() for p in shared)
    assert found == 7 * (len(shared) + 2 * 4 * n_elements // 8), (
        "flags of all; an eighth to be summed, and its sum back"
    )


# --- the whole of it ---


@pytest.fixture(scope="module")
def results():
    plan = Plan(preset="tiny", contexts=((TINY_GLM52, 4),), lengths=(256, 512), workload=WORKLOAD)
    return plan, list(simulate(plan, lambda done: None))


def test_partial_results_grow_to_the_whole(results):
    _, found = results
    assert [one.complete for one in found] == [False] * (len(found) - 1) + [True]
    n_points = [len(one.points) for one in found]
    assert n_points == sorted(n_points) and n_points[0] < n_points[-1]
    assert [len(one.estimates) for one in found][-3:] == [0, 2, 2]
    assert all(one.rows() for one in found)


def test_estimates_follow_from_the_points(results):
    plan, found = results
    last = found[-1]
    geometry, size = plan.contexts[0]
    assert {p.n_layers for p in last.points} == {2, 4}
    assert all(p.cost.seconds > 0 and p.cost.received_bytes > 0 for p in last.points)
    assert all(p.cost.workspace_bytes > 0 for p in last.points)
    case = last.estimates[1]
    assert (case.size, case.positions) == (4, 512)
    curve = {n: {p.depth: p.cost for p in last.points if p.phase == "sweep" and p.n_layers == n} for n in (2, 4)}
    whole = {d: scaled(curve[2][d], curve[4][d], geometry.n_units) for d in curve[2]}
    assert case.phases["sweep"].received_bytes == pytest.approx(summed(whole, 512, 64).received_bytes)
    n_moe, hidden, top_k = 5, 32, 2
    one_way = 512 // size * top_k * hidden * 4 * n_moe * 3 / 4
    assert case.phases["capture"].expert_bytes == pytest.approx(2 * one_way)
    assert case.phases["sweep"].expert_bytes == pytest.approx(4 * one_way)
    again = estimate(
        measured_case(last.points, geometry, size),
        dataclasses.replace(geometry.whole(size), checkpointing=True),
        512,
        plan.workload,
        plan.links,
    )
    assert again.phases["sweep"].expert_bytes == pytest.approx(6 * one_way)
    trained = [p for p in geometry.build(geometry.n_units, size, CPU).parameters() if p.requires_grad]
    assert case.memory.adapter == 2 * sum(p.nbytes for p in trained)
    step = case.step(8, "full")
    parts = [case.phases[name].seconds for name in ("capture", "replay full", "sweep", "finalize")]
    assert step.seconds == pytest.approx(parts[0] + 8 * parts[1] + parts[2] + parts[3])
    response = [case.phases[name].link_seconds for name in ("capture", "replay response", "finalize")]
    assert case.step(2, "response").link_seconds == pytest.approx(response[0] + 2 * response[1] + response[2])


def test_replays_of_full_scope_fetch_and_return_gradients(results):
    phases = results[1][-1].estimates[1].phases
    assert phases["replay full"].received_bytes > phases["replay response"].received_bytes


def test_every_row_of_the_table_has_a_name_of_its_own(results):
    case = results[1][-1].estimates[0]
    keys = [key for key, *_ in table_rows(case)]
    assert len(set(keys)) == len(keys) and {"capture", "step response 2", "peak response"} <= set(keys)
    assert results[1][-1].table().row_count == 2 * (len(keys) + 1)


def test_figures_of_the_paper_stand_beside_their_case(results):
    from longstraw_sdk.planner.paper import PAPER

    result = results[1][-1]
    case = dataclasses.replace(result.estimates[0], geometry="qwen3.6-27b", size=8, positions=2_097_152)
    table = dataclasses.replace(result, estimates=(case,)).table()
    labels, ours, paper = ([str(cell) for cell in column.cells] for column in table.columns)
    beside = dict(zip(labels, paper, strict=True))
    assert beside["step, response scope, G=2"] == "5,198.8 s" and beside["capture"] == "4,656 s"
    assert sum(bool(cell) for cell in paper) == len(PAPER["qwen3.6-27b", 8, 2_097_152])
    assert all(set(figures) <= {key for key, *_ in table_rows(case)} for figures in PAPER.values())
    assert all(ours[1:])
