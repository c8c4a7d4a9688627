"""A tiny model on the disk for a real vLLM, and how far its log-probs are from the trainer's."""

import torch
import trl_setup
from peft import get_peft_model
from rollout_requests import request_to
from transformers import AutoModelForCausalLM, GenerationConfig

from longstraw_sdk import LongStrawSession
from longstraw_sdk.adapter import adapter_for
from longstraw_sdk.evidence.parity import randomize_lora
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.rollout import export_adapter

PROMPTS = ((5, 9, 20, 33, 4, 71, 12), (7, 7, 61))
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Nats by the server's dtype; the trainer computes in float32. Measured: 1e-6 (llama) and 0.009 (qwen36)."""


def save_model(folder: str, architecture: str) -> None:
    """A random model whose generation config asks for what a request must switch off."""
    # On a CPU vLLM's attention takes heads of 32 and more, its Gated DeltaNet bfloat16 and heads of 128.
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} if architecture == "qwen36" else {}
    base = tiny_model(architecture, hidden_size=64, head_dim=32, **heads).unload()
    base.to(torch.bfloat16 if architecture == "qwen36" else torch.float32)
    base.generation_config = GenerationConfig(
        eos_token_id=1, pad_token_id=0, do_sample=True, repetition_penalty=2.0, min_p=0.3, top_k=3
    )
    base.save_pretrained(folder)
    trl_setup.word_tokenizer().save_pretrained(folder)


def served_model(folder, seed):
    """The served model with random LoRA weights."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    model = get_peft_model(base, adapter_for(base).lora_config(r=4)).eval()
    randomize_lora(model, seed)
    return model


def request_for(model, folder, **options):
    asked = {"prompts": PROMPTS, "n_completions": 4, "max_new_tokens": 40}
    return request_to(export_adapter(model, folder), **(asked | options))


def check_the_adapter_draws(model, request, sampler, near):
    """Log-probs of what the exported adapter draws are the trainer's, and nothing is cut from its distribution."""
    answer = sampler.sample(request)
    assert apart(model, request, answer) < near
    randomize_lora(model, std=0.0)
    assert apart(model, request, answer) > 0.1, "the adapter acts"
    assert sampler.sample(request) == answer, "seeded"
    rows = [c.token_ids for completions in answer for c in completions]
    assert len(set(rows)) == 8 and len({token for ids in rows for token in ids}) > 60, "nothing is cut from the tail"
    assert any(ids[-1] == 1 and len(ids) < 40 for ids in rows), "a response ends with its stop token"


def apart(model, request, answer):
    """Largest difference, in nats, between the log-probs of an answer and the model's own."""
    found = []
    with LongStrawSession(model, temperature=request.temperature) as session:
        for ids, completions in zip(request.prompts, answer, strict=True):
            prefix = session.capture(torch.tensor(ids))
            scored = prefix.score([torch.tensor(c.token_ids) for c in completions])
            found += [
                (ours - torch.tensor(c.logprobs)).abs().max().item()
                for ours, c in zip(scored, completions, strict=True)
            ]
            prefix.release()
    return max(found)
