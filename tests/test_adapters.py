"""Adapters: the registry, what is refused and why, reversible binding, the start-up probe and LoRA coverage."""

import dataclasses
import logging
import re

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from longstraw_sdk import (
    DecoderOutput,
    LongStrawSession,
    RegistryError,
    UnsupportedModelError,
    adapter_for,
    register_adapter,
)
from longstraw_sdk import adapter as adapter_module
from longstraw_sdk.bound import bind_model
from longstraw_sdk.evidence.parity import ParityCase, check_parity, randomize_lora
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.hf.checks import find_problems
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.dense import DenseAdapter
from longstraw_sdk.models.glm52 import GLM52Adapter
from longstraw_sdk.models.qwen36 import Qwen36Adapter

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MOE = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def build(name, **options):
    config = getattr(transformers, f"{name}Config")(**(TINY | options))
    torch.manual_seed(0)
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)


def tiny(architecture):
    """`tiny_model`, and SmolLM3, which is none of its architectures: here layer 0 has no rotary embedding."""
    if architecture != "smollm3":
        return tiny_model(architecture)
    base = build("SmolLM3", no_rope_layers=[0, 1])
    model = get_peft_model(base, adapter_for(base).lora_config(r=4))
    randomize_lora(model)
    return model


# --- registry ---


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(adapter_module, "_REGISTRY", dict(adapter_module._REGISTRY))


class Model:
    def __init__(self, model_type):
        self.config = transformers.PretrainedConfig()
        self.config.model_type = model_type


class OtherAdapter(DenseAdapter):
    pass


@pytest.mark.parametrize(
    ("architecture", "cls"),
    [
        ("qwen36", Qwen36Adapter),
        ("glm52", GLM52Adapter),
        *((name, DenseAdapter) for name in ("llama", "qwen2", "qwen3", "mistral", "smollm3")),
    ],
)
def test_adapter_is_found_by_model_type_and_says_so_itself(architecture, cls):
    base = base_model_of(tiny(architecture))
    adapter = adapter_for(base)
    assert type(adapter) is cls
    assert base.config.model_type in cls.model_types
    adapter.validate(base)


def test_every_registered_type_is_named_by_its_adapter():
    adapters = (DenseAdapter, GLM52Adapter, Qwen36Adapter)
    assert {t for cls in adapters for t in cls.model_types} == set(adapter_module._REGISTRY)


@pytest.mark.parametrize(("given", "near"), [("qwen3_5", "qwen3_5_text"), ("lama", "llama"), ("mistrall", "mistral")])
def test_unknown_model_type_is_answered_with_near_names(given, near):
    with pytest.raises(RegistryError, match=rf"'{given}'.*did you mean.*{near}.*register_adapter\(\)"):
        adapter_for(Model(given))


def test_model_without_a_type_is_refused():
    with pytest.raises(RegistryError, match="model type None"):
        adapter_for(nn.Linear(2, 2))


def test_second_adapter_for_a_type_is_refused_and_both_are_named(registry):
    with pytest.raises(RegistryError, match=r"longstraw_sdk.models.dense:DenseAdapter already.*:OtherAdapter cannot"):
        register_adapter("llama", OtherAdapter)
    assert type(adapter_for(Model("llama"))) is DenseAdapter


def test_registering_the_same_adapter_again_is_fine_as_class_or_name(registry):
    register_adapter("llama", DenseAdapter)
    register_adapter("llama", "longstraw_sdk.models.dense:DenseAdapter")
    assert type(adapter_for(Model("llama"))) is DenseAdapter


def test_name_is_imported_only_when_asked_for(registry):
    register_adapter("toy", "no_such_module:Toy")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        adapter_for(Model("toy"))
    register_adapter("toy2", OtherAdapter)
    assert type(adapter_for(Model("toy2"))) is OtherAdapter


# --- what is refused ---


def no_kwargs_model():
    model = build("Llama")
    model.model.layers[1].self_attn = AttentionWithoutKwargs(model.config, 1)
    return model


class AttentionWithoutKwargs(LlamaAttention):
    """As attention layers were written before transformers passed `kwargs` to the cache."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = eager_attention_forward(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def tensor_parallel_model():
    model = build("Llama")
    model._tp_size = 2  # as from_pretrained(tp_plan="auto") leaves it on two ranks
    return model


def lora_dropout_model():
    options = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    return base_model_of(get_peft_model(build("Llama"), options))


def composite_model():
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=TINY | {"num_hidden_layers": 4}, vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(config)


REFUSED = {
    "mistral sliding": (lambda: build("Mistral", sliding_window=8), ["sliding_window=8"]),
    "mixtral sliding": (lambda: build("Mixtral", sliding_window=8, num_local_experts=2), ["sliding_window=8"]),
    "qwen2 sliding": (
        lambda: build("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        ["layer types sliding_attention", "layers.1.self_attn attends to a sliding window of 8"],
    ),
    "gemma2": (
        lambda: build("Gemma2"),
        ["layer types sliding_attention", "final_logit_softcapping", "attn_logit_softcapping", "sliding window"],
    ),
    "gemma3": (lambda: build("Gemma3Text"), ["layer types sliding_attention", "sliding window"]),
    "mla": (lambda: build("DeepseekV3", **MLA, **MOE), [r"multi-head latent attention \(config.kv_lora_rank\)"]),
    "glm on dense": (
        lambda: base_model_of(tiny_model("glm52")),
        ["layer types indexed_attention are not served", r"multi-head latent attention \(config.kv_lora_rank\)"],
    ),
    "dynamic rope": (
        lambda: build("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        [r"its rotary frequencies \(rope_type 'dynamic'\) change with the length of the text"],
    ),
    "long rope": (
        lambda: build(
            "Llama",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
                "factor": 2.0,
            },
        ),
        [r"its rotary frequencies \(rope_type 'longrope'\) change with the length of the text"],
    ),
    "sinks": (
        lambda: build("GptOss", layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1),
        ["self_attn has attention sinks"],
    ),
    "chunked": (
        lambda: build("Llama4Text", num_local_experts=2, intermediate_size_mlp=32),
        ["layer types chunked_attention"],
    ),
    "linear attention on dense": (
        lambda: build("Qwen3_5Text", num_hidden_layers=4),
        [r"layer types linear_attention are not served.*it knows full_attention"],
    ),
    "no kwargs": (no_kwargs_model, [r"layers.1.self_attn \(AttentionWithoutKwargs\) calls cache.update without"]),
    "attention dropout": (lambda: build("Llama", attention_dropout=0.1), ["config.attention_dropout=0.1"]),
    "lora dropout": (lora_dropout_model, [r"dropout is on \(.*q_proj.lora_dropout.default.p=0.1"]),
    "tensor parallel": (tensor_parallel_model, ["split over 2 ranks by tensor parallelism"]),
    "multimodal": (composite_model, ["multimodal; load the text model alone"]),
    "cohere logit scale": (lambda: build("Cohere"), ["config.logit_scale=0.0625 changes the logits"]),
    "granite logit scale": (lambda: build("Granite", logits_scaling=8.0), ["config.logits_scaling=8.0"]),
    "no head": (lambda: build("Llama").model, ["no LM head"]),
    "not transformers": (lambda: nn.Linear(2, 2), ["not a transformers PreTrainedModel"]),
    "old attention": (
        lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_head=4)),
        ["AttentionInterface", "calls cache.update without"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_cannot_be_served_is_refused_with_every_finding(case):
    make, findings = REFUSED[case]
    model = make()
    adapter = Qwen36Adapter() if case == "multimodal" else DenseAdapter()
    with pytest.raises(UnsupportedModelError) as caught:
        adapter.validate(model)
    message = str(caught.value)
    assert message.startswith(f"{type(adapter).__name__} cannot serve {type(model).__name__}:\n  - ")
    for finding in findings:
        assert re.search(finding, message), message
    assert message.count("\n  - ") == len(findings), message


def test_several_findings_are_listed_together():
    model = build("Mistral", sliding_window=8, attention_dropout=0.1)
    model.config.logit_scale = 2.0
    with pytest.raises(
        UnsupportedModelError, match=r"(?s)sliding_window=8.*\n  - .*logit_scale.*\n  - .*dropout is on"
    ):
        DenseAdapter().validate(model)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "SmolLM3", "Gemma", "Olmo2"])
def test_control_a_plain_decoder_has_no_findings(name):
    assert find_problems(build(name), ("full_attention",)) == []


def test_refused_model_is_left_as_it_was():
    model = get_peft_model(build("Mistral", sliding_window=8), LoraConfig(target_modules=["q_proj"]))
    stock = base_model_of(model).config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="sliding_window=8"):
        LongStrawSession(model)
    assert base_model_of(model).config._attn_implementation == stock
    base_model_of(model).config.sliding_window = None
    LongStrawSession(model).close()


# --- the probe ---


class BlindAdapter(DenseAdapter):
    """Forgets the prefix: every forward starts at position 0 with nothing before it."""

    def forward(self, model, input_ids, view):
        return super().forward(model, input_ids, dataclasses.replace(view, boundary=0))


class ScaledAdapter(DenseAdapter):
    def forward(self, model, input_ids, view):
        out = super().forward(model, input_ids, view)
        return DecoderOutput(out.hidden * 2, out.produced)


class ShiftedAdapter(DenseAdapter):
    """Sees all but the last prefix token."""

    def forward(self, model, input_ids, view):
        out = super().forward(model, input_ids, view)
        return DecoderOutput(out.hidden.roll(1, 1), out.produced)


@pytest.mark.parametrize(
    ("adapter", "match"),
    [
        (BlindAdapter, "changing a prompt token did not move"),
        (ScaledAdapter, "differ from the stock forward"),
        (ShiftedAdapter, "differ from the stock forward"),
    ],
)
def test_probe_refuses_an_adapter_that_is_not_the_model(adapter, match):
    model = tiny_model("llama", n_layers=2)
    stock = base_model_of(model).config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=match):
        LongStrawSession(model, adapter())
    assert base_model_of(model).config._attn_implementation == stock
    LongStrawSession(model, DenseAdapter()).close()


def test_probe_refuses_a_model_that_changes_its_logits_after_the_head():
    model = tiny_model("llama", n_layers=2)

    def halve(module, args, output):
        output.logits = output.logits / 2
        return output

    hook = base_model_of(model).register_forward_hook(halve)
    with pytest.raises(UnsupportedModelError, match="differ from the stock forward"):
        LongStrawSession(model)
    hook.remove()
    LongStrawSession(model).close()


# --- binding ---

BATCH = torch.arange(2 * 12).reshape(2, 12) + 3
PADDED = {"input_ids": BATCH, "attention_mask": torch.tensor([[0] * 5 + [1] * 7, [1] * 12])}


@torch.no_grad()
def stock_outputs(model):
    """Logits of plain, padded and cached forwards, and a generation."""
    cached = model(input_ids=BATCH[:, :8], use_cache=True)
    more = model(input_ids=BATCH[:, 8:], past_key_values=cached.past_key_values)
    generated = model.generate(**PADDED, max_new_tokens=4, do_sample=False)
    return [model(input_ids=BATCH).logits, model(**PADDED).logits, cached.logits, more.logits, generated]


def extension_points(model):
    return model.config._attn_implementation, [vars(m).get("_can_checkpoint_with_cache") for m in model.modules()]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("architecture", "adapter"), [("llama", DenseAdapter), ("qwen36", Qwen36Adapter)])
def test_binding_is_reversible_and_leaves_the_stock_model_bitwise_alone(architecture, adapter, implementation):
    model = base_model_of(tiny_model(architecture, n_layers=4))
    model.set_attn_implementation(implementation)
    model.model.layers[0]._can_checkpoint_with_cache = False
    points, before = extension_points(model), stock_outputs(model)
    assert points[0] == implementation
    bound = bind_model(model, adapter())
    assert extension_points(model) != points
    during = stock_outputs(model)
    bound.unbind()
    bound.unbind()
    assert extension_points(model) == points
    for name, outputs in (("during", during), ("after", stock_outputs(model))):
        assert all(torch.equal(a, b) for a, b in zip(before, outputs, strict=True)), name
    assert not torch.equal(before[0][0], before[1][0]), "control: padding matters to the stock model"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_replay_does_not_depend_on_the_stock_attention(implementation):
    model = tiny_model("qwen36")
    base_model_of(model).set_attn_implementation(implementation)
    with LongStrawSession(model, probe=False) as session, session.capture(BATCH[0]) as prefix:
        logps = prefix.score([BATCH[1]])[0]
    logits = model(input_ids=torch.cat([BATCH[0], BATCH[1]])[None]).logits[0, 11:-1]
    expected = torch.log_softmax(logits, -1).gather(-1, BATCH[1][:, None])[:, 0]
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


def test_base_model_saved_while_bound_loads_as_a_stock_model(tmp_path):
    model = build("Llama")
    expected = model(input_ids=BATCH).logits
    bound = bind_model(model, DenseAdapter())
    assert "longstraw" in model.config._attn_implementation
    model.save_pretrained(tmp_path)
    bound.unbind()
    for file in tmp_path.glob("*.json"):
        assert "longstraw" not in file.read_text(), file.name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(input_ids=BATCH).logits, expected)


def test_adapter_saved_while_bound_loads_on_a_stock_model(tmp_path):
    model = tiny_model("qwen36")
    with LongStrawSession(model):
        expected = model(input_ids=BATCH).logits
        model.save_pretrained(tmp_path)
    assert "longstraw" not in (tmp_path / "adapter_config.json").read_text()
    loaded = PeftModel.from_pretrained(tiny_model("qwen36").unload(), tmp_path)
    torch.testing.assert_close(loaded(input_ids=BATCH).logits, expected, rtol=0, atol=1e-6)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(input_ids=BATCH).logits, expected, atol=1e-3), "control: LoRA matters"


# --- LoRA coverage ---

GDN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def test_coverage_counts_every_linear_of_every_layer_kind(caplog):
    model = tiny_model("qwen36", rank=4)
    with caplog.at_level(logging.WARNING, "longstraw_sdk"), LongStrawSession(model) as session:
        coverage = session.coverage()
    assert not coverage.missing
    assert "LoRA is missing" not in caplog.text
    rows = {(r.layer_kind, r.linear): r for r in coverage.rows}
    gdn = {linear for kind, linear in rows if kind == "recurrent"}
    assert gdn == {f"linear_attn.{n}" for n in GDN} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    attention = {linear for kind, linear in rows if kind == "kv"}
    assert attention == {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    for (kind, _), row in rows.items():
        assert row.n_layers == row.n_with_lora == {"recurrent": 3, "kv": 1}[kind]
    assert rows["recurrent", "linear_attn.in_proj_b"].n_trainable_parameters == 3 * 4 * (32 + 4)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(r.n_trainable_parameters for r in coverage.rows) == trainable


def test_targets_that_skip_the_gdn_projections_are_warned_about(caplog):
    base = tiny_model("qwen36").unload()
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    with caplog.at_level(logging.WARNING, "longstraw_sdk"), LongStrawSession(model) as session:
        missing = {(r.layer_kind, r.linear) for r in session.coverage().missing}
        table = str(session.coverage())
    assert {("recurrent", f"linear_attn.{n}") for n in GDN} <= missing
    assert ("kv", "self_attn.q_proj") not in missing
    for name in GDN:
        assert f"LoRA is missing on linear_attn.{name} in 3 of 3 recurrent layers" in caplog.text
    assert re.search(r"recurrent +linear_attn.in_proj_qkv +0 of 3 +0", table)
    assert re.search(r"kv +self_attn.q_proj +1 of 1", table)


def test_frozen_lora_does_not_count_as_covered():
    model = tiny_model("llama", n_layers=2)
    for name, p in model.named_parameters():
        if "layers.0.mlp.up_proj" in name:
            p.requires_grad_(False)
    with LongStrawSession(model) as session:
        assert [(r.linear, r.n_with_lora, r.n_layers) for r in session.coverage().missing] == [("mlp.up_proj", 1, 2)]


@pytest.mark.parametrize("architecture", ["qwen36", "glm52", "llama", "qwen2", "qwen3", "mistral", "smollm3"])
def test_preset_covers_every_linear_of_every_layer(architecture):
    """But those of an indexer: no gradient reaches what only selects."""
    base = tiny(architecture).unload()
    linears = {n for n, m in base.model.layers.named_modules() if isinstance(m, nn.Linear) and ".indexer." not in n}
    model = get_peft_model(base, adapter_for(base).lora_config(r=2))
    covered = {n for n, m in base_model_of(model).model.layers.named_modules() if hasattr(m, "lora_A")}
    assert {n for n in covered if ".mlp.experts" not in n} == linears, "stacked experts are parameters, not linears"
    assert not any(".lora_" in n for n, _ in base_model_of(model).lm_head.named_parameters())


def test_preset_passes_options_on_and_keeps_dropout_off():
    config = DenseAdapter().lora_config(r=8, target_modules=["q_proj"], use_rslora=True)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (8, 16, 0.0, True)
    assert config.target_modules == {"q_proj"}


# --- an architecture of the registry that has no tiny model of its own ---


def test_smollm3_with_and_without_rotary_embeddings():
    model = tiny("smollm3")
    assert [layer.self_attn.use_rope for layer in base_model_of(model).model.layers] == [0, 1]
    result = check_parity(model, ParityCase("float32"))
    assert result.passed, result
