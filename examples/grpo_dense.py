"""GRPO on a plain decoder (Llama, Qwen2/3, Mistral, ...), from Python instead of the command line.

    python examples/grpo_dense.py [MODEL_FOLDER_OR_ID]

Without an argument a tiny random Llama learns, on a CPU, to answer with even digits after a prompt of 500 words.
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longstraw_sdk.models.dense import DenseAdapter
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer


def tiny_model_and_tokenizer():
    words = ["<pad>", "<eos>", *(str(i) for i in range(10)), *(f"word{i}" for i in range(20))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config), tokenizer


def even_digits(completions, **kwargs):
    """Share of the completion's words that are even digits."""
    return [sum(w in ("0", "2", "4", "6", "8") for w in c.split()) / max(1, len(c.split())) for c in completions]


def main() -> None:
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    else:
        model, tokenizer = tiny_model_and_tokenizer()
    generator = torch.Generator().manual_seed(0)
    long_text = [" ".join(f"word{i}" for i in torch.randint(0, 20, (500,), generator=generator)) for _ in range(64)]
    config = LongStrawGRPOConfig(
        output_dir="runs/grpo_dense",
        gradient_scope="full",
        chunk_tokens=256,
        page_tokens=256,
        replay_tokens=64,
        per_device_train_batch_size=8,
        num_generations=8,
        steps_per_generation=1,
        max_completion_length=8,
        learning_rate=1e-2,
        max_steps=25,
        logging_steps=5,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    adapter = DenseAdapter()
    trainer = LongStrawGRPOTrainer(
        model,
        adapter=adapter,
        args=config,
        reward_funcs=even_digits,
        train_dataset=Dataset.from_dict({"prompt": long_text}),
        processing_class=tokenizer,
        peft_config=adapter.lora_config(r=8),
    )
    trainer.train()
    rewards = [h["reward"] for h in trainer.state.log_history if "reward" in h]
    print(f"mean reward: {rewards[0]:.2f} in the first steps, {rewards[-1]:.2f} in the last")


if __name__ == "__main__":
    main()
