"""A conversation of several turns behind one long prompt: each turn extends the state that is resident.

    python examples/multi_turn.py

A tiny random model on a CPU answers, an environment replies, and the model answers again; only the last answer of each
conversation is trained on. On a GPU the same loop runs with any model that has an adapter; on one H200 a capture of
131,072 tokens of a 27B model takes 17 s, which every turn but the first then saves.
"""

import torch
from peft import get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw_sdk import LongStrawSession
from longstraw_sdk.models.qwen36 import Qwen36Adapter

GROUP, STEPS, TURNS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 24, 3, 600, 8
VOCAB = 64


def make_model():
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


def reply(answer: torch.Tensor) -> torch.Tensor:
    """What the environment says to an answer: here its first tokens, turned round."""
    return answer[:4].flip(0)


def reward(answer: torch.Tensor) -> float:
    """Share of the answer's tokens in the upper half of the vocabulary."""
    return float((answer >= VOCAB // 2).float().mean())


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    document = torch.randint(0, VOCAB, (PROMPT_TOKENS,))

    with LongStrawSession(model, gradient_scope="full", chunk_tokens=256, page_tokens=256) as session:
        for step in range(STEPS):
            text = document
            with session.capture(text) as prefix:
                for turn in range(TURNS - 1):
                    answer = prefix.sample(1, max_new_tokens=ANSWER_TOKENS, seed=step * TURNS + turn)[0]
                    text = torch.cat([text, answer, reply(answer)])
                    assert prefix.extend(text)  # token ids go on as they are: nothing is tokenised again
                rows = prefix.sample(GROUP, max_new_tokens=ANSWER_TOKENS, seed=step * TURNS + TURNS)
                rewards = torch.tensor([reward(row) for row in rows])
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                for row, advantage in zip(rows, advantages, strict=True):
                    (-advantage * prefix.replay(row).logps.mean() / GROUP).backward()
            session.finalize()
            optimizer.step()
            optimizer.zero_grad()
            if step % 6 == 0 or step == STEPS - 1:
                print(f"step {step:>2}  mean reward of the last answers {float(rewards.mean()):.2f}")
        again = STEPS * sum(PROMPT_TOKENS - 1 + turn * (ANSWER_TOKENS + 4) for turn in range(TURNS))
        print(f"prompt tokens captured: {session.stats.captured_tokens:,}; with a capture per turn: {again:,}")


if __name__ == "__main__":
    main()
