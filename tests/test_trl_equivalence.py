"""LongStrawGRPOTrainer against TRL's own GRPOTrainer, on one fixed off-policy batch and in whole runs.

Gradients agree within 1e-5 relative L2 in float32: both sides round at 6e-8, through some ten matrix products.
"""

import pytest
import torch
import trl_setup

from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.models.glm52 import GLM52Adapter

TOLERANCE = 1e-5


def fixed_batch(*, masked_row: bool = False) -> dict[str, torch.Tensor]:
    """Two prompts of 21 and 34 tokens, three completions each of 1 to 8 tokens, padded left and right, off-policy."""
    generator = torch.Generator().manual_seed(5)
    prompt_lengths, completion_lengths = [21] * 3 + [34] * 3, [8, 3, 1, 6, 8, 2]
    n, width, longest = len(prompt_lengths), max(prompt_lengths), max(completion_lengths)
    prompts = [torch.randint(2, trl_setup.VOCAB, (length,), generator=generator) for length in (21, 34)]
    batch = {
        "prompt_ids": torch.zeros(n, width, dtype=torch.long),
        "prompt_mask": torch.zeros(n, width, dtype=torch.long),
        "completion_ids": torch.zeros(n, longest, dtype=torch.long),
        "completion_mask": torch.zeros(n, longest, dtype=torch.long),
        "advantages": torch.randn(n, generator=generator),
        # Near log(1/97), and spread widely enough that clipping is active on both sides.
        "old_per_token_logps": -4.57 + 0.5 * torch.randn(n, longest, generator=generator),
        "ref_per_token_logps": -4.57 + 0.2 * torch.randn(n, longest, generator=generator),
    }
    for i, (p, c) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        batch["prompt_ids"][i, width - p :] = prompts[i // 3]
        batch["prompt_mask"][i, width - p :] = 1
        batch["completion_ids"][i, :c] = torch.randint(2, trl_setup.VOCAB, (c,), generator=generator)
        batch["completion_mask"][i, :c] = 1
    if masked_row:
        batch["completion_mask"][4] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return batch


def run_steps(trainer, micro_batches, n_steps=2):
    """(losses, gradients) of `n_steps` optimizer steps (SGD), each over all micro-batches."""
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    optimizer = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad], lr=0.1)
    losses, gradients = [], []
    for _ in range(n_steps):
        for i, batch in enumerate(micro_batches):
            trainer.accelerator.gradient_state._set_sync_gradients(i == len(micro_batches) - 1)
            losses.append(float(trainer.training_step(trainer.model, dict(batch), None)))
        gradients.append(trl_setup.lora_gradient(trainer.model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def compare(tmp_path, micro_batches, ours_only=None, architecture="qwen36", **options):
    options = {"num_generations": 3, "per_device_train_batch_size": 6, **options}
    options.setdefault("gradient_accumulation_steps", len(micro_batches))
    options.setdefault("steps_per_generation", len(micro_batches))
    theirs = trl_setup.stock_trainer(tmp_path / "stock", model=tiny_model(architecture), **options)
    ours = trl_setup.our_trainer(tmp_path / "ours", model=tiny_model(architecture), **options, **(ours_only or {}))
    return run_steps(theirs, micro_batches), run_steps(ours, micro_batches)


VARIANTS = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 0.28},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sequence-level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "beta": {"loss_type": "dapo", "beta": 0.1},
    "beta-bias-correction": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    "entropy-bonus": {"loss_type": "dapo", "entropy_coef": 0.05},
    "top-entropy-quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.4},
    "temperature": {"loss_type": "dapo", "temperature": 0.7},
    "checkpointing-off": {"loss_type": "dapo", "gradient_checkpointing": False},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients_equal_trl_over_two_steps(tmp_path, options):
    (stock_losses, stock), (our_losses, ours) = compare(tmp_path, [fixed_batch()], **options)
    for wanted, found in zip(stock, ours, strict=True):
        assert wanted.norm() > 0
        assert relative_l2(found, wanted) <= TOLERANCE
    assert our_losses == pytest.approx(stock_losses, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("options", [{"loss_type": "dapo", "beta": 0.1}, {"loss_type": "grpo", "temperature": 0.7}])
def test_gradients_of_sparse_experts_equal_trl(tmp_path, options):
    (stock_losses, stock), (our_losses, ours) = compare(
        tmp_path, [fixed_batch()], {"adapter": GLM52Adapter(tape="off")}, architecture="glm52", **options
    )
    for wanted, found in zip(stock, ours, strict=True):
        assert relative_l2(found, wanted) <= TOLERANCE
    assert our_losses == pytest.approx(stock_losses, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_gradient_accumulation_with_unequal_lengths(tmp_path, loss_type):
    """TRL scatters a group over micro-batches, so rows of one prompt come in both."""
    whole = fixed_batch()
    halves = []
    for rows in ([0, 4, 2], [3, 1, 5]):
        half = {k: v if v.dim() == 0 else v[rows] for k, v in whole.items()}
        halves.append(half)
    (_, stock), (_, ours) = compare(tmp_path, halves, loss_type=loss_type, per_device_train_batch_size=3)
    for wanted, found in zip(stock, ours, strict=True):
        assert relative_l2(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_masked_truncated_completion(tmp_path, loss_type):
    (_, stock), (_, ours) = compare(
        tmp_path, [fixed_batch(masked_row=True)], loss_type=loss_type, mask_truncated_completions=True
    )
    for wanted, found in zip(stock, ours, strict=True):
        assert relative_l2(found, wanted) <= TOLERANCE


def test_control_response_scope_is_another_gradient(tmp_path):
    (_, stock), (_, ours) = compare(tmp_path, [fixed_batch()], {"gradient_scope": "response"})
    assert relative_l2(ours[0], stock[0]) > 0.02


def test_control_a_dropped_row_is_noticed(tmp_path):
    batch = fixed_batch()
    wrong = {k: v.clone() for k, v in batch.items()}
    wrong["completion_mask"][0] = 0
    (_, stock), _ = compare(tmp_path / "a", [batch])
    _, (_, ours) = compare(tmp_path / "b", [wrong])
    assert relative_l2(ours[0], stock[0]) > 0.02


RUNS = {
    "on-policy": {},
    "glm52": {"architecture": "glm52"},
    "beta": {"beta": 0.1},
    "one-micro-batch": {"gradient_accumulation_steps": 1},
    "two-iterations": {"num_iterations": 2, "gradient_accumulation_steps": 1},
    "scattered-group": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
    },
    "off-policy": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_training_gives_the_same_rewards_and_adapter(tmp_path, options):
    ends, starts, histories = [], [], []
    options = dict(options)
    architecture = options.pop("architecture", "qwen36")
    for make, name in ((trl_setup.stock_trainer, "stock"), (trl_setup.our_trainer, "ours")):
        trainer = make(tmp_path / name, model=tiny_model(architecture), **options)
        starts.append(trl_setup.lora(trainer.model).clone())
        trainer.train()
        ends.append(trl_setup.lora(trainer.model).clone())
        histories.append([h for h in trainer.state.log_history if "reward" in h])
    assert [h["reward"] for h in histories[1]] == [h["reward"] for h in histories[0]]
    for name in ("completions/mean_length", "entropy", "loss", "num_tokens"):
        assert [h[name] for h in histories[1]] == pytest.approx([h[name] for h in histories[0]], rel=1e-3, abs=1e-5)
    update = ends[0] - starts[0]
    assert update.norm() > 0.01
    assert relative_l2(ends[1] - starts[1], update) < 1e-4
