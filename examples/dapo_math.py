"""GRPO on mathematics with checkable answers, in the layout of DAPO-Math-17k: audit, clean, train.

    python examples/dapo_math.py
    longstraw audit BytedTsinghua-SIA/DAPO-Math-17k --tokenizer Qwen/Qwen3.6-27B --output math.parquet
    accelerate launch examples/dapo_math.py Qwen/Qwen3.6-27B math.parquet      # one H200

Without arguments a tiny random model learns ten sums on a CPU. The reward is DAPO's (arXiv 2503.14476): 1 or -1 for the
answer, and a penalty for coming close to the longest completion. Needs `pip install "longstraw-sdk[math]"`.
"""

import sys

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers import Qwen3_5TextConfig as Config
from trl.rewards import get_soft_overlong_punishment

from longstraw_sdk import adapter_for
from longstraw_sdk.data import audit_rows
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer, dapo_math_reward

SUMS = [(a, b) for a in range(4) for b in range(4) if a + b < 5][:10]


def tiny_model_and_tokenizer():
    """Every number and every boxed answer is one token."""
    words = ["<pad>", "<eos>", "What", "is", "+", "?", *map(str, range(10)), *(f"\\boxed{{{i}}}" for i in range(10))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3_5ForCausalLM(config), tokenizer


def sums_in_dapo_layout():
    return [
        {
            "data_source": "sums",
            "prompt": f"What is {a} + {b} ?",
            "ability": "MATH",
            "reward_model": {"ground_truth": str(a + b), "style": "rule"},
            "extra_info": {"index": i},
        }
        for i, (a, b) in enumerate(SUMS)
    ]


def main() -> None:
    real = len(sys.argv) > 2
    if real:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
        data = load_dataset("parquet", data_files=sys.argv[2], split="train")
    else:
        model, tokenizer = tiny_model_and_tokenizer()
        rows = sums_in_dapo_layout()
        report = audit_rows(rows, tokenizer)
        print(f"audit: {report.n_kept} of {report.n_rows} rows kept")
        kept = [rows[i] for i in report.kept]
        answers = [row["reward_model"]["ground_truth"] for row in kept]
        data = Dataset.from_dict({"prompt": [row["prompt"] for row in kept], "answer": answers})
    longest = 20_480 if real else 4
    overlong = get_soft_overlong_punishment(20_480, 4096) if real else get_soft_overlong_punishment(5, 1)
    config = LongStrawGRPOConfig(
        output_dir="runs/dapo_math",
        replay_tokens=longest if real else 64,
        chunk_tokens=8192 if real else 64,
        per_device_train_batch_size=8,
        num_generations=8,
        steps_per_generation=1,
        gradient_accumulation_steps=1 if real else 4,
        max_completion_length=longest,
        loss_type="dapo",
        learning_rate=1e-5 if real else 1e-2,
        max_steps=-1 if real else 60,
        logging_steps=1 if real else 5,
        bf16=real,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="steps" if real else "no",
        report_to="none",
    )
    trainer = LongStrawGRPOTrainer(
        model,
        args=config,
        reward_funcs=[dapo_math_reward, overlong],
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapter_for(model).lora_config(r=16),
    )
    trainer.train()
    found = [h["rewards/dapo_math_reward/mean"] for h in trainer.state.log_history if "reward" in h]
    print(f"mean of dapo_math_reward: {found[0]:.2f} in the first steps, {found[-1]:.2f} in the last")


if __name__ == "__main__":
    main()
