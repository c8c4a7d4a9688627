"""Megatron's backend on gloo ranks: groups, gradients of one process, optimizers, experts and checkpoints.

What the ranks run is in tests/rank_megatron.py. Where all that is trained is float64, so are Megatron's buffers, and
results are held to what the other backends are held to.
"""

import pytest
import rank_experts
import rank_megatron as cases
import rank_trainers
import torch

from longstraw_sdk import ConfigurationError
from longstraw_sdk.backends import MegatronBackend, make_backend, megatron_import
from longstraw_sdk.evidence.parity import ParityCase, relative_l2

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}


def assert_parity(results, dtype):
    for result in results:
        assert result.gradient_error < TOLERANCE[dtype] and result.logp_error < TOLERANCE[dtype], result


# Groups, choice, refusals


@pytest.mark.parametrize(
    ("sizes", "tables"),
    [
        ((4, 4), ("0123", "0123", "0 1 2 3", "0123", "0 1 2 3")),
        ((2, 2), ("01 23", "01 23", "02 13", "0123", "02 13")),
        ((4, 2), ("0123", "01 23", "0 1 2 3", "0123", "02 13")),
    ],
    ids=str,
)
def test_groups(rank_pools, sizes, tables):
    """Context, experts, data, data and context, copies of experts."""
    for rank, (found, made) in enumerate(rank_pools[4].run(cases.group_table, *sizes)):
        own = [next(g for g in table.split() if str(rank) in g) for table in tables]
        assert ["".join(map(str, ranks)) for ranks in found] == own
        assert made == [*sizes, 4]


def test_auto_takes_megatron_only_where_it_is_initialised(rank_pools):
    wanted = ["AccelerateBackend", "MegatronBackend", "AccelerateBackend"]
    assert rank_pools[2].run(cases.chosen) == [wanted] * 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("context", "context_parallel_size=3 does not divide the 2 processes"),
        ("experts", "expert_parallel_size=3 must divide the 2 processes, and divide context_parallel_size=1 or"),
        ("other sizes", "initialised with context_parallel_size=2 instead of 1; initialise it with"),
        ("tensor parallel", "initialised with tensor_model_parallel_size=2 instead of 1"),
        ("tensor parallel experts", "initialised with expert_tensor_parallel_size=2 instead of 1"),
        ("unfrozen later", "parameters are trained now that were not when the session began"),
    ],
)
def test_what_cannot_work_is_refused(rank_pools, what, message):
    for error in rank_pools[2].run(cases.refused, what):
        assert error is not None and message in error, error


@pytest.mark.parametrize("missing", [("megatron-core",), ("einops",), ("megatron-core", "einops")], ids=str)
def test_a_missing_package_names_the_extra(monkeypatch, missing):
    needed = {name: f"not_there.{name}" if name in missing else "os" for name in ("megatron-core", "einops")}
    monkeypatch.setattr(megatron_import, "_NEEDED", needed)
    with pytest.raises(ConfigurationError, match=rf"needs {' and '.join(missing)}: pip install .longstraw-sdk\[meg"):
        make_backend("megatron")


def test_one_process_without_a_launcher_is_refused():
    with pytest.raises(ConfigurationError, match="start it with torchrun or accelerate launch"):
        MegatronBackend()


# Gradients


@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_parity(rank_pools, architecture, dtype):
    found = rank_pools[2].run(cases.parity, architecture, ParityCase(dtype, prompt_tokens=50))
    assert_parity([result for result, _ in found], dtype)
    assert [n_finalized for _, n_finalized in found] == [1, 1]


@pytest.mark.parametrize(("sizes", "dtype"), [((2, 2, 2), "float32"), ((4, 4, 4), "float64"), ((4, 4, 2), "float64")])
def test_parity_with_experts_on_several_ranks(rank_pools, sizes, dtype):
    found = rank_pools[sizes[0]].run(cases.expert_parity, *sizes[1:], ParityCase(dtype, prompt_tokens=50))
    assert_parity([result for result, *_ in found], dtype)
    assert all(n_finalized == 1 and n_dispatched > 0 for _, n_finalized, n_dispatched in found)


def test_parity_of_contexts_with_prompts_of_their_own(rank_pools):
    found = rank_pools[4].run(cases.expert_parity, 2, 2, ParityCase("float64", prompt_tokens=50), None, True)
    assert_parity([result for result, *_ in found], "float64")


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4)], ids=str)
def test_contexts_that_share_experts_may_differ_in_all_they_do(rank_pools, sizes):
    for error, n_sweeps in rank_pools[sizes[0]].run(cases.contexts_that_share_experts, *sizes[1:]):
        assert error < 1e-10
        assert n_sweeps == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ranks_whose_experts_nobody_asks(rank_pools, checkpointing):
    case = ParityCase("float64", gradient_checkpointing=checkpointing, prompt_tokens=50)
    found = rank_pools[2].run(cases.routed_to_few, 2, 2, case)
    assert_parity([result for result, *_ in found], "float64")
    assert found[0][1] > 0
    assert found[1][1] == 0 < found[1][2]


def test_control_megatrons_own_scaling_divides_by_all_ranks(rank_pools):
    for result, _ in rank_pools[2].run(
        cases.parity, "llama", ParityCase("float32", prompt_tokens=50), "scaled by default"
    ):
        assert result.gradient_error == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("fault", ["experts not marked", "LoRA B cut expert by expert"])
def test_control_experts(rank_pools, fault):
    for result, *_ in rank_pools[2].run(cases.expert_parity, 2, 2, ParityCase("float32", prompt_tokens=50), fault):
        assert result.gradient_error > 1e-2, result


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 1), (2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 2, 1)], ids=str)
def test_gradients_over_several_updates_are_those_of_the_accelerate_backend(rank_pools, sizes):
    pool = rank_pools[sizes[0]]
    ours, theirs = (pool.run(cases.updates, kind, *sizes[1:]) for kind in ("megatron", "accelerate"))
    for (found, _, is_buffer), (wanted, *_) in zip(ours, theirs, strict=True):
        assert found == wanted
        assert is_buffer
    assert wanted[0][3] is None and wanted[2][1] is None, "what nobody has a gradient of stays without one"


def test_reductions_say_what_was_reduced(rank_pools):
    for rank, (_, reductions, _) in enumerate(rank_pools[4].run(cases.updates, "megatron", 4, 2)):
        copies = (0, 2) if rank % 2 == 0 else (1, 3)
        assert reductions[0] == [((0, 1, 2, 3), 3, 6), (copies, 1, 2)]


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4), (4, 1, 2)], ids=str)
def test_experts_that_contexts_share_are_divided_once(rank_pools, sizes):
    """Rank r adds 4 r to its expert; the copies are those `expert_size` ranks apart."""
    n_ranks, context_size, expert_size = sizes
    for rank, found in enumerate(rank_pools[n_ranks].run(cases.reduced_twice, context_size, expert_size)):
        mean = sum(range(4 * (rank % expert_size), 4 * n_ranks, 4 * expert_size)) * context_size / n_ranks
        assert found == [[mean] * 2] * 2


@pytest.mark.parametrize(("n_ranks", "context_size"), [(2, 2), (2, 1), (4, 2)])
def test_a_sessions_updates(rank_pools, n_ranks, context_size):
    """The second one has a prompt on the first context only; nothing is made anew between the two."""
    n_contexts = n_ranks // context_size
    alone = cases.session_gradients_of_one_process(range(n_contexts))
    wanted = [sum(alone) / n_contexts, alone[0] / n_contexts]
    for updates, twice, not_cleared, second, n_finalized in rank_pools[n_ranks].run(cases.session_life, context_size):
        for (found, kept), gradient in zip(updates, wanted, strict=True):
            assert relative_l2(found, gradient) < 1e-4
            assert kept, "a refused finalize changes nothing"
        assert "nothing was captured or replayed since the last one" in twice
        assert context_size == 1 or "gradient of an earlier update" in not_cleared
        assert "another session" in second
        assert n_finalized == 2 + (context_size > 1)


def test_a_bfloat16_adapter_gets_the_rounded_sum(rank_pools):
    assert rank_pools[2].run(cases.bfloat16_adapter) == [({(torch.bfloat16, torch.float32)}, True, True)] * 2


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 4, 2)], ids=str)
def test_two_optimizer_steps_give_one_adapter(rank_pools, sizes):
    losses, adapter, _ = rank_experts.two_steps(1, 1)
    found = rank_pools[sizes[0]].run(cases.two_steps, *sizes[1:])
    for their_losses, theirs, _ in found:
        assert their_losses == pytest.approx(losses, rel=1e-10)
        assert relative_l2(theirs, adapter) < 1e-10
    assert len({digest for *_, digest in found}) == 1


# Dispatcher


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3, 4, 1, 1, 1, 1], [2] * 8],
        [[1, 2, 0, 4, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]],
        [[0] * 8, [0, 0, 0, 0, 0, 0, 1, 0]],
    ],
    ids=["even", "none for the second", "none from the first"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dispatcher_gives_what_our_exchange_gives(rank_pools, counts, dtype):
    arriving = [sum(sum(c[4 * r : 4 * r + 4]) for c in counts) for r in range(2)]
    for rank, found in enumerate(rank_pools[2].run(cases.dispatched, counts, 8, dtype)):
        assert found == ([0.0, 0.0, 0.0], True, arriving[rank], True)


# Optimizers and the trainer


@pytest.mark.parametrize("distributed", [False, True])
def test_megatrons_optimizer_steps_as_adamw(rank_pools, distributed):
    wanted, control = cases.optimizer_of_one_process(), cases.optimizer_of_one_process(eps=0.1001)
    found = rank_pools[2].run(cases.real_optimizer, distributed)
    for adapter, _, stale, refused in found:
        assert relative_l2(adapter, wanted) < 1e-6 < relative_l2(control, wanted)
        assert stale
        assert "any torch optimizer works on .grad" in refused[0]
        assert "they must be equal" in refused[1]
        assert not distributed or "clip_grad" in refused[2]
    assert len({digest for _, digest, *_ in found}) == 1


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen36", {}),
        pytest.param(
            "glm52",
            {"expert_parallel_size": 2, "optim": "adamw_torch", "adam_epsilon": 1e-3, "max_grad_norm": 0.01},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_three_steps_of_the_trainer(rank_pools, architecture, options):
    """SGD, and AdamW behind a norm that always clips, on `.grad`."""
    options = {"max_steps": 3, "learning_rate": 0.05} | options
    alone = rank_trainers.train("ours", architecture, {k: v for k, v in options.items() if k != "expert_parallel_size"})
    found = rank_pools[2].run(cases.train, architecture, options | {"context_parallel_size": 2})
    assert len({digest for (_, _, digest), _ in found}) == 1
    (logged, update, _), n_finalized = found[0]
    assert n_finalized == 3 and len(logged["reward"]) == 3
    assert logged["reward"] == alone[0]["reward"]
    assert logged["loss"] == pytest.approx(alone[0]["loss"], rel=1e-3, abs=1e-5)
    assert alone[1].norm() > 0.01
    assert relative_l2(update, alone[1]) < 1e-4


# Checkpoints


def test_checkpoints_move_between_numbers_of_ranks_that_hold_the_experts(rank_pools, tmp_path):
    folder = str(tmp_path / "saved" / "at two")
    saved = rank_pools[2].run(cases.save, folder, 2)[0]
    assert saved[1:] == ({2.0}, 0.01)
    for n_ranks, expert_size in ((2, 2), (2, 1), (4, 4), (4, 2)):
        for found in rank_pools[n_ranks].run(cases.load, folder, expert_size):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], saved[0], strict=True))
            assert found[1:] == saved[1:]


def test_checkpoints_that_cannot_be_used_are_refused(rank_pools, tmp_path):
    folder = str(tmp_path / "adapter alone")
    rank_pools[2].run(cases.save, folder, 2, False)
    for missing, factored, foreign in rank_pools[2].run(cases.load_refused, folder):
        assert "holds an adapter and no optimizer" in missing
        assert "Adafactor keeps row_var" in factored
        assert "object is none of torch's optimizers" in foreign
