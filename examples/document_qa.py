"""GRPO on questions about long documents: facts are hidden in your own texts, and some of them are asked for.

    python examples/document_qa.py
    accelerate launch examples/document_qa.py Qwen/Qwen3.6-27B my_texts/        # one H200, prompts of 128,000 tokens

Without arguments a tiny random model reads prompts of 2,000 bytes on a CPU, which shows how the parts fit together: it
is far too small to find anything, and 15 steps do not teach it to answer with numbers either, for which it gets a small
reward beside `needle_recall_reward` so that there is a gradient.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longstraw_sdk import adapter_for
from longstraw_sdk.data import NeedleTask, needle_dataset, read_corpus
from longstraw_sdk.demo.model import tiny_qwen36
from longstraw_sdk.demo.text import load_prose
from longstraw_sdk.demo.tokenizer import byte_tokenizer
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer, needle_recall_reward


def digits_reward(completions, **kwargs):
    """A tenth of the share of characters that an answer of numbers may have."""
    return [0.1 * sum(c in "0123456789, " for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    real = len(sys.argv) > 2
    if real:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
        corpus = read_corpus(sys.argv[2], tokenizer, split="train")
        lengths, n_prompts = (120_000, 128_000), 256
    else:
        tokenizer = byte_tokenizer()
        model = tiny_qwen36(tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "prose.txt").write_text(load_prose().train, encoding="utf-8")
            corpus = read_corpus(folder, tokenizer)
        lengths, n_prompts = (1800, 2000), 16
    task = NeedleTask(n_needles=8, n_asked=2)
    data = needle_dataset(corpus, task, prompt_tokens=lengths, n_prompts=n_prompts, conversational=real)
    config = LongStrawGRPOConfig(
        output_dir="runs/document_qa",
        replay_tokens=4096 if real else 256,
        chunk_tokens=8192 if real else 512,
        page_tokens=4096 if real else 256,
        per_device_train_batch_size=8,
        num_generations=8,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        max_completion_length=32 if real else 12,
        learning_rate=1e-5 if real else 1e-2,
        max_steps=-1 if real else 15,
        logging_steps=1 if real else 5,
        bf16=real,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="steps" if real else "no",
        report_to="none",
    )
    trainer = LongStrawGRPOTrainer(
        model,
        args=config,
        reward_funcs=[needle_recall_reward, *([] if real else [digits_reward])],
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapter_for(model).lora_config(r=16),
    )
    trainer.train()
    rewards = [h["reward"] for h in trainer.state.log_history if "reward" in h]
    print(f"mean reward: {rewards[0]:.3f} in the first steps, {rewards[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
