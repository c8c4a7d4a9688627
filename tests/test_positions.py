"""Long positions: what is asked for is checked strictly and applied exactly, undone bit for bit, and the same in
capture, replay and sampling; nothing changes where nothing is asked for.
"""

import copy
import json
import math

import mpmath
import pytest
import torch
import trl_setup
from torch import nn
from transformers import GlmMoeDsaConfig, LlamaConfig, Qwen3_5TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from longstraw_sdk import (
    ConfigurationError,
    InputError,
    LifecycleError,
    LongStrawSession,
    PositionConfig,
    StaleStateError,
    UnsupportedModelError,
    positions_identity,
    require_same_positions,
    vllm_arguments,
)
from longstraw_sdk.environment import POSITIONS
from longstraw_sdk.evidence.float64 import float64_upcasts
from longstraw_sdk.evidence.parity import ParityCase, check_parity, relative_l2
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.hf import extend_positions
from longstraw_sdk.lora import base_model_of
from longstraw_sdk.positions import positions_of, rotary_modules

TRAINED = 32
FAR = PositionConfig(factor=8, original_max_positions=TRAINED)
LATENT = PositionConfig(factor=8, original_max_positions=TRAINED, mscale=1.0, mscale_all_dim=1.0)
ARCHITECTURES = {"llama": FAR, "qwen36": FAR, "glm52": LATENT}
LAST = 2_097_151


def tokens(n, seed=0):
    return torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(seed))


PROMPT, ROW = tokens(90, 1), tokens(7, 2)


def short_model(architecture="llama", **overrides):
    """A model with 32 positions."""
    n_layers = 4 if architecture == "qwen36" else 2  # the fourth is the first that attends
    return tiny_model(architecture, **{"max_position_embeddings": TRAINED, "n_layers": n_layers, **overrides})


def open_session(model, **options):
    return LongStrawSession(model, **{"chunk_tokens": 16, "page_tokens": 8, "poison": True, **options})


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids[None], use_cache=False).logits


# The configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1}, "factor must be above 1, got 1.0"),
        ({"factor": 0}, "factor must be a positive finite number, got 0"),
        ({"factor": math.nan}, "factor must be a positive finite number, got nan"),
        ({"factor": math.inf}, "factor must be a positive finite number, got inf"),
        ({"factor": 10**400}, "factor must be a positive finite number, got 1000"),
        ({"factor": True}, "factor must be a positive finite number, got True"),
        ({"factor": "4"}, "factor must be a positive finite number, got '4'"),
        ({"factor": None}, "factor must be a positive finite number, got None"),
        ({"factor": 1.3}, "is 41.6, which is no number of positions"),
        ({"original_max_positions": 32.0}, "original_max_positions must be an integer from 1 to 2\\*\\*53, got 32.0"),
        ({"original_max_positions": True}, "original_max_positions must be an integer"),
        ({"original_max_positions": 0}, "original_max_positions must be an integer"),
        ({"beta_fast": 1}, "beta_fast=1.0 must be above beta_slow=1.0"),
        ({"beta_slow": -1}, "beta_slow must be a positive finite number"),
        ({"attention_factor": 0}, "attention_factor must be a positive finite number"),
        ({"mscale": 1}, "mscale=1.0 and mscale_all_dim=None: give both or neither"),
        ({"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1}, "attention_factor and mscale say the same thing"),
    ],
)
def test_values_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        PositionConfig(**{"factor": 4, "original_max_positions": 32, **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be one JSON object, got ''"),
        ("yarn", "must be one JSON object"),
        ("[4, 32]", "must be a JSON object"),
        ('{"factor": 4, "original_max_positions": 32} and more', "must be one JSON object.*Extra data"),
        (
            '{"factor": 4}',
            "have no original_max_positions; fields of YaRN are factor, original_max_positions, beta_fast",
        ),
        (
            '{"factor": 4, "original_max_positions": 32, "rope_type": "linear"}',
            "have unknown rope_type; fields of YaRN",
        ),
        ('{"factor": 4, "factor": 8, "original_max_positions": 32}', "name a field twice"),
        ('{"factor": NaN, "original_max_positions": 32}', "hold NaN, which is no JSON"),
        ('{"factor": -Infinity, "original_max_positions": 32}', "hold -Infinity"),
        ('{"factor": 1e999, "original_max_positions": 32}', "factor must be a positive finite number, got inf"),
        ('{"factor": "4", "original_max_positions": 32}', "factor must be a positive finite number, got '4'"),
    ],
)
def test_text_that_is_no_configuration_is_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        PositionConfig.from_json(text)


@pytest.mark.parametrize("config", [FAR, LATENT, PositionConfig(factor=2.5, original_max_positions=64, beta_fast=16)])
def test_text_carries_a_configuration(config):
    assert PositionConfig.from_json(config.to_json()) == config


def test_rope_parameters_keep_what_the_model_has():
    own = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    config = Qwen3_5TextConfig(max_position_embeddings=TRAINED, rope_parameters=own)
    before = copy.deepcopy(config.to_dict())
    arguments = vllm_arguments(config, LATENT)
    yarn = {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
    assert arguments == {
        "hf_overrides": {
            # Without the sections, which make vLLM count from four times the original positions.
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mscale": 1.0,
                "mscale_all_dim": 1.0, **yarn,
            },
            "max_position_embeddings": 256,
        },
        "max_model_len": 256,
    }  # fmt: skip
    assert json.loads(json.dumps(arguments)) == arguments
    assert config.to_dict() == before


def test_trainer_and_sampler_compare_identities():
    model = short_model("qwen36").get_base_model()
    own = positions_identity(model.config)
    sampler = copy.deepcopy(model.config)
    for name, value in vllm_arguments(sampler, FAR)["hf_overrides"].items():
        setattr(sampler, name, value)
    with extend_positions(model, FAR):
        trainer = positions_identity(model.config)
        require_same_positions(trainer, positions_identity(sampler))
        for other in (own, positions_identity(copy.deepcopy(sampler))[::-1]):
            with pytest.raises(ConfigurationError, match=r"drawn from another model.*LONGSTRAW_POSITIONS"):
                require_same_positions(trainer, other)
    assert positions_identity(model.config) == own != trainer
    sampler.rope_parameters["rope_theta"] = 20_000
    assert positions_identity(sampler) != trainer
    sampler.rope_parameters["rope_theta"] = 10_000  # an integer, as checkpoints write it
    assert positions_identity(sampler) == trainer


# Angles


class OnlyRotary(nn.Module):
    """Just enough of a model to extend."""

    def __init__(self, kind, config):
        super().__init__()
        self.config = config
        self.rotary_emb = kind(config)
        self.weight = nn.Parameter(torch.zeros(1))


def glm_rotary():
    rope = {"rope_type": "default", "rope_theta": 8e6}
    return OnlyRotary(GlmMoeDsaRotaryEmbedding, GlmMoeDsaConfig(max_position_embeddings=2**20, rope_parameters=rope))


def qwen_rotary():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    config = Qwen3_5TextConfig(max_position_embeddings=2**18, head_dim=256, rope_parameters=rope)
    return OnlyRotary(Qwen3_5TextRotaryEmbedding, config)


REAL = {
    "glm52": (glm_rotary, PositionConfig(factor=2, original_max_positions=2**20, mscale=1.0, mscale_all_dim=1.0)),
    "qwen36": (qwen_rotary, PositionConfig(factor=8, original_max_positions=2**18)),
}


def true_cos_sin(positions, theta, n_dims, place):
    """YaRN at one position with 40 digits, [2, n_dims / 2]; written from the paper, apart from the code under test."""
    with mpmath.workdps(40):
        theta, length = mpmath.mpf(theta), positions.original_max_positions

        def pair(turns):
            return n_dims * mpmath.log(length / (2 * mpmath.pi * turns)) / (2 * mpmath.log(theta))

        low, high = mpmath.floor(pair(positions.beta_fast)), mpmath.ceil(pair(positions.beta_slow))
        rows = []
        for i in range(n_dims // 2):
            ramp = min(max((i - low) / (high - low), mpmath.mpf(0)), mpmath.mpf(1))
            angle = place * theta ** (-mpmath.mpf(2 * i) / n_dims) * (1 - ramp + ramp / mpmath.mpf(positions.factor))
            scaling = mpmath.mpf(1) if positions.mscale else mpmath.log(positions.factor) / 10 + 1
            rows.append((float(scaling * mpmath.cos(angle)), float(scaling * mpmath.sin(angle))))
    return torch.tensor(rows, dtype=torch.float64).T


@pytest.mark.parametrize("architecture", REAL)
def test_angles_are_exact_at_two_million(architecture):
    """Control: the same YaRN in transformers is off by a thousand times more at the far positions."""
    make, positions = REAL[architecture]
    model = make()
    theta = model.config.rope_parameters["rope_theta"]
    places = [0, 1, 1000, 2**20 - 1, 2**20, LAST - 1, LAST]
    truth = torch.stack([true_cos_sin(positions, theta, 64, place) for place in places], 1)  # [2, T, 32]
    truth = torch.cat([truth, truth], -1)
    x = torch.zeros(1, dtype=torch.float64)
    with extend_positions(model, positions):
        stock = type(model.rotary_emb).__mro__[2](copy.deepcopy(model.config))
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)  # rounds what is a buffer
            found = torch.stack(model.rotary_emb(x, torch.tensor([places])))[:, 0]
            assert found.shape == truth.shape and found.dtype == x.dtype
            assert float((found - truth).abs().max()) < 1e-6
        rounded = torch.stack(model.rotary_emb(x.float(), torch.tensor([places])))[:, 0]
        assert float((rounded - truth).abs().max()) < 1.2e-7  # one rounding to float32 of numbers up to 1.21
    off = torch.stack(stock(x, torch.tensor([places])))[:, 0] - truth
    assert float(off[:, :3].abs().max()) < 1e-4
    assert float(off[:, -2:].abs().max()) > 1e-3


def test_the_error_of_float32_angles_is_what_we_say():
    """GLM-5.2: the product alone, at the frequencies that float32 holds; none where the position is a power of two."""
    frequencies = glm_rotary().rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32 and frequencies.shape == (32,)

    def error(places):
        return float(
            ((places[:, None].float() * frequencies).double() - places[:, None] * frequencies.double()).abs().max()
        )

    assert error(torch.tensor([LAST])) == pytest.approx(0.0165, abs=5e-5)
    assert error(torch.tensor([2**20])) == 0
    assert error(torch.arange(LAST - 8191, LAST + 1)) == pytest.approx(0.0625, abs=5e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"beta_fast": 16, "beta_slow": 2}, {"attention_factor": 0.7}, {"mscale": 0.707, "mscale_all_dim": 1.0}],
    ids=str,
)
@pytest.mark.parametrize(("theta", "head_dim", "length"), [(1e4, 16, 32), (1e6, 128, 32768), (8e6, 64, 2**20)])
def test_frequencies_are_those_of_transformers(options, theta, head_dim, length):
    positions = PositionConfig(factor=4, original_max_positions=length, **options)
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=length, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    with extend_positions(OnlyRotary(LlamaRotaryEmbedding, config), positions):
        stock, scaling = ROPE_INIT_FUNCTIONS["yarn"](config)
        assert positions.attention_scaling == scaling
        found = torch.tensor(positions.frequencies(theta, head_dim), dtype=torch.float64)
        assert float((found / stock.double() - 1).abs().max()) < 1e-6  # float32 powers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_extended_model_is_the_one_that_transformers_makes(architecture):
    """Beyond the original positions, to the rounding of float32 angles there; softmax scales bit for bit."""
    positions = ARCHITECTURES[architecture]
    model = short_model(architecture)
    own = logits(model, PROMPT)
    with extend_positions(model, positions):
        config = model.get_base_model().config
        overrides = {"rope_parameters": config.rope_parameters, "max_position_embeddings": positions.max_positions}
        twin = short_model(architecture, **copy.deepcopy(overrides))
        found, wanted = logits(model, PROMPT), logits(twin, PROMPT)
        assert config.to_dict() == twin.get_base_model().config.to_dict()
        scales = [
            [m.scaling for m in x.modules() if hasattr(m, "scaling") and hasattr(m, "o_proj")] for x in (model, twin)
        ]
        assert scales[0] == scales[1] and scales[0]
    assert relative_l2(found, wanted) < 1e-5
    assert relative_l2(found, own) > 1e-2


# Applied and undone


def snapshot(model):
    base = base_model_of(model)
    rotary = [
        (type(m), {k: v for k, v in vars(m).items() if k[0] != "_"}, {k: (v, v.clone()) for k, v in m._buffers.items()})
        for m in rotary_modules(base)
    ]
    scales = [m.scaling for m in base.modules() if isinstance(getattr(m, "scaling", None), float)]
    return json.dumps(base.config.to_dict(), sort_keys=True), base.config.rope_parameters, rotary, scales


def same(before, after):
    if before[0] != after[0] or before[1] is not after[1] or before[3] != after[3]:
        return False
    return all(
        old[:2] == new[:2]
        and old[2].keys() == new[2].keys()
        and all(old[2][k][0] is new[2][k][0] and torch.equal(old[2][k][1], new[2][k][1]) for k in old[2])
        for old, new in zip(before[2], after[2], strict=True)
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_undo_gives_every_bit_back(architecture):
    model, ids = short_model(architecture), PROMPT[:20]
    before, own = snapshot(model), logits(model, ids)
    handle = extend_positions(model, ARCHITECTURES[architecture])
    assert positions_of(model) == handle.positions == ARCHITECTURES[architecture]
    assert not same(before, snapshot(model)) and not torch.equal(logits(model, ids), own)
    handle.undo()
    handle.undo()
    assert positions_of(model) is None
    assert same(before, snapshot(model)) and torch.equal(logits(model, ids), own)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unasked_nothing_changes(architecture, monkeypatch):
    monkeypatch.delenv(POSITIONS, raising=False)
    model, ids = short_model(architecture), PROMPT[:20]
    before, own = snapshot(model), logits(model, ids)
    (rotary,) = rotary_modules(model)
    where = (torch.zeros(1), torch.arange(TRAINED)[None])
    angles = rotary(*where)
    with open_session(model) as session, session.capture(ids):
        assert positions_of(model) is None and session.bound.max_positions == TRAINED
        assert snapshot(model)[0] == before[0] and type(rotary) is before[2][0][0]
        assert all(map(torch.equal, rotary(*where), angles))
    assert same(before, snapshot(model)) and torch.equal(logits(model, ids), own)


def replaced_forward(model):
    (rotary,) = rotary_modules(model)
    rotary.forward = rotary.forward


def other_frequencies(model):
    (rotary,) = rotary_modules(model)
    rotary.inv_freq = rotary.inv_freq * 1.01


class Backwards(LlamaRotaryEmbedding):
    """Sines and cosines the other way round: a rotary module that is not known."""

    def forward(self, x, position_ids):
        return super().forward(x, position_ids)[::-1]


def other_rotation(model):
    (rotary,) = rotary_modules(model)
    rotary.__class__ = Backwards


def no_rotary(model):
    model.get_base_model().model.rotary_emb = nn.Identity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replaced_forward, "something replaced the forward of LlamaRotaryEmbedding.*without a device_map"),
        (other_frequencies, "LlamaRotaryEmbedding does not rotate by rope_theta=10000"),
        (other_rotation, "Backwards does not rotate by rope_theta=10000"),
        (no_rotary, "has no module with rotary frequencies"),
    ],
)
def test_models_whose_angles_are_made_otherwise_are_refused(damage, message):
    model = short_model()
    damage(model)
    before = json.dumps(model.get_base_model().config.to_dict())
    with pytest.raises(UnsupportedModelError, match=message):
        extend_positions(model, FAR)
    assert json.dumps(model.get_base_model().config.to_dict()) == before and positions_of(model) is None


@pytest.mark.parametrize(
    ("rope_parameters", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type 'yarn': it is extended already, so give no positions"),
        ({"rope_type": "linear", "factor": 2.0}, "rope_type 'linear': only plain rotary positions"),
    ],
)
def test_models_with_a_scaling_of_their_own_are_refused(rope_parameters, message):
    model = short_model(rope_parameters={"rope_theta": 1e4, **rope_parameters})
    with pytest.raises(ConfigurationError, match=message):
        extend_positions(model, FAR)
    with pytest.raises(ConfigurationError, match=message):
        vllm_arguments(model.get_base_model().config, FAR)


@pytest.mark.parametrize(("factor", "length"), [(2, 16), (4, 33), (1.5, 2)])
def test_positions_that_extend_nothing_are_refused(factor, length):
    with pytest.raises(ConfigurationError, match=f"{int(factor * length)} positions, but .*max_position_embeddings=32"):
        extend_positions(short_model(), PositionConfig(factor=factor, original_max_positions=length))


def test_twice_is_refused():
    model = short_model()
    with extend_positions(model, FAR):
        with pytest.raises(LifecycleError, match=r"extended already, by \{\"factor\": 8.0.*undo that first"):
            extend_positions(model, FAR)
        with pytest.raises(LifecycleError, match="extended already"):
            open_session(model, positions=PositionConfig(factor=4, original_max_positions=32))
        open_session(model, positions=FAR).close()
        assert positions_of(model) == FAR  # whoever extended it takes it back
    assert positions_of(model) is None


# Sessions


def test_a_session_extends_and_gives_back():
    model = short_model()
    before = snapshot(model)
    with pytest.raises(ConfigurationError, match="chunk_tokens"):
        open_session(model, positions=FAR, chunk_tokens=0)
    assert same(before, snapshot(model))
    with open_session(model, positions=FAR) as session:
        assert session.bound.max_positions == 256
        assert session.positions_identity == positions_identity(model.get_base_model().config)
        with pytest.raises(
            InputError, match=r"257 tokens ends at position 257.*max_position_embeddings=256.*PositionConfig"
        ):
            session.capture(tokens(257))
        with session.capture(tokens(250)) as prefix:
            with pytest.raises(InputError, match="ends at position 257"):
                prefix.score([ROW])
            with pytest.raises(InputError, match="max_new_tokens=7 pass"):
                prefix.sample(1, max_new_tokens=7)
            assert len(prefix.sample(2, max_new_tokens=6)) == 2
    assert same(before, snapshot(model))
    with open_session(model) as session, pytest.raises(InputError, match="max_position_embeddings=32"):
        session.capture(PROMPT)


def test_the_environment_asks_for_positions(monkeypatch):
    model = short_model()
    monkeypatch.setenv(POSITIONS, FAR.to_json())
    for options in ({}, {"positions": FAR}):
        with open_session(model, **options):
            assert positions_of(model) == FAR
        assert positions_of(model) is None
    with pytest.raises(ConfigurationError, match=f"were given, but {POSITIONS} says.*unset one"):
        open_session(model, positions=LATENT)
    for text in ("", "{}"):
        monkeypatch.setenv(POSITIONS, text)
        with pytest.raises(ConfigurationError, match=f"{POSITIONS}: positions"):
            open_session(model)
    monkeypatch.delenv(POSITIONS)
    with pytest.raises(ConfigurationError, match=r"must be a PositionConfig, got .*PositionConfig.from_json"):
        open_session(model, positions=FAR.to_json())


def test_the_trainer_takes_positions_from_the_environment(tmp_path, monkeypatch):
    model = short_model()
    monkeypatch.setenv(POSITIONS, FAR.to_json())
    trainer = trl_setup.our_trainer(tmp_path, model=model, max_steps=1)  # its prompts have 30 to 42 tokens
    before = trl_setup.lora(model).clone()
    trainer.train()
    assert positions_of(model) == FAR and not torch.equal(trl_setup.lora(model), before)
    trainer.longstraw.close()
    assert positions_of(model) is None


@pytest.mark.parametrize("chunk_tokens", [16, 37])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_those_of_the_extended_model(architecture, chunk_tokens):
    case = ParityCase("float64", prompt_tokens=90, response_tokens=(7, 12, 1), chunk_tokens=chunk_tokens)
    model = short_model(architecture, n_layers=4)
    with extend_positions(model, ARCHITECTURES[architecture]):
        result = check_parity(model, case)
    assert result.passed, result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_extends_its_reference_as_the_environment_asks(dtype, monkeypatch):
    case = ParityCase(dtype, prompt_tokens=60, response_tokens=(7, 5), gradient_checkpointing=True)
    monkeypatch.setenv(POSITIONS, FAR.to_json())
    model = short_model()
    result = check_parity(model, case)
    assert result.passed, result
    assert positions_of(model) is None


def test_two_steps_are_those_of_the_extended_model():
    def trained(resident):
        model = short_model().double()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        rows = [ROW, tokens(12, 3)]
        for _ in range(2):
            if resident:
                with open_session(model, positions=FAR) as session:
                    with session.capture(PROMPT) as prefix:
                        sum(
                            out.logps.sum() * w for out, w in zip(prefix.replay_packed(rows), (1, -2), strict=True)
                        ).backward()
                    session.finalize()
            else:
                with extend_positions(model, FAR):
                    for row, weight in zip(rows, (1, -2), strict=True):
                        out = model(input_ids=torch.cat([PROMPT, row])[None], use_cache=False).logits[
                            0, len(PROMPT) - 1 : -1
                        ]
                        (weight * out.log_softmax(-1).gather(-1, row[:, None]).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return trl_setup.lora(model)

    with float64_upcasts():
        assert relative_l2(trained(resident=True), trained(resident=False)) < 1e-10


def test_another_factor_is_another_model():
    scores = []
    for factor in (8, 16):
        with open_session(short_model(), positions=PositionConfig(factor=factor, original_max_positions=32)) as session:
            with session.capture(PROMPT) as prefix:
                scores.append(prefix.score([ROW])[0])
    assert float((scores[0] - scores[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_samples_are_those_of_the_extended_model(architecture):
    model = short_model(architecture)
    positions = ARCHITECTURES[architecture]
    with open_session(model, positions=positions) as session, session.capture(PROMPT) as prefix:
        (row,) = prefix.sample(1, max_new_tokens=5, temperature=0)
    with extend_positions(model, positions):
        wanted = logits(model, torch.cat([PROMPT, row]))[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert torch.equal(row, wanted)


USES = {
    "replay": lambda prefix: prefix.replay(ROW),
    "score": lambda prefix: prefix.score([ROW]),
    "sample": lambda prefix: prefix.sample(1, max_new_tokens=1),
    "sweep": lambda prefix: prefix.sweep(),
}


@pytest.mark.parametrize("use", USES)
def test_state_of_other_positions_is_stale(use):
    model = short_model()
    handle = extend_positions(model, FAR)
    with open_session(model) as session:
        prefix = session.capture(PROMPT[:20])
        loss = prefix.replay(ROW).logps.sum()
        if use == "sweep":
            loss.backward()
        handle.undo()
        assert prefix.stale
        with pytest.raises(
            StaleStateError, match=r"captured at positions .\"factor\": 8.0.*now they are the model's own"
        ):
            USES[use](prefix)
        if use != "sweep":
            with pytest.raises(StaleStateError, match="captured at positions"):
                loss.backward()
            prefix.refresh()
            USES[use](prefix)
            assert not prefix.stale
        prefix.release()


def test_state_from_before_an_extension_is_stale():
    model = short_model()
    with open_session(model) as session, session.capture(PROMPT[:20]) as prefix:
        prefix.score([ROW])
        with extend_positions(model, FAR):
            with pytest.raises(StaleStateError, match=r"at positions the model's own, but now they are .\"factor"):
                prefix.score([ROW])
            assert session.bound.max_positions == 256
        prefix.score([ROW])  # the very angles of the capture again
        rotary_modules(model)[0].inv_freq.mul_(0.5)
        with pytest.raises(StaleStateError, match="or their frequencies were written to"):
            prefix.score([ROW])
