"""`LongStrawGRPOTrainer` on several ranks: contexts that share prompts, and contexts beside each other.

Three steps of `.train()` in float32 with SGD; adapters agree to 1e-4 of their update, as one process agrees with TRL.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_trainers
import torch
import trl_setup
from peft import PeftModel
from safetensors.torch import load_file

from longstraw_sdk.evidence.manifest import problems_of
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model

pytestmark = pytest.mark.timeout(600)
STEPS = {"max_steps": 3}


@pytest.fixture
def two(rank_pools):
    return rank_pools[2]


@pytest.fixture
def four(rank_pools):
    return rank_pools[4]


def agree(results):
    """All ranks logged the same and hold the same adapter; returns the first one's."""
    assert len({digest for _, _, digest in results}) == 1
    assert all(logged["reward"] == results[0][0]["reward"] for logged, _, _ in results)
    return results[0][:2]


def assert_same_run(found, wanted):
    (logged, update), (wanted_logged, wanted_update) = found, wanted
    assert logged["reward"] == wanted_logged["reward"] and len(logged["reward"]) == 3
    for name in ("reward_std", "loss", "num_tokens", "entropy"):
        assert logged[name] == pytest.approx(wanted_logged[name], rel=1e-3, abs=1e-5), name
    assert wanted_update.norm() > 0.01
    assert relative_l2(update, wanted_update) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen36", {}),
        ("qwen36", {"beta": 0.1, "num_iterations": 2, "gradient_scope": "response"}),
        ("llama", {"prefix_adapter": "frozen", "scale_rewards": "batch"}),
        pytest.param("glm52", {"top_entropy_quantile": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_that_share_prompts_train_as_one_process(two, architecture, options):
    options = STEPS | options
    alone = rank_trainers.train("ours", architecture, options)
    shared = agree(two.run(rank_trainers.train, "ours", architecture, options | {"context_parallel_size": 2}))
    assert_same_run(shared, alone[:2])


def test_two_ranks_with_prompts_of_their_own_train_as_trl_does(two):
    ours, stock = (agree(two.run(rank_trainers.train, kind, "qwen36", STEPS)) for kind in ("ours", "stock"))
    assert_same_run(ours, stock)


@pytest.mark.slow
def test_two_contexts_of_two_ranks_train_as_two_ranks(two, four):
    options = STEPS | {"generation_batch_size": 8, "steps_per_generation": None}
    wide = agree(four.run(rank_trainers.train, "ours", "qwen36", options | {"context_parallel_size": 2}))
    assert_same_run(wide, agree(two.run(rank_trainers.train, "ours", "qwen36", options)))


def test_ranks_that_hold_parts_of_the_frozen_weights_train_as_one_process(two):
    alone = rank_trainers.train("ours", "qwen36", STEPS)
    *found, spread = zip(
        *two.run(rank_trainers.train_sharded, "qwen36", STEPS | {"context_parallel_size": 2}), strict=True
    )
    assert min(spread) > 20
    assert_same_run(agree(list(zip(*found, strict=True))), alone[:2])


CLIPPED = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 0.05, "max_grad_norm": 0.01}
"""Adam with an epsilon that hides rounding of near-zero gradients, behind a norm that always clips."""


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_hold_the_experts_together_train_as_one_process(rank_pools, n_ranks, tmp_path):
    """A clipped gradient needs the norm over all experts; what the checkpoint holds is whole."""
    options = STEPS | CLIPPED | {"save_strategy": "steps", "save_steps": 3}
    alone = rank_trainers.train("ours", "glm52", options, str(tmp_path / "alone"))
    spread = options | {"context_parallel_size": n_ranks, "expert_parallel_size": n_ranks}
    found = agree(rank_pools[n_ranks].run(rank_trainers.train, "ours", "glm52", spread, str(tmp_path / "spread")))
    assert_same_run(found, alone[:2])
    assert found[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-5)
    assert min(alone[0]["grad_norm"]) > 1.5 * CLIPPED["max_grad_norm"]
    saved, wanted = (
        load_file(tmp_path / run / "checkpoint-3" / "adapter_model.safetensors") for run in ("spread", "alone")
    )
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in wanted.items()}
    assert max(relative_l2(saved[n], wanted[n]) for n in wanted) < 1e-4


@pytest.mark.parametrize("sizes", [(2, 1, 2), pytest.param((4, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_contexts_that_share_experts_train_as_contexts_that_do_not(rank_pools, two, sizes):
    """Their prompts differ in length, and masked rows leave them different numbers of replays."""
    options = STEPS | CLIPPED | {"generation_batch_size": 8, "steps_per_generation": None}
    options |= {"mask_truncated_completions": True, "max_completion_length": 24}
    apart = agree(two.run(rank_trainers.train, "ours", "glm52", options))
    spread = options | {"context_parallel_size": sizes[1], "expert_parallel_size": sizes[2]}
    found = agree(rank_pools[sizes[0]].run(rank_trainers.train, "ours", "glm52", spread))
    assert_same_run(found, apart)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param((2, 1), id="two ranks, then one", marks=pytest.mark.slow), pytest.param((1, 2), id="one, then two")],
)
def test_checkpoints_move_between_numbers_of_ranks_that_hold_the_experts(two, tmp_path, sizes):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2} | CLIPPED
    unbroken = rank_trainers.train("ours", "glm52", options, str(tmp_path / "unbroken"))
    first, second = ({"context_parallel_size": n, "expert_parallel_size": n} if n > 1 else {} for n in sizes)
    folder = str(tmp_path / "moved")

    def run(size, function, *args):
        return two.run(function, *args)[0] if size == 2 else function(*args)

    run(sizes[0], rank_trainers.train, "ours", "glm52", options | first | {"max_steps": 2}, folder)
    resumed = run(sizes[1], rank_trainers.resume, "glm52", options | second, folder)
    assert resumed[0]["reward"] == unbroken[0]["reward"]
    assert relative_l2(resumed[1], unbroken[1]) < 1e-4


@pytest.mark.slow
def test_control_two_ranks_with_prompts_of_their_own_are_another_run(two):
    shared = two.run(rank_trainers.train, "ours", "qwen36", STEPS | {"context_parallel_size": 2})[0]
    beside = two.run(rank_trainers.train, "ours", "qwen36", STEPS)[0]
    assert shared[0]["reward"] != beside[0]["reward"]
    assert relative_l2(shared[1], beside[1]) > 0.1


def test_only_the_first_rank_of_a_context_asks_for_rewards(two):
    assert two.run(rank_trainers.count_reward_calls) == [3, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_replay_receives_the_bytes_of_the_formula(two, dtype):
    """One attention layer, W = 2 ranks with L = 32 of 64 tokens each: inputs in their dtype, sums in the wider one."""
    (received, (heads, kv_heads, dim), formula), other = two.run(rank_trainers.replay_bytes, dtype, 64)
    narrow, wide, slice_tokens = dtype.itemsize, max(4, dtype.itemsize), 32
    inputs = slice_tokens * dim * narrow * (2 * (heads + 2 * kv_heads) + heads)  # q, k, v, twice; the output's gradient
    found = slice_tokens * heads * (dim + 1) * wide  # attention to the other rank's pages, and its log-sum-exp
    back = slice_tokens * wide * (dim * (heads + 2 * kv_heads) + 2 * heads)  # gradients; log-sum-exp and delta
    outputs = 2 * slice_tokens * 4 if dtype == torch.bfloat16 else 2 * slice_tokens * 8  # log-probs and entropies
    agreement = 16 + 16  # a hash of the responses and whether all accept them; two numbers of the loss's gradient
    assert received == other[0] == formula == inputs + found + back + outputs + agreement


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_replay_of_a_hybrid_model_receives_the_bytes_of_the_formula(two, checkpointing):
    options = (torch.float32, 33, "qwen36", 4, checkpointing)
    (received, _, formula), other = two.run(rank_trainers.replay_bytes, *options)
    assert received == other[0] == formula


def test_a_window_of_masked_rows_steps_on_ranks_too(two):
    assert two.run(rank_trainers.train_masked) == [(2, 0, 0.0)] * 2


@pytest.mark.slow
def test_an_interrupted_run_of_two_ranks_goes_on_in_one_process(two, tmp_path):
    """A checkpoint holds no trace of how many ranks wrote it."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    unbroken = rank_trainers.train("ours", "qwen36", options, str(tmp_path / "unbroken"))
    sharded = options | {"context_parallel_size": 2}
    two.run(rank_trainers.train, "ours", "qwen36", sharded | {"max_steps": 2}, str(tmp_path / "sharded"))
    resumed = rank_trainers.resume("qwen36", options, str(tmp_path / "sharded"))
    assert resumed[0]["reward"] == unbroken[0]["reward"]
    assert relative_l2(resumed[1], unbroken[1]) < 1e-4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"context_parallel_size": 3}, "context_parallel_size=3 does not divide the 2 processes"),
        ({"context_parallel_size": 0}, "at least 1, got 0"),
        ({"per_device_train_batch_size": 2, "steps_per_generation": 1}, "not a multiple of num_generations=4"),
        ({"sharding": "local"}, r"2 processes are running.*backend=.accelerate"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_on_every_rank(two, options, match):
    with pytest.raises(RuntimeError, match=rf"(?s)rank 0: ConfigurationError.*{match}.*rank 1: ConfigurationError"):
        two.run(rank_trainers.train, "ours", "qwen36", STEPS | options)


EXAMPLES = Path(__file__).parent.parent / "examples"


def start_example(name, architecture, folder, configuration="cp2", **options):
    """An example as the README starts it, in `folder`, which gets its model and data; returns the launcher."""
    tiny_model(architecture).unload().save_pretrained(folder / "model")
    trl_setup.word_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": text, "answer": "t5"} for text in trl_setup.prompts(8)["prompt"]]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model_name_or_path": "model", "dataset_name": "data.jsonl", "output_dir": "out", "num_generations": 4,
        "per_device_train_batch_size": 4, "max_completion_length": 8, "chunk_tokens": 16, "page_tokens": 8,
        "context_parallel_size": 2, "dtype": "float32", "bf16": False, "use_cpu": True, "report_to": "none",
    } | options  # fmt: skip
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", EXAMPLES / "accelerate" / f"{configuration}.yaml", EXAMPLES / name]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_the_glm_example_trains_with_experts_spread_over_ranks(tmp_path):
    launcher = start_example("grpo_glm52.py", "glm52", tmp_path, expert_parallel_size=2, max_steps=2)
    try:
        assert launcher.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        launcher.kill()
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    experts = [t for n, t in saved.items() if ".experts.lora_A" in n]
    assert len(experts) == 2 and all(t.shape == (8 * 16, 20) for t in experts), "all eight experts, rank 16"
    model = PeftModel.from_pretrained(tiny_model("glm52").unload(), tmp_path / "out")
    assert max(float(p.abs().max()) for n, p in model.named_parameters() if ".experts.lora_B" in n) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "name", "architecture", "options"),
    [
        ("cp8", "grpo_qwen36.py", "qwen36", {"context_parallel_size": 8}),
        ("cp8", "grpo_glm52.py", "glm52", {"context_parallel_size": 8, "expert_parallel_size": 8}),
        ("fsdp2_cp2", "grpo_qwen36.py", "qwen36", {}),
        (
            "megatron_cp4_ep4",
            "grpo_glm52.py",
            "glm52",
            {"context_parallel_size": 4, "expert_parallel_size": 4, "sharding": "megatron"},
        ),
    ],
)
def test_examples_run_with_every_configuration(tmp_path, configuration, name, architecture, options):
    launcher = start_example(name, architecture, tmp_path, configuration, max_steps=2, **options)
    try:
        assert launcher.wait(timeout=500) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        launcher.kill()
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert max(float(t.abs().max()) for n, t in saved.items() if ".lora_B" in n) > 0


def test_when_a_rank_of_the_example_is_killed_the_others_end_and_it_is_named(tmp_path):
    launcher = start_example("grpo_qwen36.py", "qwen36", tmp_path, max_steps=1000, save_steps=1)
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "out" / "checkpoint-2").exists():  # then the first one is whole
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        os.kill(rank_process(launcher.pid, 1), signal.SIGKILL)
        assert launcher.wait(timeout=60) != 0
    finally:
        launcher.kill()
    said = (tmp_path / "log").read_text()
    root_cause = said[said.index("Root Cause") :]
    assert "rank      : 1" in root_cause and "SIGKILL" in root_cause
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert problems_of(checkpoint) == []
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 1
    assert load_file(checkpoint / "adapter_model.safetensors")


def rank_process(launcher, rank):
    """Process id of a rank among the children of `launcher`."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in map(int, children):
        if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
            return pid
    raise AssertionError(f"no child of {launcher} is rank {rank}")
