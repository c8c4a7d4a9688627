"""GRPO on Qwen3.6 (or any model whose architecture has an adapter) with TRL's command line.

    accelerate launch --num_processes 1 examples/grpo_qwen36.py \\
        --model_name_or_path PATH_OR_ID --dataset_name PATH.jsonl --output_dir runs/qwen36 \\
        --num_generations 8 --per_device_train_batch_size 8 --max_completion_length 1024 \\
        --chunk_tokens 8192 --gradient_scope full

On two GPUs that share each prompt: `--config_file examples/accelerate/cp2.yaml`, and at the end
`--context_parallel_size 2`.

The data set is JSON lines with `prompt` (text, or a list of chat messages) and `answer`. The reward is 1 where the
answer stands in the completion; replace `contains_answer` by your own.
"""

from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from longstraw_sdk.adapter import adapter_for
from longstraw_sdk.data.rows import load_rows
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "Model folder or hub id of a text model."})
    dataset_name: str = field(
        metadata={"help": "A .jsonl or .parquet file, or a hub data set, with prompt and answer."}
    )
    lora_r: int = field(default=16, metadata={"help": "LoRA rank, on every linear of every layer kind."})
    dtype: str = field(default="bfloat16", metadata={"help": "Weights' dtype; LoRA itself stays in float32."})


def contains_answer(completions, answer, **kwargs):
    """1.0 where the answer stands in the completion's text."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(wanted in text) for text, wanted in zip(texts, answer, strict=True)]


def main() -> None:
    script, config = TrlParser((ScriptArguments, LongStrawGRPOConfig)).parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype=script.dtype)
    trainer = LongStrawGRPOTrainer(
        model,
        reward_funcs=contains_answer,
        args=config,
        train_dataset=load_rows(script.dataset_name),
        processing_class=AutoTokenizer.from_pretrained(script.model_name_or_path, padding_side="left"),
        peft_config=adapter_for(model).lora_config(r=script.lora_r),
    )
    if trainer.accelerator.is_main_process:
        print(trainer.longstraw.coverage())
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
