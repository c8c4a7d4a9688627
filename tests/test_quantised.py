"""QLoRA: base weights in bitsandbytes' NF4, LoRA on top, with every adapter (the setting of arXiv 2607.14952)."""

import pytest
import torch
import trl_setup
from peft import get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from longstraw_sdk import LongStrawSession
from longstraw_sdk.adapter import adapter_for
from longstraw_sdk.evidence.parity import (
    ParityCase,
    _compare,
    conventional_run,
    randomize_lora,
    relative_l2,
    replay_run,
)
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.lora import lora_layers
from longstraw_sdk.models.glm52 import GLM52Adapter
from longstraw_sdk.ops import add_lora

ARCHITECTURES = ["llama", "qwen36", "glm52"]
MODES = [("full", "live"), ("response", "live"), ("full", "frozen")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with the unquantised weights of each architecture."""
    found = {}
    for architecture in ARCHITECTURES:
        found[architecture] = tmp_path_factory.mktemp(architecture)
        tiny_model(architecture).unload().save_pretrained(found[architecture])
    return found


def base_model(folder, dtype, *, quantised=True):
    options = {}
    if quantised:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"}, **options)
    if hasattr(model.config, "n_routed_experts"):
        model.set_experts_implementation("eager")  # grouped products refuse such small experts in bfloat16
    return model


def adapted(base):
    model = get_peft_model(base, adapter_for(base).lora_config(r=4))
    randomize_lora(model)
    return model


def model_of(folder, dtype=torch.float32, **options):
    return adapted(base_model(folder, dtype, **options))


def compared(model, case, adapter=None):
    ours = replay_run(model, case, adapter)
    model.zero_grad()
    return _compare(case, ours, conventional_run(model, case, adapter), 1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("scope", "prefix_adapter"), MODES)
def test_float32_gradients_are_those_of_conventional_autograd(folders, architecture, scope, prefix_adapter):
    model = model_of(folders[architecture])
    assert any(type(layer.get_base_layer()).__name__ == "Linear4bit" for layer in lora_layers(model))
    result = compared(model, ParityCase("float32", scope, prefix_adapter, prompt_tokens=50))
    assert result.passed, result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_control_unquantised_weights_give_another_gradient(folders, architecture):
    case = ParityCase("float32", prompt_tokens=50)
    ours = replay_run(model_of(folders[architecture]), case)
    other = conventional_run(model_of(folders[architecture], quantised=False), case)
    assert _compare(case, ours, other, 1e-4).gradient_error > 0.02


def test_a_bfloat16_model_makes_no_float32_activation_of_its_linears(folders, monkeypatch):
    calls = []
    monkeypatch.setattr("longstraw_sdk.hf.lora.add_lora", lambda *a: calls.append(a[1].dtype) or add_lora(*a))
    replay_run(model_of(folders["llama"], torch.bfloat16), ParityCase("bfloat16", prompt_tokens=20))
    assert set(calls) == {torch.bfloat16}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_as_close_to_conventional_as_that_is_to_float32(folders, architecture):
    """Both compute with the same four-bit weights; the truth is the float32 run of them."""
    adapter = GLM52Adapter(tape="replay") if architecture == "glm52" else None
    case = ParityCase("bfloat16", prompt_tokens=50)
    errors = {"ours": [], "conventional": []}
    for seed in range(4):
        case = ParityCase("bfloat16", prompt_tokens=50, seed=seed)
        model = model_of(folders[architecture], torch.bfloat16)
        ours = replay_run(model, case, adapter)
        model.zero_grad()
        conventional = conventional_run(model, case, adapter)
        truth = conventional_run(model_of(folders[architecture], torch.float32), case, adapter)
        for name, run in (("ours", ours), ("conventional", conventional)):
            errors[name].append(_compare(case, run, truth, 1.0).gradient_error ** 2)
        if adapter is not None:
            adapter.forget()
    assert sum(errors["ours"]) ** 0.5 <= 1.5 * sum(errors["conventional"]) ** 0.5, errors


def test_a_model_prepared_by_peft_is_served(folders):
    """`prepare_model_for_kbit_training` leaves norms and embeddings in float32 and switches checkpointing on."""
    base = prepare_model_for_kbit_training(
        base_model(folders["qwen36"], torch.float32), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    result = compared(adapted(base), ParityCase("float32", prompt_tokens=50))
    assert result.passed, result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampling_and_two_steps_leave_the_base_alone(folders, architecture):
    model = model_of(folders[architecture])
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scores = []
    with LongStrawSession(model, chunk_tokens=16, page_tokens=8) as session:
        for _ in range(2):
            with session.capture(torch.arange(2, 40)) as prefix:
                rows = prefix.sample(2, max_new_tokens=5, seed=0)
                scores.append(torch.cat(prefix.score(rows[:1])))
                for row in rows:
                    (-prefix.replay(row).logps.sum()).backward()
            session.finalize()
            optimizer.step()
            optimizer.zero_grad()
    assert scores[0].isfinite().all()
    assert scores[0].shape != scores[1].shape or not torch.equal(scores[0], scores[1])
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_the_trainer_trains_it(folders, tmp_path):
    trainer = trl_setup.our_trainer(tmp_path, model=model_of(folders["qwen36"]), max_steps=2)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    moved = [relative_l2(p.detach(), before[n]) for n, p in trainer.model.named_parameters() if ".lora_A" in n]
    assert min(moved) > 0
