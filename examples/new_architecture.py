"""A new architecture by subclassing: retention layers (arXiv 2307.08621) between attention layers.

    python examples/new_architecture.py

The adapter is the ten lines of `RetentionAdapter`: it says what a retention layer keeps of a prompt. The script proves
it in float64 against conventional autograd, control included, and then trains with it. On the command line the same
proof is `longstraw parity --model FOLDER --adapter new_architecture:RetentionAdapter`.
"""

from typing import ClassVar

import torch
from peft import get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from longstraw_sdk import LongStrawError, LongStrawSession, register_adapter
from longstraw_sdk.evidence.parity import ParityCase, check_parity, randomize_lora
from longstraw_sdk.hf import TransformersAdapter
from longstraw_sdk.state import RecurrentSpec

VOCAB = 64


class RetentionConfig(LlamaConfig):
    model_type = "toy_retention"
    layer_types: list[str] | None = None


class Retention(nn.Module):
    """S_t = decay * S_{t-1} + k_t v_t^T, out_t = q_t S_t, for a chunk of T tokens at once."""

    def __init__(self, config: RetentionConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_heads, self.head_dim = config.num_attention_heads, config.head_dim
        width = self.n_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states, cache=None, **kwargs):
        n_rows, n_tokens, _ = hidden_states.shape
        q, k, v = (
            projection(hidden_states).view(n_rows, n_tokens, self.n_heads, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        decay = 1 - 2.0 ** (-3 - torch.arange(self.n_heads, device=q.device, dtype=q.dtype))[:, None, None]
        t = torch.arange(n_tokens, device=q.device, dtype=q.dtype)
        within = (decay ** (t[:, None] - t[None])).tril()
        out = ((q @ k.transpose(-1, -2)) * within) @ v
        state = cache.get_recurrent_state(self.layer_idx) if cache is not None else None
        after = (k * decay ** (n_tokens - 1 - t)[:, None]).transpose(-1, -2) @ v
        if state is not None:
            out = out + (q * decay ** (t + 1)[:, None]) @ state
            after = after + state * decay**n_tokens
        if cache is not None:
            cache.update_recurrent_state(after, self.layer_idx)
        return self.o_proj(out.transpose(1, 2).flatten(2) * self.head_dim**-0.5), None


class RetentionModel(LlamaModel):
    def __init__(self, config: RetentionConfig):
        super().__init__(config)
        for i, layer_type in enumerate(config.layer_types):
            if layer_type == "linear_attention":
                self.layers[i].self_attn = Retention(config, i)
        self.post_init()


class RetentionForCausalLM(LlamaForCausalLM):
    def __init__(self, config: RetentionConfig):
        super().__init__(config)
        self.model = RetentionModel(config)
        self.post_init()


class RetentionAdapter(TransformersAdapter):
    """What a layer keeps: keys and values where it attends, one matrix per head where it retains."""

    model_types: ClassVar = ("toy_retention",)
    layer_types: ClassVar = ("full_attention", "linear_attention")
    lora_targets: ClassVar = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def layer_spec(self, config, layer, layer_type, dtype):
        if layer_type == "full_attention":
            return super().layer_spec(config, layer, layer_type, dtype)
        heads, dim = config.num_attention_heads, config.head_dim
        return RecurrentSpec(layer, n_heads=heads, key_dim=dim, value_dim=dim, dtype=dtype, state_dtype=dtype)


register_adapter("toy_retention", RetentionAdapter)


def make_model():
    torch.manual_seed(0)
    config = RetentionConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.2,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        bos_token_id=None,
        eos_token_id=None,
    )
    return get_peft_model(RetentionForCausalLM(config), RetentionAdapter().lora_config(r=4))


class ForgetfulAdapter(RetentionAdapter):
    """The control: an adapter that loses the retention state at every chunk boundary must not pass."""

    def forward(self, model, input_ids, view):
        for state in view.state.recurrent.values():
            for tensors in state.boundaries.values():
                tensors["recurrent"].zero_()
        return super().forward(model, input_ids, view)


def prove() -> None:
    model = make_model()
    randomize_lora(model)
    for scope, prefix_adapter in (("full", "live"), ("response", "live"), ("full", "frozen")):
        result = check_parity(model, ParityCase("float64", scope, prefix_adapter))
        print(f"{scope:<9} {prefix_adapter:<7} gradient error {result.gradient_error:.1e}  passed: {result.passed}")
        assert result.passed
    try:
        passed = check_parity(model, ParityCase("float64"), ForgetfulAdapter()).passed
    except LongStrawError as error:  # the start-up probe notices before any gradient is compared
        passed = False
        print(f"control   refused: {type(error).__name__}")
    assert not passed


def train(n_steps: int = 20) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    prompt = torch.randint(0, VOCAB, (400,))
    with LongStrawSession(model, chunk_tokens=128, page_tokens=128) as session:
        for step in range(n_steps):
            with session.capture(prompt) as prefix:
                rows = prefix.sample(8, max_new_tokens=12, seed=step)
                rewards = torch.stack([(row >= VOCAB // 2).float().mean() for row in rows])
                for row, advantage in zip(rows, rewards - rewards.mean(), strict=True):
                    (-advantage * prefix.replay(row).logps.mean()).backward()
            session.finalize()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0 or step == n_steps - 1:
                print(f"step {step:>2}  mean reward {float(rewards.mean()):.2f}")


if __name__ == "__main__":
    prove()
    train()
