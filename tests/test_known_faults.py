"""Faults that others met (docs/known-faults.md), where no test of the subject itself has them: models and sessions."""

import logging

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from rank_cases import slow_decay

from longstraw_sdk import LongStrawError, LongStrawSession, UnsupportedModelError
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import ParityCase, check_parity, randomize_lora, relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.dense import DenseAdapter
from longstraw_sdk.models.qwen36 import Qwen36Adapter

SIZES = {"chunk_tokens": 16, "page_tokens": 8}


def tokens(n, seed=0):
    return torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(seed))


def stock_logps(model, prompt, row, temperature=1.0):
    logits = model(input_ids=torch.cat([prompt, row])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, row[:, None])[:, 0]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("architecture", ["llama", "qwen36", "glm52"])
def test_the_ratio_on_policy_is_exactly_one(architecture, temperature):
    """Rows 16, 17 and 58. Old and policy log-probs are the same bits, of logits divided by the temperature once."""
    model = tiny_model(architecture, n_layers=4).train()
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    prompt, row = tokens(60), tokens(9, 1)
    with LongStrawSession(model, temperature=temperature, **SIZES) as session, session.capture(prompt) as prefix:
        old = prefix.score([row])[0]
        policy = prefix.replay(row).logps
        assert torch.equal(torch.exp(policy.detach() - old), torch.ones(len(row)))
        with session.adapter.reference(session.bound.base, torch.cat([prompt, row])), torch.no_grad():
            wanted, once_more = (stock_logps(model, prompt, row, t) for t in (temperature, temperature**2))
    torch.testing.assert_close(old, wanted, rtol=0, atol=1e-5)
    if temperature != 1.0:
        assert float((old - once_more).abs().max()) > 1e-3, "control: divided twice"


def test_learnt_positions_are_counted_from_the_first_token():
    """Row 18. GPT-2 looks its positions up in a table: those of a replay go on behind the prompt."""
    options = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0}
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=1, **options
    )
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    randomize_lora(model)
    result = check_parity(model, ParityCase("float64", prompt_tokens=60), DenseAdapter())
    assert result.passed, result
    ids = tokens(20)[None]
    first, later = (model(input_ids=ids, position_ids=torch.arange(n, n + 20)[None]).logits for n in (0, 5))
    assert float((first - later).detach().abs().max()) > 1e-3, "control: positions matter"


@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_log_probs_behind_4096_tokens_are_those_of_the_model(architecture):
    """Row 25: what is wrong with a model far out is not added by us."""
    model = tiny_model(architecture, n_layers=2, max_position_embeddings=8192, **far_layers(architecture))
    model = slow_decay(model).double()
    prompt, row = tokens(4096), tokens(6, 1)
    with float64_upcasts(), torch.no_grad():
        with LongStrawSession(model, chunk_tokens=1024, page_tokens=256) as session:
            with session.capture(prompt) as prefix:
                found = prefix.score([row])[0]
            with session.capture(prompt.roll(1)) as prefix:
                shifted = prefix.score([row])[0]
        wanted = stock_logps(model, prompt, row)
    assert float((found - wanted).abs().max()) < 1e-10
    assert float((shifted - wanted).abs().max()) > 1e-6, "control: the prompt by one token further"


def far_layers(architecture):
    return {"layer_types": ["linear_attention", "full_attention"]} if architecture == "qwen36" else {}


@pytest.mark.parametrize("architecture", ["llama", "qwen36"])
def test_checkpointing_changes_no_bit(architecture):
    """Rows 26 and 27. transformers drops the cache of a checkpointed layer; ours is read, so it may stay."""
    runs = []
    for on in (False, True):
        model = tiny_model(architecture, n_layers=4).train()
        if on:
            model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
            assert model.get_base_model().model.layers[0].gradient_checkpointing
        with LongStrawSession(model, **SIZES) as session:
            with session.capture(tokens(40)) as prefix:
                out = prefix.replay(tokens(9, 1))
                out.logps.sum().backward()
            session.finalize()
        runs.append((out.logps.detach(), gradient(model)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert runs[0][1].norm() > 0


def test_chunks_that_do_not_divide_the_delta_rule_change_nothing():
    """Rows 29 and 54. The reference of the delta rule pads to 64; decay is slow, or a lost state would not show."""
    model = slow_decay(tiny_model("qwen36", n_layers=4)).double()
    prompt, row = tokens(150), tokens(7, 1)
    with float64_upcasts(), torch.no_grad():
        wanted = stock_logps(model, prompt, row)
        for chunk_tokens in (33, 64, 150):
            with LongStrawSession(model, chunk_tokens=chunk_tokens, page_tokens=16) as session:
                with session.capture(prompt) as prefix:
                    assert float((prefix.score([row])[0] - wanted).abs().max()) < 1e-10, chunk_tokens
        without = stock_logps(model, prompt[64:], row)
    assert float((without - wanted).abs().max()) > 1e-3, "control: the first 64 tokens are still felt"


def test_two_prompts_share_no_state():
    """Row 55. Prompts are captured one by one and responses are rows of a batch: nothing lies behind another text."""
    model = slow_decay(tiny_model("qwen36", n_layers=4)).double()
    prompts, rows = [tokens(41, 1), tokens(30, 2)], [tokens(9, 3), tokens(5, 4)]
    with float64_upcasts(), LongStrawSession(model, replay_tokens=64, **SIZES) as session:
        with session.capture(prompts[0]) as first, session.capture(prompts[1]) as second:
            found = [prefix.score(rows) for prefix in (first, second)]
    with float64_upcasts(), torch.no_grad():
        for prompt, scored in zip(prompts, found, strict=True):
            for row, logps in zip(rows, scored, strict=True):
                assert float((logps - stock_logps(model, prompt, row)).abs().max()) < 1e-10
        packed = stock_logps(model, torch.cat(prompts), rows[0])
    assert float((packed - found[1][0]).abs().max()) > 1e-3, "control: one text behind the other"


@pytest.mark.parametrize("architecture", ["llama", "qwen36", "glm52"])
def test_every_covered_linear_gets_a_gradient(architecture):
    """Rows 41 to 43: what the coverage report calls covered is trained, and nothing that is trained stays still."""
    model = tiny_model(architecture, n_layers=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with LongStrawSession(model, **SIZES) as session:
        assert not session.coverage().missing
        with session.capture(tokens(80)) as prefix:
            for i in range(3):
                prefix.replay(tokens(20, 1 + i)).logps.sum().backward()
        session.finalize()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert without == []
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not any(".indexer." in n for n in moved), "row 59: what only selects is left alone"


def test_gates_and_experts_without_lora_are_warned_about(caplog):
    """Rows 42 and 43. Qwen3.5 with experts is no registered type; who passes the adapter of its dense sister is told
    what stays frozen.
    """
    config = transformers.Qwen3_5MoeTextConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, experts_implementation="eager", max_position_embeddings=512,
    )  # fmt: skip
    model = get_peft_model(transformers.Qwen3_5MoeForCausalLM(config), Qwen36Adapter().lora_config(r=2))
    with pytest.raises(LongStrawError, match="no adapter is registered for model type 'qwen3_5_moe_text'"):
        LongStrawSession(model)
    with caplog.at_level(logging.WARNING, "longstraw_sdk"), LongStrawSession(model, Qwen36Adapter()) as session:
        missing = {row.linear for row in session.coverage().missing}
    assert missing == {"mlp.shared_expert_gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    for name in missing:
        assert f"LoRA is missing on {name} in 3 of 3 recurrent layers" in caplog.text


def test_a_run_goes_on_from_its_adapter_alone(tmp_path):
    """Row 53. LoRA is its own float32 master: without any optimizer state the next step is the same bits."""

    def step(model, seed):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with LongStrawSession(model, **SIZES) as session:
            with session.capture(tokens(40, seed)) as prefix:
                prefix.replay(tokens(9, 1 + seed)).logps.sum().backward()
            session.finalize()
        optimizer.step()
        optimizer.zero_grad()

    def adapter(model):
        return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if ".lora_" in n])

    def narrow(model):
        for name, p in model.named_parameters():
            if ".lora_" not in name:
                p.data = p.data.to(torch.bfloat16)
        return model

    model = narrow(tiny_model("llama", n_layers=2))
    step(model, 1)
    model.save_pretrained(tmp_path)
    saved = adapter(model)
    step(model, 2)
    fresh = tiny_model("llama", n_layers=2).unload()
    resumed = narrow(PeftModel.from_pretrained(fresh, tmp_path, is_trainable=True))
    assert torch.equal(adapter(resumed), saved)
    step(resumed, 2)
    assert torch.equal(adapter(resumed), adapter(model))
    assert relative_l2(adapter(model), saved) > 1e-3, "control: a step moves the adapter"


def test_a_prompt_is_its_ids_not_its_text():
    """Row 21. Two spellings of one text in ids are two prompts; a response is scored as it was drawn."""
    model = tiny_model("llama", n_layers=2)
    prompt = tokens(20)
    other = prompt.clone()
    other[10] = 96 - other[10]
    row = tokens(5, 1)
    with LongStrawSession(model, **SIZES) as session, session.capture(prompt) as prefix, torch.no_grad():
        assert not prefix.extend(torch.cat([other, row])), "captured as a whole"
        found = prefix.score([row])[0]
    wanted = stock_logps(model, torch.cat([other, row]), row)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_sinks_and_windows_reach_no_adapter():
    """Row 52: refused where the model is bound, whichever adapter is given. `s_aux` is never dropped on the way."""
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = get_peft_model(transformers.GptOssForCausalLM(config), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(LongStrawError, match="no adapter is registered for model type 'gpt_oss'"):
        LongStrawSession(model)
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        LongStrawSession(model, DenseAdapter())
    assert base_model_of(model).model.layers[0].self_attn.sinks is not None
