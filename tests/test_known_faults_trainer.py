"""Faults that others met (docs/known-faults.md) in scaling, rewards, references and masks, against values by hand."""

import pytest
import torch
import trl_setup
from datasets import Dataset
from test_trl_equivalence import compare, fixed_batch, run_steps
from transformers import TrainerCallback

from longstraw_sdk import ConfigurationError
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.trainers import LongStrawGRPOConfig
from longstraw_sdk.trainers.rewards import equal_rewards

TOLERANCE = 1e-5
"""As in tests/test_trl_equivalence.py: rounding of float32 through some ten matrix products."""


class FirstUpdate(TrainerCallback):
    """Of the first optimizer step: the micro-batches whose loss was taken, and the gradient."""

    def __init__(self):
        self.batches, self.gradient, self.trainer = [], None, None

    def watch(self, trainer):
        self.trainer = trainer
        taken = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: self.batches.append(inputs) or taken(model, inputs)
        trainer.add_callback(self)
        return trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.gradient is None:
            self.gradient, self.taken = trl_setup.lora_gradient(self.trainer.model), list(self.batches)


def row_logps(model, batch, i):
    prompt, row = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()], batch["completion_ids"][i]
    logits = model(input_ids=torch.cat([prompt, row])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, row[:, None])[:, 0]


def gradient_by_hand(model, batches, loss_type, max_tokens, wrong_factor=1.0):
    """Of one window as one batch, on policy: each token's log-prob weighs -advantage over the loss's denominator."""
    n_rows = sum(len(b["completion_ids"]) for b in batches)
    n_tokens = sum(float(b["completion_mask"].sum()) for b in batches)
    loss = torch.zeros(())
    for batch in batches:
        in_batch = batch["completion_mask"].sum().clamp(min=1)
        for i, (advantage, mask) in enumerate(zip(batch["advantages"], batch["completion_mask"], strict=True)):
            denominator = {
                "grpo": mask.sum().clamp(min=1) * n_rows,
                "bnpo": in_batch * len(batches),
                "dr_grpo": max_tokens * n_rows,
                "dapo": n_tokens,
            }[loss_type]
            loss = loss - (row_logps(model, batch, i) * mask).sum() * advantage / denominator
    (loss * wrong_factor).backward()
    return trl_setup.lora_gradient(model)


def ragged(trainer, n_truncated=0):
    """Completions of 2 to 6 tokens that end, the first `n_truncated` of a call cut at 6."""

    def generate(prompt_ids, *args, **kwargs):
        rows = [[5 + i % 7] * (1 + i % 5) + [1] for i in range(len(prompt_ids))]
        rows[:n_truncated] = [[9, 8, 7, 6, 5, 4]] * n_truncated
        return rows, None

    trainer._generate_single_turn = generate


@pytest.mark.parametrize(
    ("loss_type", "accumulation", "per_generation", "n_truncated"),
    [
        ("grpo", 4, 2, 0),
        ("bnpo", 4, 2, 0),
        ("dr_grpo", 2, 2, 0),
        ("dapo", 2, 2, 0),
        ("dapo", 4, 4, 0),
        ("dapo", 2, 2, 2),
        ("grpo", 2, 2, 2),
    ],
)
def test_a_window_is_scaled_as_one_batch(tmp_path, loss_type, accumulation, per_generation, n_truncated):
    """Rows 30 to 32: neither accumulation nor the size of a generation batch nor masked members change the scale."""
    options = {
        "loss_type": loss_type, "gradient_accumulation_steps": accumulation, "steps_per_generation": per_generation,
        "max_steps": 1, "max_completion_length": 6, "mask_truncated_completions": n_truncated > 0,
    }  # fmt: skip
    update = FirstUpdate()
    trainer = update.watch(trl_setup.our_trainer(tmp_path, model=tiny_model("llama", n_layers=1), **options))
    ragged(trainer, n_truncated)
    trainer.train()
    assert len(update.taken) == accumulation
    wanted = gradient_by_hand(tiny_model("llama", n_layers=1), update.taken, loss_type, 6)
    assert wanted.norm() > 0
    assert relative_l2(update.gradient, wanted) <= TOLERANCE
    if n_truncated:
        assert any(not mask.any() for batch in update.taken for mask in batch["completion_mask"])


def test_a_generation_batch_over_two_windows_is_scaled_by_one(tmp_path):
    """Row 30: the first of two updates from one generation batch, whose token count spans both."""
    options = {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 1}
    update = FirstUpdate()
    model = tiny_model("llama", n_layers=1)
    trainer = update.watch(trl_setup.our_trainer(tmp_path, model=model, max_completion_length=6, **options))
    trainer._generate_single_turn = lambda ids, *a, **k: ([[5 + i % 7, 6, 1] for i in range(len(ids))], None)
    trainer.train()
    assert len(update.taken) == 2, "equal lengths: half of the generation batch has half of its tokens"
    wanted = gradient_by_hand(tiny_model("llama", n_layers=1), update.taken, "dapo", 6)
    assert relative_l2(update.gradient, wanted) <= TOLERANCE
    halved = gradient_by_hand(tiny_model("llama", n_layers=1), update.taken, "dapo", 6, wrong_factor=0.5)
    assert relative_l2(update.gradient, halved) > 0.9, "control: a factor of two"


@pytest.mark.parametrize("case", ["two groups of one prompt", "one group of two prompts"])
def test_groups_are_places_in_the_batch_not_prompts(tmp_path, case):
    """Row 37. A capture serves whichever rows have its ids; advantages are those that the batch brings."""
    batch = fixed_batch()
    rows, source = {"two groups of one prompt": (slice(3, 6), 0), "one group of two prompts": (slice(1, 2), 3)}[case]
    for name in ("prompt_ids", "prompt_mask"):
        batch[name][rows] = batch[name][source].clone()
    (_, stock), (_, ours) = compare(tmp_path, [batch], architecture="llama", loss_type="dapo")
    for wanted, found in zip(stock, ours, strict=True):
        assert relative_l2(found, wanted) <= TOLERANCE
    other = trl_setup.our_trainer(
        tmp_path / "control", model=tiny_model("llama"), loss_type="dapo", num_generations=3,
        per_device_train_batch_size=6, gradient_accumulation_steps=1,
    )  # fmt: skip
    _, unchanged = run_steps(other, [fixed_batch()])
    assert relative_l2(unchanged[0], stock[0]) > 0.02, "control: the prompts count"


@pytest.mark.parametrize(
    ("architecture", "prefix_adapter"), [("qwen36", "live"), ("glm52", "live"), ("llama", "frozen")]
)
def test_the_reference_is_the_adapter_that_the_run_began_with(tmp_path, architecture, prefix_adapter):
    """Rows 38 and 39: behind a trained adapter (stacked experts included) KL is 0 at the first step, not later."""
    model = tiny_model(architecture, n_layers=4 if architecture == "qwen36" else 2)
    options = {"beta": 0.1, "gradient_accumulation_steps": 1, "max_steps": 2, "max_completion_length": 4}
    trainer = trl_setup.our_trainer(tmp_path, model=model, prefix_adapter=prefix_adapter, **options)
    trainer.train()
    kl = [logged["kl"] for logged in trainer.state.log_history if "kl" in logged]
    assert kl[0] == 0.0
    assert kl[1] > 1e-6
    ids = torch.arange(2, 30)[None]
    own = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 6)[0].detach()
    with trainer.model.disable_adapter(), torch.no_grad():
        base = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 6)[0]
    trainer._drop_all()
    assert float((own - base).abs().max()) > 1e-3, "control: the base model is another reference"


def test_rewards_that_differ_by_rounding_are_equal():
    """Rows 35 and 36."""
    nan = float("nan")
    two = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1], [0.1, 0.2], [0.1, 0.2], [0.1, 0.2000005]])
    found = equal_rewards(two, torch.ones(2), 2)
    assert found.tolist() == [True, True, True, True, False, False]
    one = torch.tensor([[0.35]] * 3 + [[nan], [nan], [nan]] + [[1.0], [nan], [2.0]] + [[1.0], [nan], [1.0]])
    assert equal_rewards(one, torch.ones(1), 3).tolist() == [True] * 6 + [False] * 3 + [True] * 3
    assert equal_rewards(torch.tensor([[0.0], [1e-30]]), torch.ones(1), 2).tolist() == [False, False]
    assert equal_rewards(torch.zeros(2, 1), torch.ones(1), 2).all()


def test_equal_rewards_move_nothing_and_an_outlier_is_bounded(tmp_path):
    """Rows 35 and 36. The float32 mean of seven 1000.1 is off; divided by a spread of that alone it is 0.37."""
    seen = []

    def reward(completions, **kwargs):
        half = len(completions) // 2
        return [1000.1] * half + [0.35] * (half - 1) + [0.36]

    options = {"num_generations": 7, "per_device_train_batch_size": 14, "gradient_accumulation_steps": 1}
    trainer = trl_setup.our_trainer(
        tmp_path, model=tiny_model("llama", n_layers=1), reward=reward, max_steps=1, **options
    )
    taken = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: seen.append(taken(inputs)) or seen[-1]
    trainer.train()
    advantages = seen[0]["advantages"].double()
    assert advantages[:7].tolist() == [0.0] * 7
    rewards = torch.tensor([0.35] * 6 + [0.36], dtype=torch.float64)
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(advantages[7:], wanted, rtol=0, atol=1e-3)
    assert float(advantages.abs().max()) < 6 / 7**0.5, "no member of seven is further out"
    history = [h for h in trainer.state.log_history if "reward" in h]
    assert history[0]["longstraw/rows_not_replayed"] == 7


def test_an_end_token_that_also_pads_is_trained_and_read(tmp_path):
    """Row 61. Without a pad token the end token pads; masks go by place."""
    tokenizer = trl_setup.word_tokenizer()
    tokenizer.pad_token = None
    words = ["t5 <eos> t7 t8 <eos> t9", "t5 t6 t7"]
    trainer = trl_setup.LongStrawGRPOTrainer(
        tiny_model("llama", n_layers=1),
        reward_funcs=trl_setup.checksum_reward,
        args=LongStrawGRPOConfig(
            str(tmp_path), **(trl_setup.COMMON | trl_setup.OURS | {"per_device_train_batch_size": 8, "max_steps": 1})
        ),
        train_dataset=Dataset.from_dict({"prompt": words}),
        processing_class=tokenizer,
    )
    assert tokenizer.pad_token == "<eos>"
    seen = []
    update = FirstUpdate()
    update.watch(trainer)
    trainer._generate_single_turn = lambda ids, *a, **k: (seen.extend(ids) or [[5 + i, 1] for i in range(8)], None)
    trainer.train()
    assert sorted(map(len, seen[:8])) == [3] * 4 + [6] * 4
    batch = update.taken[0]
    assert sorted(batch["prompt_mask"].sum(1).tolist()) == [3] * 4 + [6] * 4, "end tokens of a prompt stay"
    assert batch["completion_mask"].sum(1).tolist() == [2] * 8, "the end token of a completion is trained"
    wanted = gradient_by_hand(tiny_model("llama", n_layers=1), update.taken, "dapo", 8)
    assert relative_l2(update.gradient, wanted) <= TOLERANCE


def test_a_dataset_that_fills_no_batch_is_refused(tmp_path):
    """Row 46. One group for two: TRL would leave it out and end behind 0 steps."""
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1}
    model = tiny_model("llama", n_layers=1)
    trainer = trl_setup.our_trainer(tmp_path, model=model, dataset=trl_setup.prompts(1), **options)
    with pytest.raises(ConfigurationError, match="has 1 prompts, and one generation batch takes 2"):
        trainer.train()
    trainer.longstraw.close()
    enough = trl_setup.our_trainer(tmp_path, model=model, dataset=trl_setup.prompts(2), **options)
    enough.train()
    assert enough.state.global_step == 1, "control"


def test_there_is_no_option_that_truncates_a_prompt(tmp_path):
    """Row 22."""
    with pytest.raises(TypeError, match="max_prompt_length"):
        LongStrawGRPOConfig(str(tmp_path), max_prompt_length=5, **trl_setup.COMMON)
