"""`VllmSampler` against a fake of the package vllm: what it is asked, in which order, and which answers are refused.

`test_vllm_engine.py` drives the real one.
"""

import json
import logging
import multiprocessing
import os
from dataclasses import replace

import pytest
import rank_trainers
import torch
import trl_setup
from completion_server import Served, completion_server
from fake_vllm import fake_vllm, no_vllm
from rollout_requests import request_to

from longstraw_sdk import ConfigurationError, SamplerError
from longstraw_sdk.evidence.journal import Journal
from longstraw_sdk.evidence.parity import randomize_lora
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.rollout import HttpSampler, VllmSampler, export_adapter
from longstraw_sdk.rollout import adapter_export as export_module
from longstraw_sdk.trainers import outside_sampling


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_adapter(tiny_model("qwen36"), tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def request_of(exported):
    return request_to(exported, temperature=0.7)


def other_adapter(folder, seed=5, **options):
    model = tiny_model("qwen36", **options)
    randomize_lora(model, seed)
    return export_adapter(model, folder)


def test_an_engine_draws_what_a_server_draws(request_of):
    with fake_vllm() as engines, completion_server() as served:
        sampler = VllmSampler("base", engine_arguments={"dtype": "float32", "max_model_len": 64})
        assert not engines.events, "nothing starts before the first drawing"
        answer = sampler.sample(request_of)
        assert answer == HttpSampler(served.url).sample(request_of)
        assert sampler.sample(request_of) == answer
    assert engines.events == ["start", "add_lora", "generate", "generate"]
    assert engines.arguments == [
        {
            "model": "base",
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": 8,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": False,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.3,
            "dtype": "float32",
            "max_model_len": 64,
        }
    ]
    first, second = engines.sampled[:2]
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty, first.min_p) == (1, 0, 0, 0)
    assert (first.n, first.max_tokens, first.temperature, first.top_p, first.top_k) == (3, 6, 0.7, 1, 0)
    assert (first.stop_token_ids, first.ignore_eos, first.logprobs) == ([1], True, 0)
    assert (first.seed, second.seed) == (11, 14)


def test_the_adapter_before_is_removed_and_a_changed_one_refused(request_of, tmp_path):
    other = other_adapter(tmp_path)
    with fake_vllm() as engines:
        sampler = VllmSampler("base")
        before = sampler.sample(request_of)
        assert sampler.sample(replace(request_of, adapter=other)) != before
        assert list(engines.served.adapters) == [other.name]
        assert sampler.sample(request_of) == before, "an id is not used again for the one that comes back"
        (other.path / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(SamplerError, match="changed after"):
            sampler.sample(replace(request_of, adapter=other))
    assert engines.events.count("start") == 1
    assert [e for e in engines.events if e.endswith("lora")] == ["add_lora", *["remove_lora", "add_lora"] * 2]


@pytest.mark.parametrize(("rank", "given", "wanted"), [(4, None, 8), (9, None, 16), (4, 32, 32), (8, 20, 32)])
def test_buffers_have_the_rank_of_the_adapter(request_of, tmp_path, rank, given, wanted):
    with fake_vllm(served=Served(model=tiny_model("qwen36", rank=rank))) as engines:
        sampler = VllmSampler("base", max_lora_rank=given)
        sampler.sample(replace(request_of, adapter=other_adapter(tmp_path, rank=rank)))
    assert engines.arguments[0]["max_lora_rank"] == wanted


def test_a_rank_pattern_counts_and_one_above_all_is_refused(request_of, tmp_path):
    adapter = other_adapter(tmp_path)
    config = adapter.path / "adapter_config.json"
    for found, wanted in ((200, 256), (513, None)):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rank_pattern": {"q_proj": found}}))
        changed = replace(adapter, sha256=export_module.adapter_identity(adapter.path))
        with fake_vllm() as engines:
            ask = lambda changed=changed: VllmSampler("base").sample(replace(request_of, adapter=changed))  # noqa: E731
            if wanted is None:
                with pytest.raises(SamplerError, match="has rank 513; vLLM takes 512 at most"):
                    ask()
            else:
                ask()
                assert engines.arguments[0]["max_lora_rank"] == wanted


def test_the_engine_sleeps_between_drawings(request_of):
    with fake_vllm() as engines:
        sampler = VllmSampler("base", sleep=True)
        assert sampler.exclusive
        sampler.acquire()
        sampler.release()
        assert not engines.events, "what was not started holds no device"
        for _ in range(2):
            sampler.acquire()
            sampler.sample(request_of)
            sampler.release()
        with pytest.raises(SamplerError, match=r"call acquire\(\) before"):
            sampler.sample(request_of)
        sampler.release()
        sampler.close()
    assert engines.arguments[0]["enable_sleep_mode"] is True
    drawing = ["generate", "sleep 1"]
    assert engines.events == ["start", "add_lora", *drawing, "wake_up", *drawing, "shutdown"]


def test_a_closed_engine_is_started_anew(request_of):
    with fake_vllm() as engines:
        sampler = VllmSampler("base")
        sampler.close()
        answer = sampler.sample(request_of)
        sampler.close()
        sampler.close()
        engines.served.adapters.clear()
        assert sampler.sample(request_of) == answer
    assert engines.events == [*["start", "add_lora", "generate", "shutdown"], *["start", "add_lora", "generate"]]


def test_the_engine_stands_alone_in_its_environment(request_of, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    before = dict(os.environ)
    with fake_vllm() as engines:
        VllmSampler("base").sample(request_of)
    (seen,) = engines.environments
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & seen.keys()
    assert seen["CUDA_VISIBLE_DEVICES"] == "7" and seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert dict(os.environ) == before


# What is refused


def changed(**attributes):
    def change(answers):
        vars(answers[0]).update(attributes)
        return answers

    return change


def of_output(change):
    def fault(answers):
        change(answers[0].outputs[1])
        return answers

    return fault


def shorter(output):
    output.token_ids, output.logprobs, output.finish_reason = [4, 5], output.logprobs[:2], "length"
    output.logprobs = [{4: output.logprobs[0].popitem()[1]}, {5: output.logprobs[1].popitem()[1]}]


FAULTS = {
    "answered for 1 prompts of 2": lambda answers: answers[:1],
    "prompt 0 with adapter None": changed(lora_request=None),
    "another prompt than prompt 0": changed(prompt_token_ids=[5, 9, 20, 33]),
    "another prompt than prompt 0: ": changed(prompt_token_ids=None),
    "tokens and no log-probs": of_output(lambda output: vars(output).update(logprobs=None)),
    "tokens and 0 log-probs": of_output(lambda output: output.logprobs.clear()),
    "no log-prob of the token that it drew at place 0": of_output(lambda output: output.logprobs[0].clear()),
    "stopped after 2 of 6 tokens behind prompt 0 of 5": of_output(shorter),
    "returned 2 responses to prompt 0; 3": lambda answers: [answers[0].outputs.pop(), answers][1],
    "did not answer 1-0: IndexError": lambda answers: answers[9],
}


@pytest.mark.parametrize("told", FAULTS)
def test_an_engine_that_answers_wrongly_is_refused(request_of, told):
    with fake_vllm(faults=FAULTS[told]), pytest.raises(SamplerError) as error:
        VllmSampler("base").sample(request_of)
    assert told in str(error.value)


def test_responses_are_taken_by_their_index(request_of):
    with fake_vllm() as engines:
        sampler = VllmSampler("base")
        answer = sampler.sample(request_of)
        engines.faults = lambda answers: [answers[0].outputs.reverse(), answers][1]
        assert sampler.sample(request_of) == answer and len(set(answer[0])) > 1


@pytest.mark.parametrize("listed", [set(), {7}, {1, 2}], ids=str)
def test_an_adapter_that_is_not_listed_alone_is_refused(request_of, listed):
    with fake_vllm(lists=lambda ids: listed) as engines, pytest.raises(SamplerError, match="lists adapters"):
        VllmSampler("base").sample(request_of)
    assert "generate" not in engines.events


def test_what_vllm_refuses_is_told(request_of):
    with fake_vllm(sleep_mode=False), pytest.raises(SamplerError, match="did not start: ValueError: Sleep mode is not"):
        VllmSampler("base", sleep=True).sample(request_of)
    with fake_vllm(served=Served(max_model_len=5)), pytest.raises(SamplerError, match="maximum context length is 5"):
        VllmSampler("base").sample(request_of)


def test_it_is_made_with_vllm_only_and_sets_its_own_arguments():
    with no_vllm(), pytest.raises(ConfigurationError, match=r"pip install \"longstraw-sdk\[vllm\]\""):
        VllmSampler("base")
    with fake_vllm():
        with pytest.raises(ConfigurationError, match="name max_loras, tensor_parallel_size, which"):
            VllmSampler("base", engine_arguments={"tensor_parallel_size": 2, "max_loras": 2})
        with pytest.raises(ConfigurationError, match="must be 1 to 512, got 0"):
            VllmSampler("base", max_lora_rank=0)


def test_a_program_that_the_engine_would_run_again_is_stopped(monkeypatch):
    """As multiprocessing marks a process that imports the main file of its parent."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with fake_vllm(), pytest.raises(ConfigurationError, match='below if __name__ == "__main__"'):
        VllmSampler("base")


# In the trainer

RUN = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}


def named_model():
    """As if it had been loaded from a folder."""
    model = tiny_model("qwen36")
    model.config._name_or_path = "base"
    return model


def test_trls_colocated_vllm_trains_as_a_server_does_and_nothing_is_merged(tmp_path):
    options = {"vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.5}
    with fake_vllm() as engines, completion_server() as served:
        trainer = trl_setup.our_trainer(tmp_path / "a", model=named_model(), **(RUN | COLOCATED | options))
        base = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        trainer.train()
        trainer.sampler.close()
        by_server = trl_setup.our_trainer(tmp_path / "b", sampler=HttpSampler(served.url), **RUN)
        by_server.train()
    assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base) and base
    assert torch.equal(trl_setup.lora(trainer.model), trl_setup.lora(by_server.model))
    assert not torch.equal(trl_setup.lora(trainer.model), trl_setup.lora(tiny_model("qwen36")))
    verify_run(tmp_path / "a")
    logged = [h for h in trainer.state.log_history if "reward" in h]
    assert len(logged) == 2 and all(h["sampling/sampling_logp_difference/max"] < 1e-4 for h in logged)
    drawing = ["add_lora", "generate"]
    assert engines.events == ["start", *drawing, "remove_lora", *drawing, "shutdown"], "each update's policy is loaded"
    (arguments,) = engines.arguments
    assert arguments["model"] == "base" and arguments["max_num_seqs"] == 4 and arguments["model_impl"] == "vllm"
    assert arguments["max_model_len"] == 64 and arguments["gpu_memory_utilization"] == 0.5
    entries = [e for e in Journal(tmp_path / "a" / "run" / "journal.jsonl").entries if e["stage"] == "sampled"]
    assert [(e["sampler"]["name"], e["sampler"]["model"]) for e in entries] == [("vllm", "base")] * 2


def test_devices_change_hands_in_order(tmp_path, caplog):
    held, events = [], []
    with fake_vllm() as engines, caplog.at_level(logging.INFO, logger=outside_sampling.__name__):
        options = RUN | COLOCATED | {"vllm_enable_sleep_mode": True}
        trainer = trl_setup.our_trainer(tmp_path, model=named_model(), **options)

        def seen(answers):
            held.append(sum(prefix.n_bytes for prefix in trainer._prefixes.values()))
            events.append(caplog.records[-1].message)
            return answers

        engines.faults = seen
        trainer.train()
    of_vllm = [e for e in engines.events if not e.endswith("lora")]
    assert of_vllm == ["start", "generate", "sleep 1", "wake_up", "generate", "sleep 1"]
    assert held == [0, 0], "no resident state while the other samples"
    said = [r.message.partition(": ")[2] or r.message for r in caplog.records if r.name == outside_sampling.__name__]
    assert said[:4] == [
        "trainer leaves cpu",
        "sampler takes its devices",
        "sampler gave its devices back",
        "trainer is back on cpu",
    ]
    assert events == ["0-0-0: sampler takes its devices", "1-0-0: sampler takes its devices"]


def test_an_engine_with_a_stale_adapter_is_caught(tmp_path):
    with fake_vllm(served=Served(serve_stale=True)):
        sampler = VllmSampler("base", max_logprob_difference=0.05)
        trainer = trl_setup.our_trainer(tmp_path, sampler=sampler, **(RUN | {"learning_rate": 30.0}))
        with pytest.raises(SamplerError, match="it does not serve the policy"):
            trainer.train()
    stages = [entry["stage"] for entry in Journal(tmp_path / "run" / "journal.jsonl").entries]
    assert stages.count("stepped") == 1, "the first policy is the one that is served"


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("vllm_tensor_parallel_size=2: not used", {"vllm_tensor_parallel_size": 2}),
        ("vllm_model_impl='transformers'", {"vllm_model_impl": "transformers"}),
        ("vllm_structured_outputs_regex='a+'", {"vllm_structured_outputs_regex": "a+"}),
        ("vllm_server_base_url='http://h:1', vllm_server_port=1", {"vllm_server_base_url": "http://h:1"}),
        ("both draw responses", {"sampler": HttpSampler("http://127.0.0.1:9")}),
        ("vllm_importance_sampling_correction=False", {"vllm_importance_sampling_correction": False}),
        ("was not loaded from a folder", {"model": tiny_model("qwen36")}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_colocated_engine_is_not_asked_for_is_refused(tmp_path, told, options):
    options = {"model": named_model()} | options
    if "vllm_server_base_url" in options:
        options["vllm_server_port"] = 1
    with fake_vllm(), pytest.raises(ConfigurationError) as error:
        trl_setup.our_trainer(tmp_path, **COLOCATED, **options)
    assert told in str(error.value)


def test_weights_and_positions_that_vllm_would_not_have_are_refused(tmp_path, monkeypatch):
    model = named_model()
    with fake_vllm():
        model.base_model.model.quantization_method = "bitsandbytes"
        with pytest.raises(ConfigurationError, match=r"weights of base unquantised; give sampler=VllmSampler\("):
            trl_setup.our_trainer(tmp_path, model=model, **COLOCATED)
        monkeypatch.setenv("LONGSTRAW_POSITIONS", '{"factor": 2, "original_max_positions": 512}')
        with pytest.raises(ConfigurationError, match="LONGSTRAW_POSITIONS extends the trainer's positions"):
            trl_setup.our_trainer(tmp_path, model=named_model(), **COLOCATED)


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_the_first_rank_of_each_context_has_an_engine(rank_pools, context_parallel_size):
    options = RUN | COLOCATED | {"save_strategy": "no", "context_parallel_size": context_parallel_size}
    found = rank_pools[2].run(rank_trainers.train_by_engine, options)
    drawing = ["add_lora", "generate", "remove_lora", "add_lora", "generate"]
    assert [events for events, _, _ in found] == [
        ["start", *drawing],
        ["start", *drawing] * (2 - context_parallel_size),
    ]
    assert not any(launched for _, launched, _ in found), "no engine joins the trainer's process group"
    assert len({digest for _, _, digest in found}) == 1


def test_contexts_whose_engines_sleep_are_refused(rank_pools):
    options = RUN | COLOCATED | {"vllm_enable_sleep_mode": True}
    with pytest.raises(Exception, match="gives its devices up between drawings"):
        rank_pools[2].run(rank_trainers.train_by_engine, options)
