"""Experts spread over ranks: the gradient of one process that holds them all.

Ranks are processes on gloo (tests/rank_pool.py); what they run is in tests/rank_experts.py. References are conventional
autograd of the whole model in one process; tolerances are those of `longstraw_sdk.evidence.parity`.
"""

import pytest
import rank_experts as cases
import torch

from longstraw_sdk import ConfigurationError
from longstraw_sdk.evidence.parity import ParityCase, relative_l2
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.glm52.expert_shards import keep_expert_shard, load_expert_shard

MODES = [("full", "live"), ("response", "live"), ("full", "frozen")]
SIZES = [(2, 2, 2), (4, 4, 4), (4, 2, 2), (4, 4, 2)]
"""Ranks, ranks per context, ranks per set of experts."""

slow = pytest.mark.slow

pytestmark = pytest.mark.xdist_group("ranks")


def short(dtype, *mode, **changes):
    return ParityCase(dtype, *mode, **({"prompt_tokens": 50} | changes))


def assert_parity(results, dtype):
    tolerance = {"float64": 1e-10, "float32": 1e-4}[dtype]
    for result in results:
        assert result.gradient_error < tolerance and result.logp_error < tolerance, result


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("scope", "prefix_adapter"), [MODES[0], *(pytest.param(*m, marks=slow) for m in MODES[1:])])
def test_float64(rank_pools, sizes, scope, prefix_adapter):
    assert_parity(
        rank_pools[sizes[0]].run(cases.parity, *sizes[1:], short("float64", scope, prefix_adapter)), "float64"
    )


@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES[1:])
def test_float64_of_other_gradients(rank_pools, scope, prefix_adapter):
    case = short("float64", scope, prefix_adapter)
    assert_parity(rank_pools[4].run(cases.parity, 4, 2, case), "float64")


def test_float64_of_six_layers_and_a_longer_prompt(rank_pools):
    assert_parity(rank_pools[2].run(cases.deep_parity, 2, 2, ParityCase("float64")), "float64")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 4, 2), *(pytest.param(s, marks=slow) for s in SIZES[1:3])], ids=str)
def test_float32(rank_pools, sizes):
    assert_parity(rank_pools[sizes[0]].run(cases.parity, *sizes[1:], short("float32")), "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": 1},
        {"prompt_tokens": 2},
        {"prompt_tokens": 3, "response_tokens": (1, 1)},
        {"chunk_tokens": 13, "page_tokens": 3},
        {"gradient_checkpointing": True},
        {"replay_tokens": 48},
    ],
    ids=str,
)
def test_float64_whatever_the_lengths(rank_pools, changes):
    assert_parity(rank_pools[2].run(cases.parity, 2, 2, short("float64", **changes)), "float64")


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(m, marks=slow) for m in MODES[1:])])
def test_contexts_with_prompts_of_their_own(rank_pools, mode):
    found = rank_pools[4].run(cases.parity, 2, 2, short("float64", *mode), None, True)
    assert_parity(found, "float64")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 4, 4)], ids=str)
def test_ranks_whose_experts_nobody_asks(rank_pools, sizes, checkpointing):
    case = short("float64", gradient_checkpointing=checkpointing)
    found = rank_pools[sizes[0]].run(cases.routed_to_few, *sizes[1:], case)
    assert_parity([result for result, *_ in found], "float64")
    assert found[0][1] > 0
    assert all(rows == 0 and passes > 0 for _, rows, passes in found[1:])


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        ("experts summed over the context", (4, 4, 2)),
        ("copies of experts not summed", (4, 4, 2)),
        ("gradient averaged over the context", (2, 2, 2)),
        ("LoRA B cut expert by expert", (2, 2, 2)),
        ("gradients do not travel back", (2, 2, 2)),
    ],
)
def test_control(rank_pools, fault, sizes):
    found = rank_pools[sizes[0]].run(cases.parity, *sizes[1:], short("float32"), fault)
    assert all(result.gradient_error > 1e-2 for result in found), found


def test_control_experts_without_their_mark_are_refused(rank_pools):
    with pytest.raises(RuntimeError, match="hold different weights"):
        rank_pools[2].run(cases.parity, 2, 2, short("float32"), "experts not marked")


@pytest.mark.parametrize("scope", ["full", "response", "frozen"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4)], ids=str)
def test_contexts_that_share_experts_may_differ_in_all_they_do(rank_pools, sizes, scope):
    for error, n_sweeps in rank_pools[sizes[0]].run(cases.uneven_work, *sizes[1:], scope):
        assert error < 1e-10
        assert n_sweeps == (scope == "full")


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 2, 4)], ids=str)
def test_a_context_without_a_prompt_serves_the_others(rank_pools, sizes):
    for error, _ in rank_pools[sizes[0]].run(cases.uneven_work, *sizes[1:], "full", True):
        assert error < 1e-10


def test_control_experts_of_several_contexts_not_divided(rank_pools):
    found = rank_pools[2].run(cases.uneven_work, 1, 2, "full", False, "not divided by the contexts")
    assert all(error > 0.1 for error, _ in found)


@pytest.mark.parametrize(
    ("what", "message"), [("packs", "2 responses make 2 packs"), ("order", "a replay is open whose backward has not")]
)
def test_contexts_that_share_experts_keep_to_the_order(rank_pools, what, message):
    for error in rank_pools[2].run(cases.out_of_turn, what):
        assert error is not None and message in error, error


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 4, 2), *(pytest.param(s, marks=slow) for s in SIZES[1:3])], ids=str)
def test_two_optimizer_steps_give_one_adapter(rank_pools, sizes):
    losses, adapter, _ = cases.two_steps(1, 1)
    found = rank_pools[sizes[0]].run(cases.two_steps, *sizes[1:])
    for their_losses, theirs, _ in found:
        assert their_losses == pytest.approx(losses, rel=1e-10)
        assert relative_l2(theirs, adapter) < 1e-10
    assert len({digest for *_, digest in found}) == 1


def test_sampling_draws_the_rows_of_one_process(rank_pools):
    rows, scores = cases.sampled(1, 1)
    for theirs, their_scores in rank_pools[2].run(cases.sampled, 2, 2):
        assert theirs == rows
        assert relative_l2(their_scores, scores) < 1e-5


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_parts_are_loaded_and_put_together(rank_pools, tmp_path, max_shard_size):
    cases.whole_model().unload().save_pretrained(tmp_path, max_shard_size=max_shard_size)
    for size in (2, 4):
        for found in rank_pools[size].run(cases.round_trip, str(tmp_path), size):
            assert found == {
                "gathered": True,
                "cut": True,
                "loaded": True,
                "experts held": [8 // size],
                "largest": 8 // size * 40 * 32,
            }


def test_a_loaded_part_is_an_ordinary_model(tmp_path):
    model = cases.whole_model().unload()
    model.generation_config.eos_token_id = 5
    model.save_pretrained(tmp_path)
    part = load_expert_shard(tmp_path, 1, 4, dtype=torch.bfloat16)
    assert type(part) is type(model) and part.dtype == torch.bfloat16
    assert part.generation_config.eos_token_id == 5
    assert part.config.n_routed_experts == 8 and part.name_or_path == str(tmp_path)
    gate = part.model.layers[2].mlp.gate
    assert gate.weight.shape[0] == 8 and gate.weight.dtype == torch.float32, "kept as from_pretrained keeps it"
    assert torch.equal(part.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_stacked_experts_are_loaded_too(tmp_path):
    from safetensors.torch import save_file

    model = cases.whole_model().unload()
    model.config.save_pretrained(tmp_path)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    wanted = base_model_of(keep_expert_shard(cases.whole_model().unload(), 2, 4)).state_dict()
    found = load_expert_shard(tmp_path, 2, 4, dtype=torch.float32).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_what_cannot_be_loaded_is_named(tmp_path):
    cases.whole_model().unload().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor"):
        load_expert_shard(tmp_path, 0, 2)
    with pytest.raises(ConfigurationError, match="expert_parallel_size=3 does not divide the 8 experts"):
        load_expert_shard(tmp_path, 0, 3)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("whole model", "holds experts 0 to 7 of 8, but with expert_parallel_size=2 rank"),
        ("parts of another rank", "with expert_parallel_size=2 rank"),
        ("one process, parts", "holds experts 0 to 3 of 8, but with expert_parallel_size=1 rank 0 must hold"),
        ("no experts", "DenseAdapter cannot spread experts over ranks"),
        ("sizes", "expert_parallel_size=3 must divide the 2 processes, and divide context_parallel_size=1 or be"),
    ],
)
def test_what_cannot_work_is_refused(rank_pools, what, message):
    for error in rank_pools[2].run(cases.refused, what):
        assert error is not None and message in error, error
