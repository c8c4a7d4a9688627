"""The learning problem of the demo: tokenizer, prose split, prompts, reward, models."""

import random

import pytest
import torch
from transformers import AutoTokenizer

from longstraw_sdk.demo import indexer
from longstraw_sdk.demo.model import tiny_dense, tiny_glm52, tiny_qwen36
from longstraw_sdk.demo.task import ANSWERS, CUE, FACT, needle_dataset, needle_reward
from longstraw_sdk.demo.text import load_prose
from longstraw_sdk.demo.tokenizer import EOS_ID, PAD_ID, byte_tokenizer
from longstraw_sdk.demo.warmup import WarmUpStage, warm_up


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_tokenizer_maps_every_byte_to_itself_and_back(tokenizer):
    text = "".join(chr(code) for code in range(0x20, 0x250)) + "\n\t\r\x00 “é” 漢字"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*"β".encode(), EOS_ID, PAD_ID], skip_special_tokens=True) == "β"


def test_tokenizer_pads_left_and_survives_saving(tokenizer, tmp_path):
    batch = tokenizer(["ab", "a"], padding=True)
    assert batch["input_ids"] == [[97, 98], [PAD_ID, 97]]
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("a#Z")["input_ids"] == list(b"a#Z")
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (EOS_ID, PAD_ID, "left")


def test_prose_parts_share_no_paragraph_and_no_long_passage():
    prose = load_prose()
    assert len(prose.train) > 200_000 and len(prose.held_out) > 40_000
    paragraphs = [{" ".join(p.split()) for p in part.split("\n\n")} for part in (prose.train, prose.held_out)]
    assert not paragraphs[0] & paragraphs[1]
    n = 160
    windows = {prose.train[i : i + n] for i in range(len(prose.train) - n)}
    assert not any(prose.held_out[i : i + n] in windows for i in range(len(prose.held_out) - n))
    assert CUE.strip() not in prose.train + prose.held_out
    assert (prose.train + prose.held_out).isascii(), "answers are the only other characters"


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_prompts_are_long_deterministic_and_hold_the_fact_once(tokenizer, split):
    rows = needle_dataset(split, 12, seed=3)
    assert rows.to_dict() == needle_dataset(split, 12, seed=3).to_dict()
    assert rows["prompt"] != needle_dataset(split, 12, seed=4)["prompt"]
    lengths = [len(ids) for ids in tokenizer(list(rows["prompt"]))["input_ids"]]
    assert min(lengths) >= 4000 and max(lengths) <= 4400 and len(set(lengths)) > 1
    for row in rows:
        assert row["answer"] in ANSWERS
        assert row["prompt"].count(FACT.format(answer=row["answer"])) == 1
        assert row["prompt"].count(CUE) == 2 and row["prompt"].endswith(CUE)


def test_prompts_refuse_unknown_splits_and_impossible_lengths():
    with pytest.raises(ValueError, match="held_out"):
        needle_dataset("test", 1)
    with pytest.raises(ValueError, match="n_tokens"):
        needle_dataset("train", 1, n_tokens_min=10, n_tokens_max=10)


def test_reward_is_exact_match():
    assert needle_reward(["β", "β.", "", "α", " β"], ["β"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("build", [tiny_qwen36, tiny_dense, tiny_glm52])
def test_models_are_deterministic_and_warm_up_is_too(tokenizer, build):
    stages = (WarmUpStage(n_tokens=160, n_documents=2, n_steps=2, learning_rate=1e-3, muon_learning_rate=1e-2),)
    states = []
    for _ in range(2):
        model = build(tokenizer, seed=5)
        assert model.config.max_position_embeddings >= 8192
        report = warm_up(model, load_prose().train, seed=5, stages=stages)
        assert [stage.n_steps for stage in report.stages] == [2]
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0)
    assert not torch.equal(build(tokenizer, seed=6).lm_head.weight, build(tokenizer, seed=5).lm_head.weight)


def test_indexers_learn_what_attention_reads_and_nothing_else_changes(tokenizer, monkeypatch):
    monkeypatch.setattr(indexer, "N_TOKENS", 256)
    model = tiny_glm52(tokenizer)
    for layer in model.model.layers:  # a fresh model attends to everything alike
        layer.self_attn.q_b_proj.weight.data.mul_(8.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    stock = model.model.layers[0].self_attn.indexer.forward
    rng = random.Random(0)
    text = load_prose().train

    def document(n_tokens):
        start = rng.randrange(len(text) - n_tokens)
        return list(text[start : start + n_tokens].encode()), [n_tokens - 1]

    def last_to_first():
        divergences = indexer.distil_indexers(model, document, rng)
        assert len(divergences) == indexer.N_STEPS
        return sum(divergences[-4:]) / sum(divergences[:4])

    with monkeypatch.context() as patch:
        patch.setattr(indexer, "LEARNING_RATE", 0.0)
        assert last_to_first() > 0.9, "control"
    assert last_to_first() < 0.8  # random attention can be fitted only in part
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != (".indexer." in name), name
    assert model.model.layers[0].self_attn.indexer.forward == stock
    assert indexer.distil_indexers(tiny_dense(tokenizer), document, rng) == ()


def test_full_attention_reads_what_a_selection_of_all_tokens_reads(tokenizer):
    model = tiny_glm52(tokenizer).eval()
    ids = torch.randint(0, 256, (1, 600), generator=torch.Generator().manual_seed(0))
    sparse = model(ids).logits
    with indexer.full_attention(model):
        full = model(ids).logits
    selecting = model.model.layers[0].self_attn.indexer
    selecting.index_topk = 600
    torch.testing.assert_close(full, model(ids).logits)
    assert (full - sparse).abs().max() > 1e-3, "control: 256 of 600 tokens are not all"
