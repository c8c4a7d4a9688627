"""GLM-5.2: parity with autograd, the selection that transformers makes, reversible binding, factored LoRA, refusals.

The tiny model has 6 layers. Layers 0, 1 and 4 select, 16 keys per query; layers 0 and 1 have a dense MLP, the others 8
experts and a shared one. Tolerances of parity are those of `longstraw_sdk.evidence.parity`.
"""

import copy
import dataclasses
import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from tensor_sizes import LargestOutput
from transformers import GenerationConfig, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from longstraw_sdk import ConfigurationError, LongStrawSession, UnsupportedModelError
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import ParityCase, check_parity, randomize_lora
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.models.glm52 import GLM52Adapter
from longstraw_sdk.models.glm52 import attention as glm52_attention
from longstraw_sdk.models.glm52.adapter import specs_of
from longstraw_sdk.models.glm52.attention import ResidentGlmMoeDsaAttention, _into_latent, _out_of_latent
from longstraw_sdk.models.glm52.experts import FactoredExperts, FactoredLinear
from longstraw_sdk.ops import select_top_k

N_LAYERS, TOP_K = 6, 16
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MODES = [("full", "live"), ("response", "live"), ("full", "frozen")]


def make(config=None, **overrides):
    """A tiny model with non-zero LoRA, by the preset unless `config` says otherwise."""
    model = tiny_model("glm52", n_layers=N_LAYERS, **overrides)
    if config is not None:
        model = get_peft_model(model.unload(), config)
        randomize_lora(model)
    return model


def tokens(n, seed=0):
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed))


def layers_of(model):
    return base_model_of(model).model.layers


@torch.no_grad()
def stock_log_probs(model, prompt, row):
    logits = model(input_ids=torch.cat([prompt, row])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, row[:, None])[:, 0]


# --- parity ---


@pytest.mark.parametrize(
    ("scope", "prefix_adapter", "dtype"),
    [
        pytest.param(*mode, dtype, marks=pytest.mark.slow if dtype == "bfloat16" and mode != MODES[0] else ())
        for mode in MODES
        for dtype in ("float64", "float32", "bfloat16")
    ],
)
def test_parity_in_every_mode_and_precision(scope, prefix_adapter, dtype):
    result = check_parity(make(), ParityCase(dtype, scope, prefix_adapter))
    assert result.passed, result


@pytest.mark.parametrize("prompt_tokens", [1, 2, 5, 65])
def test_parity_of_short_prompts(prompt_tokens):
    """Up to 16 tokens every query sees all keys; where the response begins to select, some keys are its own."""
    result = check_parity(make(), ParityCase("float64", prompt_tokens=prompt_tokens))
    assert result.passed, result


@pytest.mark.parametrize(
    ("scope", "prefix_adapter", "changes"),
    [
        ("full", "live", {"chunk_tokens": 97, "page_tokens": 32}),
        ("full", "live", {"chunk_tokens": 32, "page_tokens": 100}),
        ("response", "live", {"chunk_tokens": 32, "page_tokens": 32}),
        ("full", "live", {"chunk_tokens": 13, "page_tokens": 5}),
        ("full", "frozen", {"chunk_tokens": 5, "page_tokens": 3}),
        ("full", "live", {"chunk_tokens": 5, "page_tokens": 1, "prompt_tokens": 30}),
        ("full", "live", {"chunk_tokens": 1, "page_tokens": 4, "prompt_tokens": 25}),
        ("full", "live", {"replay_tokens": 24}),
        ("response", "live", {"replay_tokens": 1000, "page_tokens": 7}),
        ("full", "live", {"gradient_checkpointing": True}),
        ("full", "live", {"gradient_checkpointing": True, "chunk_tokens": 33, "replay_tokens": 64}),
    ],
    ids=str,
)
def test_parity_does_not_depend_on_chunks_pages_packing_or_checkpointing(scope, prefix_adapter, changes):
    case = ParityCase("float64", scope, prefix_adapter, response_tokens=(7, 12, 1))
    case = dataclasses.replace(case, **changes)
    result = check_parity(make(), case)
    assert result.passed, result


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=list(ATTENTION), use_rslora=True),
        LoraConfig(r=4, target_modules=["q_b_proj"], target_parameters=["experts.down_proj", "kv_b_proj.weight"]),
        LoraConfig(r=4, target_modules=[*ATTENTION, "wq_b", "wk", "weights_proj"]),
    ],
    ids=["rslora", "parameters", "indexer"],
)
def test_parity_of_other_lora_configurations(config):
    result = check_parity(make(config), ParityCase("float64", prompt_tokens=40))
    assert result.passed, result


# --- selection ---


@torch.no_grad()
def selections(model, forward):
    """What every layer selects while `forward` runs: per layer a list, per query a set of positions it may see."""
    found = {i: [] for i in range(N_LAYERS)}

    def record(i):
        def hook(module, args, output):
            for row in output[2][0].tolist():
                found[i].append({t for t in row if 0 <= t <= len(found[i])})

        return hook

    hooks = [layer.self_attn.register_forward_hook(record(i)) for i, layer in enumerate(layers_of(model))]
    try:
        with float64_upcasts():  # rounding must not decide between two keys that score nearly the same
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def captured_selections(model, prompt, **options):
    with LongStrawSession(model, probe=False, poison=True, **options) as session:
        return selections(model, lambda: session.capture(prompt).release())


def test_every_chunking_selects_what_transformers_selects():
    model, prompt = make().double(), tokens(98)
    stock = selections(model, lambda: model(input_ids=prompt[None, :-1], use_cache=False))
    assert [len(s) for s in stock[0]] == [min(i + 1, TOP_K) for i in range(97)]
    for chunk_tokens, page_tokens in [(97, 32), (32, 32), (13, 5), (5, 8), (2, 100), (1, 8)]:
        options = {"chunk_tokens": chunk_tokens, "page_tokens": page_tokens}
        assert captured_selections(model, prompt, **options) == stock, options


def test_shared_layers_reuse_the_selection_of_the_last_layer_that_selects():
    found = captured_selections(make().double(), tokens(98), chunk_tokens=32, page_tokens=8)
    assert found[1] == found[2] == found[3]
    assert found[4] == found[5]
    assert found[0] != found[1] != found[4], "control: layers that select for themselves select differently"
    overlap = sum(len(a & b) for a, b in zip(found[1], found[4], strict=True)) / sum(len(a) for a in found[1])
    assert overlap < 0.9, "control: by far"


def test_control_a_sequence_that_differs_in_one_token_selects_differently():
    model, prompt = make().double(), tokens(98)
    other = prompt.clone()
    other[3] = (other[3] + 1) % 97
    options = {"chunk_tokens": 32, "page_tokens": 8}
    assert captured_selections(model, prompt, **options) != captured_selections(model, other, **options)


@pytest.mark.parametrize("page_tokens", [1, 5, 8, 64])
def test_keys_are_scored_in_tiles_of_whole_pages(monkeypatch, page_tokens):
    """The shape of a product decides how its sums round, so it must not depend on where a chunk begins or ends."""
    seen = []

    def record(query, weights, positions, tiles, top_k, scale):
        tiles = list(tiles)
        seen.append([(first, keys.shape[-2]) for first, keys in tiles])
        assert seen[-1][-1][0] <= int(positions[-1]) < seen[-1][-1][0] + page_tokens, "every key is there"
        return select_top_k(query, weights, positions, tiles, top_k, scale)

    monkeypatch.setattr(glm52_attention, "select_top_k", record)
    with LongStrawSession(make(), chunk_tokens=13, page_tokens=page_tokens, probe=False) as session:
        with session.capture(tokens(40)) as prefix:
            prefix.score([tokens(9, 1)])
    assert len(seen) == 3 * (3 + 1), "three layers select, in three chunks and a response"
    for tiles in seen:
        assert tiles == [(i * page_tokens, page_tokens) for i in range(len(tiles))]


def of_the_query_before(selected, earlier):
    return torch.cat([selected[:, :1], selected[:, :-1]], 1)


def of_an_earlier_layer(selected, earlier):
    return earlier


@pytest.mark.parametrize("wrong", [None, of_the_query_before, of_an_earlier_layer])
def test_log_probs_follow_the_shared_selection(monkeypatch, wrong):
    """A shared layer that takes another selection is told apart; with the right one log-probs are the stock ones."""
    model, prompt, row = make().double(), tokens(60), tokens(20, 1)
    expected = stock_log_probs(model, prompt, row)
    forward, of_layer = ResidentGlmMoeDsaAttention.forward, {}

    def other_selection(self, *args, prev_topk_indices=None, **kwargs):
        if self.layer_idx == 2 and wrong is not None:
            prev_topk_indices = wrong(prev_topk_indices, of_layer[0])
        out = forward(self, *args, prev_topk_indices=prev_topk_indices, **kwargs)
        of_layer[self.layer_idx] = out[2]
        return out

    with LongStrawSession(model, probe=False, chunk_tokens=13, page_tokens=8) as session:
        monkeypatch.setattr(ResidentGlmMoeDsaAttention, "forward", other_selection)
        with session.capture(prompt) as prefix:
            error = float((prefix.score([row])[0] - expected).abs().max())
    assert of_layer.keys() == set(range(N_LAYERS))
    if wrong is None:
        assert error < 1e-6
    else:
        assert error > 1e-3, error


# --- binding ---


def classes_of(model):
    return [type(module) for module in model.modules()]


@torch.no_grad()
def stock_outputs(model):
    """Logits of plain, padded and cached forwards, and a generation."""
    ids = tokens(60).view(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cached = model(input_ids=ids[:, :20], use_cache=True)
    logits = [
        model(input_ids=ids, use_cache=False).logits,
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits,
        cached.logits,
        model(input_ids=ids[:, 20:], cache=cached.cache).logits,
    ]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    return logits, model.generate(input_ids=ids, attention_mask=mask, generation_config=config)


def test_binding_is_reversible():
    model = make().eval()
    classes, (before, generated) = classes_of(model), stock_outputs(model)
    swapped = {GlmMoeDsaAttention, ParamWrapper}
    assert swapped <= set(classes)
    session = LongStrawSession(model, chunk_tokens=16, page_tokens=8)
    bound = set(classes_of(model))
    assert {ResidentGlmMoeDsaAttention, FactoredExperts, FactoredLinear} <= bound
    assert GlmMoeDsaAttention not in bound
    during, generated_during = stock_outputs(model)
    session.close()
    assert classes_of(model) == classes
    after, generated_after = stock_outputs(model)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(generated, generated_during) and torch.equal(generated, generated_after)
    for a, b in zip(before, during, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # LoRA of experts and MLPs is summed in another order
    assert not torch.equal(before[0], before[1]), "control: padding matters to the stock model"


def test_with_lora_on_attention_alone_the_bound_model_is_bitwise_the_stock_model():
    model = make(LoraConfig(r=4, target_modules=list(ATTENTION))).eval()
    before, generated = stock_outputs(model)
    with LongStrawSession(model, chunk_tokens=16, page_tokens=8):
        during, generated_during = stock_outputs(model)
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    assert torch.equal(generated, generated_during)


def test_a_refused_model_keeps_its_classes():
    model = make()
    classes = classes_of(model)
    base_model_of(model).config.indexer_types = ["shared"] * N_LAYERS
    with pytest.raises(UnsupportedModelError):
        LongStrawSession(model)
    assert classes_of(model) == classes


# --- state ---


def test_bytes_of_the_released_geometry():
    config = GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    specs = specs_of(config, torch.bfloat16)
    assert len({spec.layer for spec in specs}) == config.num_hidden_layers == 78
    selecting = [spec.layer for spec in specs if spec.kind == "indexer_key"]
    assert selecting == [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    assert len(selecting) == 21
    assert sum(spec.bytes_per_token for spec in specs) == 95_232 == 78 * 576 * 2 + 21 * 128 * 2
    assert sum(spec.accumulator_bytes_per_token for spec in specs) == 78 * 576 * 4
    assert sum(spec.bytes_per_token for spec in specs_of(GlmMoeDsaConfig(), torch.bfloat16)) == 78 * (576 + 128) * 2


def test_pages_hold_what_the_specs_say():
    model = make()
    with LongStrawSession(model, chunk_tokens=16, page_tokens=8) as session:
        specs = session.bound.specs
        assert [spec.key for spec in specs if spec.kind == "indexer_key"] == [(i, "indexer_key") for i in (0, 1, 4)]
        with session.capture(tokens(41)) as prefix:
            assert prefix.n_bytes == sum(spec.resident_bytes(40, 8) for spec in specs) == session.pool.live_bytes
            pages = prefix.n_bytes
            prefix.replay(tokens(20, 1)).logps.sum().backward()
            assert prefix.n_bytes == pages + 40 * N_LAYERS * (16 + 8) * 4, "accumulators of latents alone"


# --- LoRA ---


def test_preset_covers_every_linear_and_every_expert():
    model = make()
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    counts = {
        "self_attn": N_LAYERS * 5,
        r"[01]\.mlp\.(gate|up|down)_proj": 2 * 3,
        "shared_experts": 4 * 3,
        r"mlp\.experts\.(base_layer\.)?lora": 4 * 2,
    }
    for pattern, n_linears in counts.items():
        assert sum(bool(re.search(pattern, name)) for name in names) == 2 * n_linears, pattern
    assert len(names) == 112 == 2 * sum(counts.values())


def test_control_peft_leaves_mlps_named_among_the_modules_without_lora():
    """For this architecture PEFT turns these names into the parameters of the stacked experts and nothing else."""
    config = LoraConfig(r=4, target_modules=[*ATTENTION, "gate_proj", "up_proj", "down_proj"])
    names = [name for name, _ in make(config).named_parameters() if ".lora_" in name]
    assert sum("self_attn" in name for name in names) == 2 * N_LAYERS * 5
    assert sum(".mlp.experts." in name for name in names) == 2 * 4 * 2
    assert len(names) == 2 * (N_LAYERS * 5 + 4 * 2), "neither dense nor shared MLPs"


def test_saved_adapter_reloads_with_plain_peft(tmp_path):
    model = make().eval()
    with LongStrawSession(model):
        model.save_pretrained(tmp_path / "bound")
    model.save_pretrained(tmp_path / "stock")
    ids = tokens(40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for name in ("bound", "stock"):
            fresh = PeftModel.from_pretrained(make().unload(), tmp_path / name).eval()
            assert torch.equal(fresh(input_ids=ids).logits, expected), name
        with fresh.disable_adapter():
            assert not torch.allclose(fresh(input_ids=ids).logits, expected, atol=1e-3), "control: LoRA matters"


@pytest.mark.parametrize("options", [{"use_dora": True}], ids=str)
def test_lora_variants_on_kv_b_proj_are_refused(options):
    with pytest.raises(ConfigurationError, match=r"'default' is not plain LoRA on kv_b_proj .*use plain LoRA there"):
        LongStrawSession(make(LoraConfig(r=4, target_modules=["kv_b_proj"], **options)))
    LongStrawSession(make(LoraConfig(r=4, target_modules=["o_proj"], **options))).close()


# --- factored experts and MLPs ---


def experts_model(*targets, n_adapters=1):
    """The tiny model in float64, without dropout of any kind, with `n_adapters` active adapters on parameters."""
    config = LoraConfig(r=3, target_modules=["o_proj"], target_parameters=list(targets))
    model = make(config)
    for i in range(1, n_adapters):
        model.add_adapter(f"more{i}", dataclasses.replace(copy.deepcopy(config), r=2, lora_alpha=5))
    model.base_model.set_adapter(["default", *(f"more{i}" for i in range(1, n_adapters))])
    randomize_lora(model)
    return model.double()


def routed(n_tokens, experts, hidden=32):
    """Hidden states, `num_experts_per_tok` of the given experts per token, and weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n_tokens, hidden, generator=generator, dtype=torch.float64)
    chosen = [torch.randperm(len(experts), generator=generator)[:2] for _ in range(n_tokens)]
    return x, torch.tensor(experts)[torch.stack(chosen)], torch.rand(n_tokens, 2, generator=generator).double()


def outputs_and_gradients(module, x, *args):
    """Output, and gradients of the input and of every LoRA tensor; None of tensors that take no part."""
    x = x.clone().requires_grad_()
    out = module(x, *args)
    factors = [p for name, p in module.named_parameters() if ".lora_" in f".{name}"]
    gradients = torch.autograd.grad(out.sin().sum(), [x, *factors], allow_unused=True)
    return [out.detach(), *gradients]


def assert_same(found, wanted):
    """Zero where one side has no gradient: experts that got no token."""
    for f, w in zip(found, wanted, strict=True):
        f, w = (torch.zeros(()) if t is None else t for t in (f, w))
        torch.testing.assert_close(*torch.broadcast_tensors(f.double(), w.double()), rtol=1e-12, atol=1e-12)


TARGETS = [("experts.gate_up_proj", "experts.down_proj"), ("experts.gate_up_proj",), ("experts.down_proj",)]


@pytest.mark.parametrize("targets", TARGETS, ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("experts", [range(8), (2, 5), (7, 0)], ids=str)
@pytest.mark.parametrize("n_adapters", [1, 2])
def test_factored_experts_equal_peft(targets, experts, n_adapters):
    model = experts_model(*targets, n_adapters=n_adapters)
    module = layers_of(model)[3].mlp.experts
    inputs = routed(11, list(experts))
    wanted = outputs_and_gradients(module, *inputs)
    with LongStrawSession(model, probe=False):
        assert type(module) is FactoredExperts
        assert_same(outputs_and_gradients(module, *inputs), wanted)
        with model.disable_adapter():
            off = module(*inputs)
    with model.disable_adapter():
        assert_same([off], [module(*inputs)])
    assert (off - wanted[0]).abs().max() > 1e-3, "control: LoRA matters"


@pytest.mark.parametrize("n_adapters", [1, 2])
def test_factored_mlps_equal_peft(n_adapters):
    targets = [f"{where}.{name}_proj.weight" for where in ("mlp", "shared_experts") for name in ("gate", "up", "down")]
    model = experts_model(*targets, n_adapters=n_adapters)
    for module in (layers_of(model)[0].mlp, layers_of(model)[3].mlp.shared_experts):
        x = routed(11, range(8))[0]
        wanted = outputs_and_gradients(module, x)
        with LongStrawSession(model, probe=False):
            assert type(module.up_proj) is FactoredLinear
            assert_same(outputs_and_gradients(module, x), wanted)
            with model.disable_adapter():
                off = module(x)
        with model.disable_adapter():
            assert_same([off], [module(x)])
        assert (off - wanted[0]).abs().max() > 1e-3, "control: LoRA matters"


def test_factored_experts_do_not_depend_on_the_other_tokens():
    """What a replay packs beside a row must not move its log-probs."""
    model = experts_model(*TARGETS[0])
    module = layers_of(model)[3].mlp.experts
    x, chosen, weights = routed(11, range(8))
    with LongStrawSession(model, probe=False):
        whole = module(x, chosen, weights)
        torch.testing.assert_close(module(x[4:6], chosen[4:6], weights[4:6]), whole[4:6], rtol=1e-12, atol=1e-12)


def test_merged_adapters_are_not_added_twice():
    model = experts_model(*TARGETS[0], "mlp.up_proj.weight", "shared_experts.up_proj.weight")
    ids = tokens(30)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with LongStrawSession(model, probe=False):
            model.merge_adapter()
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-10, atol=1e-10)
            model.unmerge_adapter()
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-10, atol=1e-10)


def test_no_tensor_of_the_size_of_all_experts_is_created():
    """Neither in the forward nor in the backward: the largest is the weight of one expert."""
    model = experts_model(*TARGETS[0])
    module = layers_of(model)[3].mlp.experts
    all_experts, one_expert = 8 * 40 * 32, 40 * 32
    inputs = routed(5, range(8))
    with LargestOutput() as stock:
        outputs_and_gradients(module, *inputs)
    with LongStrawSession(model, probe=False):
        with LargestOutput() as ours:
            outputs_and_gradients(module, *inputs)
    assert ours.n_elements <= one_expert < all_experts
    assert stock.n_elements >= all_experts, "control: PEFT builds them"


# --- bfloat16 ---


def slope(found, wanted):
    """How much of a delta arrives: the slope of `found` over `wanted`."""
    return float((found.double() * wanted).sum() / wanted.square().sum())


def test_absorbed_lora_keeps_a_delta_that_bfloat16_weights_would_lose():
    """|BA| / |W| is 1e-3, less than half a step of most bfloat16 weights. The slope is over 10^5 outputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    heads, nope, rank, r = 4, 16, 64, 4
    weight, a, b = draw(heads, nope, rank).bfloat16(), draw(r, rank), draw(heads, nope, r)
    b *= 1e-3 * weight.float().norm() / (b @ a).norm()
    factors, rounded = [(1.0, a, b)], weight + (b @ a).bfloat16()
    query, attended = draw(1, 512, heads, nope).bfloat16(), draw(1, 512, heads, rank)
    wanted = torch.einsum("bshn,hnr->bshr", query.double(), (b @ a).double())
    plain = _into_latent(query, weight, [])
    assert slope(_into_latent(query, weight, factors) - plain, wanted) == pytest.approx(1, abs=0.01)
    assert slope(_into_latent(query, rounded, []) - plain, wanted) < 0.8, "control"
    wanted = torch.einsum("bshr,hvr->bshv", attended.double(), (b @ a).double())
    plain = _out_of_latent(attended, weight, [])
    assert slope(_out_of_latent(attended, weight, factors) - plain, wanted) == pytest.approx(1, abs=0.01)
    assert slope(_out_of_latent(attended, rounded, []) - plain, wanted) < 0.8, "control"


# --- sampling ---


def sampling_model():
    """Sharper logits: with tiny weights alone the next token would nearly be a constant."""
    model = make().eval()
    with torch.no_grad():
        base_model_of(model).get_output_embeddings().weight.mul_(20)
    base_model_of(model).generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("n_prompt", [1, 5, 40])
def test_greedy_rows_equal_generate(n_prompt):
    model, prompt = sampling_model(), tokens(n_prompt)
    config = GenerationConfig(max_new_tokens=25, do_sample=False, pad_token_id=0)
    expected = model.generate(input_ids=prompt[None], generation_config=config)[0, n_prompt:].tolist()
    assert len(set(expected)) > 2, "control: the continuation is no constant"
    with LongStrawSession(model, chunk_tokens=13, page_tokens=8, poison=True) as session:
        with session.capture(prompt) as prefix:
            rows = prefix.sample(3, max_new_tokens=25, temperature=0)
    assert [row.tolist() for row in rows] == [expected] * 3


def test_seeded_rows_equal_what_generate_draws_and_their_log_probs_are_those_of_replay():
    model, prompt = sampling_model(), tokens(40)
    config = GenerationConfig(max_new_tokens=25, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    batch = prompt.expand(4, -1)
    torch.manual_seed(5)
    expected = model.generate(input_ids=batch, attention_mask=torch.ones_like(batch), generation_config=config)[:, 40:]
    assert len({tuple(row.tolist()) for row in expected}) == 4, "control: rows differ from each other"
    options = {"chunk_tokens": 13, "page_tokens": 8, "poison": True}
    with LongStrawSession(model, replay_tokens=64, **options) as session, session.capture(prompt) as prefix:
        rows = prefix.sample(4, max_new_tokens=25, seed=5)
        assert torch.equal(torch.stack(rows), expected)
        scores = prefix.score(rows)
        replayed = [out.logps.detach() for out in prefix.replay_packed(rows)]
        alone = [prefix.replay(row).logps.detach() for row in rows]
    for row, score, packed, single in zip(rows, scores, replayed, alone, strict=True):
        assert torch.equal(score, packed)
        torch.testing.assert_close(score, single, rtol=0, atol=1e-4)
        torch.testing.assert_close(score, stock_log_probs(model, prompt, row), rtol=0, atol=1e-4)


# --- refusals ---


@pytest.mark.parametrize(
    "kinds",
    [
        ["shared", "full", "full", "full", "full", "full"],
        ["full", "full", "sliding", "shared", "full", "shared"],
        ["full"] * (N_LAYERS - 1),
        ["full"] * (N_LAYERS + 1),
        None,
    ],
    ids=["shared first", "unknown", "too few", "too many", "missing"],
)
def test_indexer_types_that_cannot_be_served_are_refused(kinds):
    base = base_model_of(make())
    GLM52Adapter().validate(base)
    base.config.indexer_types = kinds
    with pytest.raises(UnsupportedModelError, match=r"config\.indexer_types=.*'full' or 'shared' per layer, starting"):
        GLM52Adapter().validate(base)


def test_dropout_and_other_layer_types_are_refused():
    base = base_model_of(make(attention_dropout=0.1))
    with pytest.raises(UnsupportedModelError, match=r"config\.attention_dropout=0\.1"):
        GLM52Adapter().validate(base)
    base.config.attention_dropout = 0.0
    base.config.layer_types = ["full_attention"] * N_LAYERS
    with pytest.raises(UnsupportedModelError, match="layer types full_attention are not served"):
        GLM52Adapter().validate(base)


# --- Small deltas in bfloat16, LoRA that cannot be served, coverage ---


def experts_with_a_small_delta(name, ratio):
    """Base weights of size 1/sqrt(in) and LoRA on `name` alone, |BA| / |W| = `ratio`."""
    model = tiny_model("glm52", n_layers=6, hidden_size=128, moe_intermediate_size=64)
    module = base_model_of(model).model.layers[3].mlp.experts
    experts = module.get_base_layer()
    with torch.no_grad():
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.copy_((weight / weight.std() * weight.shape[-1] ** -0.5).bfloat16())
        for wrapper in (module, module.base_layer):
            size = wrapper.get_delta_weight("default").norm() / wrapper.get_param().norm()
            wrapper.lora_B["default"].weight.mul_(ratio / size if wrapper.parameter_name == name else 0.0)
    return model, module


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@torch.no_grad()
def test_factored_experts_keep_a_delta_that_bfloat16_weights_would_lose(name):
    model, module = experts_with_a_small_delta(name, 1e-3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 128, generator=generator).bfloat16()
    chosen = torch.rand(4096, 8, generator=generator).topk(2).indices
    weights = torch.rand(4096, 2, generator=generator)

    def delta_of(subject, rows, gates):
        experts = base_model_of(subject).model.layers[3].mlp.experts
        with_lora = experts(rows, chosen, gates)
        with subject.disable_adapter():
            return (with_lora - experts(rows, chosen, gates)).double()

    wanted = delta_of(copy.deepcopy(model).double(), x.double(), weights.double())
    for parameter in module.get_base_layer().parameters():
        parameter.data = parameter.data.bfloat16()  # LoRA stays in float32, as PEFT keeps it

    def slope(found):
        return float((found * wanted).sum() / wanted.square().sum())

    assert slope(delta_of(model, x, weights)) < 0.8, "control: PEFT adds the delta to bfloat16 weights"
    with LongStrawSession(model, probe=False):
        assert slope(delta_of(model, x, weights)) == pytest.approx(1.0, abs=0.03)


def test_a_bias_of_lora_on_kv_b_proj_is_refused():
    base = base_model_of(tiny_model("glm52", n_layers=2)).__class__(tiny_model("glm52", n_layers=2).config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["kv_b_proj"], lora_bias=True))
    with pytest.raises(ConfigurationError, match="lora_bias=True"):
        LongStrawSession(model)


def test_quantised_experts_are_refused():
    model = make()
    experts = layers_of(model)[2].mlp.experts.get_base_layer()
    experts.down_proj = torch.nn.Parameter(experts.down_proj.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp\.experts .*float8_e4m3fn.*dequantised"):
        LongStrawSession(model)


def test_experts_of_another_class_are_refused():
    model = make(LoraConfig(r=4, target_modules=list(ATTENTION)))
    experts = layers_of(model)[3].mlp.experts
    experts.__class__ = type("FP8Experts", (type(experts),), {})
    with pytest.raises(UnsupportedModelError, match=r"layers\.3\.mlp\.experts is FP8Experts"):
        LongStrawSession(model)


def test_a_further_layer_for_multi_token_prediction_is_refused():
    model = make()
    layers_of(model).append(copy.deepcopy(layers_of(model)[-1]))
    with pytest.raises(UnsupportedModelError, match=r"7 decoder layers but config\.num_hidden_layers=6.*multi-token"):
        LongStrawSession(model)


def test_weights_for_multi_token_prediction_in_a_checkpoint_are_left_out(tmp_path):
    """Released checkpoints hold a layer 78 that transformers does not build; it changes nothing."""
    plain = make().unload().eval()
    plain.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.78.{name}.weight": torch.ones(32, 32) for name in ("eh_proj", "self_attn.o_proj")}
    save_file(weights | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = GlmMoeDsaForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    adapter = GLM52Adapter()
    ids, row = tokens(40), tokens(5, 1)
    with LongStrawSession(get_peft_model(loaded, adapter.lora_config(r=4)), adapter, chunk_tokens=16) as session:
        with session.capture(ids) as prefix:
            (logps,) = prefix.score([row])
    expected = stock_log_probs(plain, ids, row)
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


def test_lora_on_a_router_is_refused():
    base = base_model_of(tiny_model("glm52", n_layers=3)).__class__(tiny_model("glm52", n_layers=3).config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["o_proj"], target_parameters=["gate.weight"]))
    with pytest.raises(UnsupportedModelError, match=r"router.*gate\.weight"):
        LongStrawSession(model)


def test_mixed_adapter_batches_are_refused_as_peft_does():
    model = tiny_model("glm52", n_layers=3)
    with LongStrawSession(model, probe=False):
        for module in model.modules():
            if isinstance(module, FactoredLinear | FactoredExperts):
                with pytest.raises(ValueError, match="mixed"):
                    module(torch.zeros(2, 32), adapter_names=["__base__", "default"])


def test_coverage_counts_experts_and_leaves_out_what_has_no_gradient(caplog):
    model = tiny_model("glm52", n_layers=6)
    with LongStrawSession(model, probe=False) as session:
        coverage = session.coverage()
    assert not coverage.missing and not [r for r in caplog.records if "LoRA is missing" in r.message]
    assert {row.layer_kind for row in coverage.rows} == {"mla_latent"}
    rows = {row.linear: row for row in coverage.rows}
    assert (rows["mlp.experts.gate_up_proj"].n_with_lora, rows["mlp.gate_proj"].n_with_lora) == (4, 2)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(row.n_trainable_parameters for row in coverage.rows) == trainable
