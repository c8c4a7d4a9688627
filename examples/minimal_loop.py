"""GRPO's inner loop without a trainer: capture a long prompt once, sample, score, replay, finalize, step.

    python examples/minimal_loop.py

A tiny random model learns to answer with high token ids. On a real model only `make_model` and the reward change.
"""

import torch
from peft import get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw_sdk import LongStrawSession
from longstraw_sdk.models.qwen36 import Qwen36Adapter

GROUP, STEPS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 30, 600, 12
VOCAB = 64


def make_model():
    """A tiny Qwen3.6-architecture model with LoRA on every linear, Gated DeltaNet projections included."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
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
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return get_peft_model(Qwen3_5ForCausalLM(config), Qwen36Adapter().lora_config(r=8))


def reward(row: torch.Tensor) -> float:
    """Share of the response's tokens in the upper half of the vocabulary."""
    return float((row >= VOCAB // 2).float().mean())


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    prompt = torch.randint(0, VOCAB, (PROMPT_TOKENS,))

    with LongStrawSession(model, gradient_scope="full", chunk_tokens=256, page_tokens=256) as session:
        for step in range(STEPS):
            with session.capture(prompt) as prefix:  # one forward of the prompt, no graph
                rows = prefix.sample(GROUP, max_new_tokens=RESPONSE_TOKENS, seed=step)
                rewards = torch.tensor([reward(row) for row in rows])
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                old = prefix.score(rows)
                for row, advantage, old_logps in zip(rows, advantages, old, strict=True):
                    out = prefix.replay(row)  # graph of this response only
                    ratio = torch.exp(out.logps - old_logps)
                    clipped = torch.clamp(ratio, 0.8, 1.2)
                    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean() / GROUP
                    loss.backward()
            # leaving the block swept the prompt: the gradient is the one of the whole sequence
            session.finalize()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0 or step == STEPS - 1:
                print(f"step {step:>2}  mean reward {float(rewards.mean()):.2f}")

        stats = session.stats
        shared = stats.captured_tokens + stats.swept_tokens
        repeated = 2 * GROUP * STEPS * PROMPT_TOKENS  # a prefill and a training forward for every member
        print(f"prompt tokens forwarded: {shared:,}; without sharing: {repeated:,}")


if __name__ == "__main__":
    main()
