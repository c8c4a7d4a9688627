"""`VllmSampler` with the real vLLM, which is not among our requirements: opt in, where `import vllm` works.

    VLLM_CPU_KVCACHE_SPACE=1 python -m pytest -m slow tests/test_vllm_engine.py     # the variable is for a CPU

Passes with vLLM 0.32.0 on a CPU (`test_vllm_server.py` says how to install it).
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import trl_setup
from vllm_setup import NEAR, apart, check_the_adapter_draws, request_for, save_model, served_model

from longstraw_sdk import SamplerError
from longstraw_sdk.evidence.parity import randomize_lora
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.rollout import VllmSampler, export_adapter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed; see this file's docstring"),
]
NEAR_ENGINE = NEAR[torch.float32]
NEAR_CHOICE = NEAR[torch.bfloat16]
"""Nats where vLLM chooses the dtype of a float32 model. Measured on a CPU: 0.003."""
ENGINE = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(str(folder), "llama")
    return folder


@pytest.fixture(scope="module")
def sampler(folder):
    sampler = VllmSampler(folder, engine_arguments=ENGINE)
    yield sampler
    sampler.close()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_adapter_draws_with_the_log_probs_that_the_trainer_scores(tmp_path, folder, sampler, temperature):
    model = served_model(folder, 0)
    request = request_for(model, tmp_path, temperature=temperature)
    check_the_adapter_draws(model, request, sampler, NEAR_ENGINE)


def test_only_the_tokens_that_are_asked_for_end_a_response(tmp_path, folder, sampler):
    """The model's files name token 1 as the end."""
    request = request_for(served_model(folder, 0), tmp_path, stop_token_ids=(5, 6, 7, 8))
    rows = [c.token_ids for completions in sampler.sample(request) for c in completions]
    assert any(1 in ids[:-1] for ids in rows) and any(ids[-1] in (5, 6, 7, 8) and len(ids) < 40 for ids in rows)


def test_a_new_adapter_takes_the_place_of_the_one_before(tmp_path, folder, sampler):
    model = served_model(folder, 0)
    first = request_for(model, tmp_path)
    before = sampler.sample(first)
    randomize_lora(model, 1)
    second = replace(first, adapter=export_adapter(model, tmp_path))
    assert apart(model, second, sampler.sample(second)) < NEAR_ENGINE
    assert apart(model, first, before) > 0.1
    assert sampler.sample(first) == before, "and back"


def test_what_it_refuses_is_told(tmp_path, folder, sampler):
    request = request_for(served_model(folder, 0), tmp_path)
    refusals = {
        "maximum (context|model) length": {"prompts": ((5,) * 100,)},
        "stopped after 4 of 40 tokens behind prompt 0 of 60": {"prompts": ((5,) * 60,), "stop_token_ids": ()},
    }
    answer = sampler.sample(request)
    for told, options in refusals.items():
        with pytest.raises(SamplerError, match=told):
            sampler.sample(replace(request, **options))
        assert sampler.sample(request) == answer, "the engine goes on"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal of a platform without sleep mode")
def test_sleep_mode_where_there_is_none_is_refused(tmp_path, folder):
    request = request_for(served_model(folder, 0), tmp_path)
    sampler = VllmSampler(folder, sleep=True, engine_arguments=ENGINE)
    with pytest.raises(SamplerError, match=r"(?s)vLLM did not start: .*Sleep mode is not supported"):
        sampler.sample(request)
    sampler.release()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's sleep mode needs a GPU")
def test_an_engine_that_slept_draws_the_same(tmp_path, folder):
    request = request_for(served_model(folder, 0), tmp_path)
    sampler = VllmSampler(folder, sleep=True, engine_arguments=ENGINE)
    answers = []
    for _ in range(2):
        sampler.acquire()
        answers.append(sampler.sample(request))
        sampler.release()
    sampler.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("by", ["sampler", "use_vllm"])
def test_two_updates_are_drawn_by_their_own_policies(tmp_path, folder, sampler, by):
    model = served_model(folder, 0)
    randomize_lora(model, std=0.0)
    for name, p in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.kaiming_uniform_(p)
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    options = {"max_steps": 2, "gradient_accumulation_steps": 1, "learning_rate": 1.0}
    trls = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    trainer = trl_setup.our_trainer(
        tmp_path, model=model, **options, **({"sampler": sampler} if by == "sampler" else trls)
    )
    trainer.train()
    if by == "use_vllm":
        trainer.sampler.close()
    verify_run(tmp_path)
    logged = [
        entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history if "reward" in entry
    ]
    assert len(logged) == 2 and max(logged) < (NEAR_ENGINE if by == "sampler" else NEAR_CHOICE)
    b_norms = [p.norm() for n, p in model.named_parameters() if "lora_B" in n]
    assert b_norms and min(b_norms) > 0
    assert base and all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
