"""GRPO on GLM-5.2 with TRL's command line, each rank holding its part of the experts.

    accelerate launch --config_file examples/accelerate/cp8.yaml examples/grpo_glm52.py \\
        --model_name_or_path FOLDER --dataset_name PATH.jsonl --output_dir runs/glm52 \\
        --num_generations 8 --per_device_train_batch_size 8 --max_completion_length 1024 \\
        --context_parallel_size 8 --expert_parallel_size 8 --state_device cpu

FOLDER is a local checkpoint; no rank reads experts of others. `--tape replay` lets every pass over a token take the
experts and select the tokens that the first one did. Tried on a CPU with a tiny model:

    torchrun --nproc-per-node 2 examples/grpo_glm52.py ... --use_cpu --dtype float32 --context_parallel_size 2 \\
        --expert_parallel_size 2

The data set is JSON lines with `prompt` (text, or a list of chat messages) and `answer`. The reward is 1 where the
answer stands in the completion; replace `contains_answer` by your own.
"""

from dataclasses import dataclass, field
from typing import Literal

from transformers import AutoTokenizer
from trl import TrlParser

from longstraw_sdk.data.rows import load_rows
from longstraw_sdk.models.glm52 import GLM52Adapter, load_expert_shard
from longstraw_sdk.trainers import LongStrawGRPOConfig, LongStrawGRPOTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "Folder of a GLM-5.2 checkpoint."})
    dataset_name: str = field(metadata={"help": "A .jsonl file with prompt and answer."})
    lora_r: int = field(default=16, metadata={"help": "LoRA rank, on every linear and every expert."})
    dtype: str = field(default="bfloat16", metadata={"help": "Weights' dtype; LoRA itself stays in float32."})
    tape: Literal["off", "record", "replay"] = field(
        default="replay", metadata={"help": "Whether all passes over a token take the same experts and selections."}
    )


def contains_answer(completions, answer, **kwargs):
    """1.0 where the answer stands in the completion's text."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(wanted in text) for text, wanted in zip(texts, answer, strict=True)]


def main() -> None:
    script, config = TrlParser((ScriptArguments, LongStrawGRPOConfig)).parse_args_and_config()
    adapter = GLM52Adapter(tape=script.tape)
    size = config.expert_parallel_size
    model = load_expert_shard(script.model_name_or_path, config.process_index % size, size, dtype=script.dtype)
    trainer = LongStrawGRPOTrainer(
        model,
        adapter=adapter,
        reward_funcs=contains_answer,
        args=config,
        train_dataset=load_rows(script.dataset_name),
        processing_class=AutoTokenizer.from_pretrained(script.model_name_or_path, padding_side="left"),
        peft_config=adapter.lora_config(r=script.lora_r),
    )
    if trainer.accelerator.is_main_process:
        print(trainer.longstraw.coverage())
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()
