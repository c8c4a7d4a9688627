"""Several ranks that share a prompt: the gradient of one process, a part of the memory, no rank that waits for ever.

Ranks are processes on gloo (tests/rank_pool.py); what they run is in tests/rank_cases.py. Tolerances of parity are
those of `longstraw_sdk.evidence.parity`. Where two float64 runs of the same sums in another order are compared, 1e-10
relative leaves four digits above rounding.
"""

import os
from itertools import pairwise

import pytest
import rank_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool

from longstraw_sdk import ConfigurationError
from longstraw_sdk.backends import make_backend
from longstraw_sdk.evidence.parity import ParityCase, relative_l2
from longstraw_sdk.state import AttentionKVSpec, ContextGroup, PagedLayerState, PagePool
from longstraw_sdk.state.context import RowMap
from longstraw_sdk.types import Reduction

TOLERANCE = 1e-10
FULL, RESPONSE, FROZEN = ("full", "live"), ("response", "live"), ("full", "frozen")
MODES = [FULL, RESPONSE, FROZEN]

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(params=[2, 4])
def ranks(request, rank_pools):
    return rank_pools[request.param]


@pytest.fixture
def two_ranks(rank_pools):
    return rank_pools[2]


@pytest.fixture
def four_ranks(rank_pools):
    return rank_pools[4]


def group(size, rank):
    """A context without processes, for arithmetic on its slices."""
    context = object.__new__(ContextGroup)
    context.size, context.rank = size, rank
    return context


def equal(values):
    return all(value == values[0] for value in values)


# --- parity with conventional autograd ---


def check(pool, architecture, case):
    for result in pool.run(cases.parity, architecture, None, case):
        assert result.passed, result


@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen36"])
def test_float64(two_ranks, architecture, scope, prefix_adapter):
    check(two_ranks, architecture, ParityCase("float64", scope, prefix_adapter))


@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES)
@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_float64_on_four_ranks(four_ranks, architecture, scope, prefix_adapter):
    """41 tokens in chunks of 13: the last slices of a chunk are short, and none begins where a page does."""
    case = ParityCase("float64", scope, prefix_adapter, 41, (7, 12, 1), chunk_tokens=13, page_tokens=3)
    check(four_ranks, architecture, case)


@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, 6, 65])
@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_prompts_and_responses_shorter_than_the_context(ranks, architecture, prompt_tokens):
    check(ranks, architecture, ParityCase("float64", *FULL, prompt_tokens, (1, 3, 2, 6)))


@pytest.mark.parametrize(("scope", "prefix_adapter"), [RESPONSE, FROZEN])
@pytest.mark.parametrize("prompt_tokens", [2, 4])
def test_short_prompts_in_the_other_modes(four_ranks, scope, prefix_adapter, prompt_tokens):
    check(four_ranks, "qwen36", ParityCase("float64", scope, prefix_adapter, prompt_tokens, (1, 5)))


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_tokens": 7, "page_tokens": 3, "replay_tokens": 24},
        {"chunk_tokens": 2, "page_tokens": 1, "prompt_tokens": 15},
        {"chunk_tokens": 33, "page_tokens": 16, "replay_tokens": 1000},
        {"chunk_tokens": 512, "page_tokens": 512},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "chunk_tokens": 7, "page_tokens": 3, "replay_tokens": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_float64_does_not_depend_on_chunks_pages_packing_or_checkpointing(two_ranks, architecture, changes):
    case = {"prompt_tokens": 40, "response_tokens": (5, 12, 7, 1)} | changes
    check(two_ranks, architecture, ParityCase("float64", **case))


def test_checkpointing_and_packing_on_four_ranks(four_ranks):
    case = ParityCase("float64", *FULL, 40, (5, 12, 7, 1), 14, 4, replay_tokens=24, gradient_checkpointing=True)
    check(four_ranks, "qwen36", case)


@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES)
@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_float32(two_ranks, architecture, scope, prefix_adapter):
    check(two_ranks, architecture, ParityCase("float32", scope, prefix_adapter))


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        pytest.param(architecture, mode, marks=() if (architecture, mode) == ("llama", FULL) else pytest.mark.slow)
        for architecture in ("llama", "qwen36")
        for mode in MODES
    ],
)
def test_bfloat16(two_ranks, architecture, mode):
    check(two_ranks, architecture, ParityCase("bfloat16", *mode))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_low_precision_on_four_ranks(four_ranks, dtype):
    check(four_ranks, "qwen36", ParityCase(dtype))


def test_bfloat16_autocast_is_as_exact_as_in_one_process(two_ranks):
    model = cases.small_model("qwen36", torch.float32)
    with cases.open_session(model) as session:
        with session.capture(cases.PROMPT) as prefix:
            for row in cases.ROWS:
                prefix.replay(row).logps.sum().backward()
        session.finalize()
    truth = cases.flat_gradient(model).double()
    own_error = relative_l2(cases.autocast_gradient(1), truth)
    assert 1e-3 < own_error < 0.5, "autocast must round, or this compares nothing"
    for found in two_ranks.run(cases.autocast_gradient, 2):
        assert relative_l2(found, truth) < 1.5 * own_error


# --- controls that must fail ---

CONTROL = ParityCase("float64", *FULL, 40, (9, 6, 1), 16, 8)


@pytest.mark.parametrize("fault", cases.FAULTS)
def test_control(two_ranks, fault):
    """Each fault moves the gradient by more than one percent, eight decades over the bound."""
    results = two_ranks.run(cases.parity, "qwen36", None, CONTROL, fault)
    assert not any(result.passed for result in results)
    assert max(result.gradient_error for result in results) > 1e-2, results


def test_control_sound(two_ranks):
    for result in two_ranks.run(cases.parity, "qwen36", None, CONTROL):
        assert result.passed


# --- operators alone ---


def test_collectives(ranks):
    for found in ranks.run(cases.collectives):
        assert all(found.values()), found


def test_reduction_of_gradients(rank_pools):
    for found, (result,) in rank_pools[2].run(cases.reduced, 2):
        assert found[0] == (torch.float32, [3.0, 30.0, 300.0])
        assert found[1] == (torch.float32, [8.0, 8.0, 8.0])
        assert found[3] is None
        assert (result.operation, result.n_parameters, result.n_elements) == ("sum", 3, 9)
    for found, _ in rank_pools[4].run(cases.reduced, 4):
        assert found[2] == (torch.bfloat16, [260.0, 12.0, 0.0]), "summed in float32: 259, rounded once"
    for found, (result,) in rank_pools[4].run(cases.reduced, 1):
        assert found[0] == (torch.float32, [2.5, 25.0, 250.0])
        assert found[1] == (torch.float32, [2.0, 2.0, 2.0])
        assert result.operation == "mean"
    for found, results in rank_pools[4].run(cases.reduced, 2):
        assert found[0] == (torch.float32, [5.0, 50.0, 500.0])
        assert found[1] == (torch.float32, [4.0, 4.0, 4.0])
        assert [r.operation for r in results] == ["sum", "mean"]


@pytest.mark.parametrize("leading", [(), (2, 3)])
@pytest.mark.parametrize("dims", [(3, 5), (4, 1)])
def test_carried_state_equals_the_chain_of_all_slices(ranks, leading, dims):
    for errors in ranks.run(cases.carry_state_errors, leading, dims):
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("frozen", [("initial",), ("transition", "own")])
def test_carried_state_where_an_input_takes_no_gradient(ranks, frozen):
    for errors in ranks.run(cases.carry_state_errors, (2,), (3, 4), torch.float64, False, frozen):
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(
    ("n_real", "width"),
    [
        ([5, 5, 5, 5], 5),
        ([5, 5, 5, 2], 5),
        ([3, 3, 3, 3], 3),
        ([2, 2, 2, 1], 2),
        ([2, 1, 0, 0], 2),
        ([1, 0, 0, 0], 2),
        ([1, 1, 1, 1], 1),
        ([1, 1, 1, 0], 1),
        ([4, 1, 0, 0], 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 3, 6])
def test_carried_tail_equals_the_end_of_all_columns(rank_pools, n_real, width, size):
    """On four ranks, and on two with the first half of the slices; a convolution of `size + 1` taps."""
    for n_ranks in (2, 4):
        for errors in rank_pools[n_ranks].run(cases.carry_tail_errors, n_real[:n_ranks], width, size):
            assert max(errors.values()) < TOLERANCE, errors


def test_control_of_the_tail_with_a_wrong_count(two_ranks):
    """One column of padding taken for a real one is not a number, and so are the tails."""
    with pytest.raises(RuntimeError, match="AssertionError: end"):
        two_ranks.run(cases.carry_tail_errors, [2, 1], 2, 3, [2, 2])


def _changes(case):
    default = cases.AttentionCase()
    return ", ".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(default, k)) or "default"


ATTENTION = [
    cases.AttentionCase(),
    cases.AttentionCase(n_new=8, batch=1, groups=1, page_tokens=16),
    cases.AttentionCase(n_new=1, batch=3),
    cases.AttentionCase(n_new=2, chunks=(2, 3, 1), min_width=2),
    cases.AttentionCase(n_new=3, chunks=(), groups=3),
    cases.AttentionCase(chunks=(1,), page_tokens=1),
    cases.AttentionCase(n_new=9, chunks=(5, 6, 7), n_seen=2, dims=(4, 2)),
    cases.AttentionCase(split=False),
    cases.AttentionCase(split=False, n_new=1, decoded=4),
    cases.AttentionCase(split=False, n_new=2, decoded=1, chunks=(1,)),
    cases.AttentionCase(split=False, chunks=()),
    cases.AttentionCase(split=False, chunks=(5, 6, 7), n_seen=1),
]


@pytest.mark.parametrize("case", ATTENTION, ids=_changes)
def test_attention_over_ranks_equals_dense_softmax(ranks, case):
    found = ranks.run(cases.attention_errors, case)
    for errors, _ in found:
        assert max(errors.values()) < TOLERANCE, errors
    kept = sorted(row for _, rows in found for row in rows)
    assert kept == list(range(sum(case.chunks))), "every prefix row lies on one rank"


@settings(max_examples=25)
@given(
    case=st.builds(
        cases.AttentionCase,
        split=st.booleans(),
        n_new=st.integers(1, 9),
        chunks=st.lists(st.integers(1, 9), max_size=3).map(tuple),
        min_width=st.integers(1, 2),
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 2),
        groups=st.integers(1, 3),
        page_tokens=st.integers(1, 9),
        dims=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    )
)
def test_attention_over_ranks_equals_dense_softmax_whatever_the_shapes(rank_pools, case):
    for errors, _ in rank_pools[4].run(cases.attention_errors, case):
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("split", [True, False])
def test_attention_over_ranks_sums_bfloat16_in_float32(ranks, split):
    """Sums in another order leave float32 rounding, 1e-7, and seldom a last bit of the result; a bfloat16 sum, 1e-3."""
    case = cases.AttentionCase(split=split, n_new=16, chunks=(16, 16, 7), dims=(8, 8), dtype=torch.bfloat16)
    for errors, _ in ranks.run(cases.attention_errors, case):
        assert max(errors.values()) < 1e-4, errors


def test_operators_leave_autocast(two_ranks):
    """float32 operators keep seven digits under bfloat16 autocast, which would leave them three."""
    for errors in two_ranks.run(cases.carry_state_errors, (2,), (3, 4), torch.float32, True):
        assert max(errors.values()) < 1e-5, errors
    case = cases.AttentionCase(dtype=torch.float32, autocast=True)
    for errors, _ in two_ranks.run(cases.attention_errors, case):
        assert max(errors.values()) < 1e-5, errors


# --- which token is whose ---


@settings(max_examples=200)
@given(n_tokens=st.integers(1, 300), size=st.integers(1, 9), min_width=st.integers(1, 4))
def test_slices_tile_the_tokens_in_order(n_tokens, size, min_width):
    slices = [group(size, rank).slice_of(n_tokens, min_width) for rank in range(size)]
    assert [group(size, 0).slice_of(n_tokens, min_width, rank) for rank in range(size)] == slices
    assert slices[0].start == 0
    assert all(s.start + s.n_real == t.start for s, t in pairwise(slices))
    assert slices[-1].start + slices[-1].n_real == n_tokens
    assert len({s.width for s in slices}) == 1
    width = slices[0].width
    assert width == max(min_width, -(-n_tokens // size)), "no wider than it must be"
    assert all(0 <= s.n_real <= width for s in slices)
    ids = torch.arange(n_tokens)[None] + 7
    taken = [s.take(ids) for s in slices]
    assert all(t.shape == (1, width) for t in taken)
    assert torch.cat([t[0, : s.n_real] for s, t in zip(slices, taken, strict=True)]).equal(ids[0])
    assert all(bool((t[0, s.n_real :] == 7).all()) for s, t in zip(slices, taken, strict=True))


@settings(max_examples=100)
@given(chunks=st.lists(st.integers(1, 40), min_size=1, max_size=5), size=st.integers(1, 5), min_width=st.integers(1, 2))
def test_the_row_map_finds_every_token_once(chunks, size, min_width):
    n_tokens = sum(chunks)
    maps = [RowMap(group(size, rank), min_width) for rank in range(size)]
    for n in chunks:
        for row_map in maps:
            row_map.append(n)
    rank, row = maps[-1].locate(torch.arange(n_tokens))
    own = [row_map.own_positions(n_tokens, torch.device("cpu")) for row_map in maps]
    assert sorted(torch.cat(own).tolist()) == list(range(n_tokens))
    found = [int(own[r][i]) for r, i in zip(rank.tolist(), row.tolist(), strict=True)]
    assert found == list(range(n_tokens))
    assert all(bool((positions.diff() > 0).all()) for positions in own)


# --- sessions ---


@pytest.mark.parametrize("draw_from", [3, None])
@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_samples_and_scores_are_those_of_one_process(ranks, architecture, draw_from):
    wanted = cases.sampled(architecture, 1, draw_from)
    assert len({tuple(row) for row in wanted["rows"]}) > 1
    found = ranks.run(cases.sampled, architecture, ranks.size, draw_from)
    for one in found:
        assert one["rows"] == wanted["rows"]
        for name in ("logps", "entropies"):
            assert float((one[name] - wanted[name]).abs().max()) < TOLERANCE
            assert torch.equal(one[name], found[0][name])
        assert one["state kept"] == (draw_from is not None)
    if draw_from is None:
        assert equal([wanted["state"], *(one["state"] for one in found)])


def test_control_another_random_state_draws_other_rows():
    assert cases.sampled("llama", 1, None)["rows"] != cases.sampled("llama", 1, None, random_state=6)["rows"]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_two_steps_end_with_one_adapter(two_ranks, optimizer):
    """Ranks begin with different adapters: the session gives all of them the first one's."""
    wanted = cases.trained("qwen36", 1, optimizer)
    found = two_ranks.run(cases.trained, "qwen36", 2, optimizer)
    assert equal([one["digests"] for one in found])
    assert len(set(found[0]["digests"])) == 2
    for one in found:
        assert relative_l2(one["change"], wanted["change"]) < TOLERANCE
        assert relative_l2(one["logps"], wanted["logps"]) < TOLERANCE


@pytest.mark.parametrize("options", [{"prefix_adapter": "frozen"}, {"gradient_scope": "response"}], ids=str)
def test_two_steps_in_the_other_modes_on_four_ranks(four_ranks, options):
    wanted = cases.trained("qwen36", 1, "SGD", 2, options)
    found = four_ranks.run(cases.trained, "qwen36", 4, "SGD", 2, options)
    assert equal([one["digests"] for one in found])
    for one in found:
        assert relative_l2(one["change"], wanted["change"]) < TOLERANCE


def test_finalize_says_how_it_reduced(rank_pools):
    model = cases.small_model("qwen36")
    trained = [p for p in model.parameters() if p.requires_grad]
    size = (len(trained), sum(p.numel() for p in trained))
    for one in rank_pools[2].run(cases.trained, "qwen36", 2, "SGD", 1):
        (result,) = one["results"]
        assert result.reductions == (Reduction("context", (0, 1), "sum", *size),)
        assert (result.n_prefixes, result.n_sweeps, result.n_swept_tokens) == (1, 1, len(cases.PROMPT) - 1)
    found = rank_pools[4].run(cases.trained, "qwen36", 2, "SGD", 1)
    assert equal([one["digests"] for one in found]), "contexts began with different adapters and end with one"
    for rank, one in enumerate(found):
        context, data = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert one["results"][0].reductions == (
            Reduction("context", context, "sum", *size),
            Reduction("data", data, "mean", *size),
        )
    assert cases.trained("qwen36", 1, "SGD", 1)["results"][0].reductions == ()


def test_updates_are_closed_in_order(two_ranks):
    for early, again, late in two_ranks.run(cases.closed_in_order):
        assert early.startswith("LifecycleError") and "session.finalize()" in early
        assert again.startswith("LifecycleError") and "nothing was captured" in again
        assert late is None


# --- several contexts ---

WORKS = [
    [(cases.PROMPT, [cases.ROWS[0], cases.ROWS[2]]), (cases.OTHER_PROMPT, [cases.ROWS[3]])],
    [(cases.OTHER_PROMPT, [cases.ROWS[1]])],
]


@pytest.mark.parametrize(
    "works",
    [WORKS, [WORKS[0], [(cases.PROMPT, [])]], [WORKS[0], []]],
    ids=["different counts", "a prompt without responses", "no prompt"],
)
def test_gradient_is_the_mean_over_contexts(four_ranks, works):
    one_process = [
        cases.gradient_of(works, 1, which)[0] if works[which] else torch.zeros(()) for which in range(len(works))
    ]
    wanted = (one_process[0] + one_process[1]) / 2
    found = four_ranks.run(cases.gradient_of, works, 2)
    for gradient, _ in found:
        assert relative_l2(gradient, wanted) < TOLERANCE
        assert torch.equal(gradient, found[0][0])


def test_gradient_is_the_mean_over_ranks_without_a_context(two_ranks):
    wanted = (cases.gradient_of(WORKS, 1, 0)[0] + cases.gradient_of(WORKS, 1, 1)[0]) / 2
    for gradient, result in two_ranks.run(cases.gradient_of, WORKS, 1):
        assert relative_l2(gradient, wanted) < TOLERANCE
        assert [(r.group, r.ranks, r.operation) for r in result.reductions] == [("data", (0, 1), "mean")]


# --- memory ---


def test_each_rank_holds_its_part(ranks):
    """97 tokens, chunks of 16, pages of 4 rows: on 2 and on 4 ranks every slice fills whole pages."""
    wanted = cases.held("llama", 97, 16, 1)
    assert wanted["replayed"] == 2 * wanted["captured"], "pages and accumulators, both float32"
    for one in ranks.run(cases.held, "llama", 97, 16, ranks.size):
        assert one["bounds"] == wanted["bounds"] == list(range(0, 97, 16))
        assert one["owned"] == [bound // ranks.size for bound in wanted["bounds"]]
        assert one["captured"] * ranks.size == wanted["captured"]
        assert one["replayed"] * ranks.size == wanted["replayed"]
        assert (one["audit"], one["live"]) == ([], 0)


def test_parts_differ_by_a_few_rows_where_chunks_do_not_divide(ranks):
    found = ranks.run(cases.held, "qwen36", 60, 14, ranks.size)
    for owned in zip(*(one["owned"] for one in found), strict=True):
        assert max(owned) - min(owned) <= (ranks.size - 1) * (len(found[0]["owned"]) - 1)
    for i, bound in enumerate(found[0]["bounds"]):
        assert sum(one["owned"][i] for one in found) == bound
    assert all((one["audit"], one["live"]) == ([], 0) for one in found)


@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_staged_pages_give_the_bits_of_resident_pages(two_ranks, architecture):
    for n_copied, same in two_ranks.run(cases.staged, architecture):
        assert n_copied > 0
        assert all(same)


# --- frozen weights that FSDP2 shards ---


@pytest.mark.parametrize("architecture", ["llama", "qwen36", "glm52"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sharded_frozen_weights_give_the_gradient_of_whole_ones(two_ranks, architecture, checkpointing):
    case = ParityCase("float64", gradient_checkpointing=checkpointing)
    for result, held, whole in two_ranks.run(cases.sharded_parity, architecture, case):
        assert result.gradient_error < TOLERANCE and result.logp_error < TOLERANCE, result
        assert held == 0.5 and whole


@pytest.mark.parametrize("mode", [RESPONSE, FROZEN])
def test_sharded_frozen_weights_in_every_mode(two_ranks, mode):
    for result, *_ in two_ranks.run(cases.sharded_parity, "qwen36", ParityCase("float32", *mode)):
        assert result.gradient_error < 1e-4, result


def test_control_a_sweep_needs_the_gradient_of_the_last_output(two_ranks):
    with pytest.raises(RuntimeError):
        two_ranks.run(cases.sharded_parity, "llama", ParityCase("float64"), "no output in the sweep")


@pytest.mark.parametrize(
    ("size", "variables", "message"),
    [
        (2, {"ACCELERATE_USE_FSDP": "true"}, "ConfigurationError: FSDP version 1 flattens LoRA"),
        (1, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "ConfigurationError: FSDP2 shards frozen weights"),
    ],
)
def test_fsdp_that_cannot_work_is_refused(two_ranks, size, variables, message):
    for error in two_ranks.run(cases.asked_for_fsdp, size, variables):
        assert error is not None and error.startswith(message), error


# --- mistakes ---


@pytest.mark.parametrize(
    "what",
    [
        "prompt",
        "length of the prompt",
        "responses to score",
        "responses to replay",
        "order of responses",
        "number of responses",
        "cut between responses",
        "kind of pass",
        "rows to sample",
        "tokens to sample",
        "temperature",
        "generation config",
    ],
)
def test_different_input_is_refused_on_all_ranks(two_ranks, what):
    named = {"prompt": "prompt;", "response": "responses;", "sample": "sampling options;"}
    named |= {"kind": "responses;", "temperature": "sampling options;", "generation": "generation options;"}
    for error, kept, goes_on in two_ranks.run(cases.different_input, what):
        assert error.startswith("InputError: the 2 ranks of a context were given different"), error
        assert next(text for word, text in named.items() if word in what) in error
        assert kept and goes_on


@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        ("prompt", "InputError: the prompt holds token id", "InputError: the 2 ranks"),
        ("dtype of the prompt", "InputError: the prompt must be a 1-D LongTensor", "InputError: the 2 ranks"),
        ("response", "InputError: the response 0 holds token id", "InputError: the 2 ranks"),
        ("no_grad", "LifecycleError: replay builds a graph", "LifecycleError: another rank of this context refused"),
        ("max_new_tokens", "InputError: max_new_tokens must be", "InputError: the 2 ranks"),
        ("weights", "StaleStateError: the weights changed", "LifecycleError: another rank of this context refused"),
    ],
)
def test_what_one_rank_refuses_all_refuse(two_ranks, what, own, others):
    first, last = two_ranks.run(cases.invalid_on_one, what)
    assert first is not None and first.startswith(others), first
    assert last is not None and last.startswith(own), last


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("nothing", None),
        ("a weight", "ConfigurationError: the 2 ranks of this run hold different weights"),
        ("the dtype", "ConfigurationError: the 2 ranks of this run hold different weights"),
        ("gradient_scope", "InputError: the 2 ranks of a run were given different session options"),
        ("prefix_adapter", "InputError: the 2 ranks of a run were given different session options"),
        ("chunk_tokens", "InputError: the 2 ranks of a run were given different session options"),
        ("temperature", "InputError: the 2 ranks of a run were given different session options"),
        ("positions", "InputError: the 2 ranks of a run were given different session options"),
        ("positions of the environment", "InputError: the 2 ranks of a run were given different session options"),
        ("an option that cannot work", "InputError: the 2 ranks of a run were given different session options"),
    ],
)
def test_ranks_that_are_not_alike_are_refused_at_construction(two_ranks, what, error):
    first, last = two_ranks.run(cases.other_run, what)
    if error is None:
        assert (first, last) == (None, None)
    else:
        assert first is not None and first.startswith(error), first
        assert last is not None
        own = "ConfigurationError: chunk_tokens" if what == "an option that cannot work" else error
        assert last.startswith(own), last


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prompt_that_is_not_finite_on_one_rank_is_refused_on_all(two_ranks, value):
    for error, live_bytes, audit in two_ranks.run(cases.not_finite, value):
        assert error is not None and error.startswith("NumericsError: the prompt's hidden state is not finite"), error
        assert (live_bytes, audit) == (0, [])
    assert [error for error, *_ in two_ranks.run(cases.not_finite, 1.0)] == [None, None]


@pytest.mark.parametrize("context_parallel_size", [1, 2])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_stepped_on_by_none(two_ranks, context_parallel_size, factor):
    for first, again, is_finite, audit in two_ranks.run(cases.gradient_not_finite, context_parallel_size, factor):
        assert first is not None and first.startswith("NumericsError: the gradient of this update is NaN or infinite")
        assert (again, is_finite, audit) == (None, True, [])
    for first, *_ in two_ranks.run(cases.gradient_not_finite, context_parallel_size, 1.0):
        assert first is None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("device", "ConfigurationError: the ranks are connected by gloo, which carries tensors on cpu here, but"),
        ("size", "ConfigurationError: context_parallel_size=3 does not divide the 2 processes"),
        ("adapter", "ConfigurationError: NotSplit cannot split a prompt over 2 ranks; use context_parallel_size=1"),
        ("local", "ConfigurationError: 2 processes are running, but the local backend reduces no gradients"),
        ("local with a context", "ConfigurationError: context_parallel_size=2 needs several processes"),
        ("name", "ConfigurationError: backend='fsdp' is not known; allowed: 'auto', 'local', 'accelerate'"),
        ("another size than the backend's", "ConfigurationError: context_parallel_size=2, but the given Accelerate"),
    ],
)
def test_configurations_that_cannot_work_are_refused(two_ranks, what, message):
    for error in two_ranks.run(cases.refused, what):
        assert error is not None and error.startswith(message), error


@pytest.mark.parametrize(
    ("name", "message"), [("auto", "1 processes"), ("accelerate", "1 processes"), ("local", "one")]
)
def test_a_context_needs_several_processes(name, message):
    assert "WORLD_SIZE" not in os.environ
    with pytest.raises(ConfigurationError, match=message):
        make_backend(name, 2)


def test_a_gradient_that_is_there_already_is_not_summed_again(two_ranks):
    error, _ = cases.finalized_twice(1)
    assert error is None, "one process may accumulate over updates"
    for error, _ in two_ranks.run(cases.finalized_twice, 2):
        assert error.startswith("LifecycleError: the model still holds the gradient of an earlier update"), error


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_finalize_twice_is_refused_everywhere_and_changes_nothing(rank_pools, n_ranks):
    for error, change in rank_pools[n_ranks].run(cases.finalized_again):
        assert error.startswith("LifecycleError: finalize() was called, but nothing was captured"), error
        assert change == 0.0


def test_a_context_without_a_prompt_does_not_sum_what_is_summed(rank_pools):
    for first, second, once, again in rank_pools[4].run(cases.idle_contexts):
        assert first == ["context", "data"]
        assert "data" in second
        assert relative_l2(again, once) < TOLERANCE, "the same prompt everywhere: the mean of equals"


def test_groups_are_made_anew_after_a_restart_of_torch_distributed():
    pool = RankPool(2)
    try:
        assert pool.run(cases.groups_after_a_restart) == [[0, 1], [0, 1]]
    finally:
        pool.close()


def test_the_carry_keeps_the_states_of_one_rank(rank_pools):
    kept = {n: rank_pools[n].run(cases.saved_for_the_carry)[0] for n in (2, 4)}
    assert kept[2] == kept[4] == (2 * kept[2][1], kept[2][1]), "own transition and start"


def test_a_prompt_of_one_token_is_not_swept(two_ranks):
    assert two_ranks.run(cases.one_token_prompt) == [0, 0]


def test_different_losses_of_one_response_are_refused(two_ranks):
    for error in two_ranks.run(cases.different_loss):
        assert error.startswith("NumericsError: the 2 ranks of a context computed different losses"), error


def test_layers_behind_hooks_are_refused_where_they_would_be_split(two_ranks):
    said, _ = cases.behind_hooks(1)
    assert said is None
    for error, _ in two_ranks.run(cases.behind_hooks, 2):
        assert error.startswith("UnsupportedModelError: the linear-attention layer 0 ran its stock forward"), error


def test_the_local_backend_is_refused_where_several_processes_were_launched(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="2 processes"):
        make_backend("local")


def test_rows_that_nothing_read_have_a_gradient_of_zero():
    pool = PagePool(4)
    pool.open("prompt")
    layer = PagedLayerState(AttentionKVSpec(0, 2, 8, 8, torch.float32), pool, "prompt", torch.device("cpu"))
    layer.append({name: torch.randn(1, 2, 6, 8) for name in "kv"})
    layer.has_gradient = True  # a sweep of a context takes the same path on every rank
    found = layer.cotangents(2, 6)
    assert {name: (tuple(t.shape), float(t.abs().max())) for name, t in found.items()} == {
        "k": ((1, 2, 4, 8), 0.0),
        "v": ((1, 2, 4, 8), 0.0),
    }
