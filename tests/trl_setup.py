"""Two trainers on the same tiny model: TRL's own and ours."""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer

VOCAB = 97


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word "ti"; 0 pads and 1 ends, as in `tiny_model`."""
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def prompts(n: int = 16, shortest: int = 30) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    texts = []
    for i in range(n):
        ids = torch.randint(2, VOCAB, (shortest + 3 * (i % 5),), generator=generator)
        texts.append(" ".join(f"t{j}" for j in ids.tolist()))
    return Dataset.from_dict({"prompt": texts})


def checksum_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


COMMON = {
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 1,
    "max_completion_length": 8,
    "max_steps": 4,
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
    # Adam divides by the gradient's own size, which makes rounding of near-zero gradients visible: SGD does not.
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "seed": 3,
}
OURS = {"chunk_tokens": 16, "page_tokens": 8, "replay_tokens": 32}


def stock_trainer(folder: Path, *, model=None, dataset=None, reward=checksum_reward, **options) -> GRPOTrainer:
    return GRPOTrainer(
        model if model is not None else tiny_model("qwen36"),
        reward_funcs=reward,
        args=GRPOConfig(str(folder), **(COMMON | options)),
        train_dataset=dataset if dataset is not None else prompts(),
        processing_class=word_tokenizer(),
    )


def our_trainer(
    folder: Path,
    *,
    model=None,
    dataset=None,
    reward=checksum_reward,
    adapter=None,
    callbacks=None,
    sampler=None,
    rollout_func=None,
    **options,
) -> LongStrawGRPOTrainer:
    return LongStrawGRPOTrainer(
        model if model is not None else tiny_model("qwen36"),
        reward_funcs=reward,
        args=LongStrawGRPOConfig(str(folder), **(COMMON | OURS | options)),
        train_dataset=dataset if dataset is not None else prompts(),
        processing_class=word_tokenizer(),
        adapter=adapter,
        callbacks=callbacks,
        sampler=sampler,
        rollout_func=rollout_func,
    )


def lora(model) -> torch.Tensor:
    """All trainable parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def lora_gradient(model) -> torch.Tensor:
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return torch.cat([g.detach().flatten() for g in parts])
