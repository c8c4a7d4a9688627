"""Samplers outside of the trainer's process: what they are asked, and which answers are refused."""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch
from completion_server import completion_server
from rollout_requests import PROMPTS, request_to

from longstraw_sdk import ConfigurationError, SamplerError
from longstraw_sdk.evidence.parity import randomize_lora
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.rollout import (
    Completion,
    DirectorySampler,
    HttpSampler,
    export_adapter,
    prompt_identity,
)
from longstraw_sdk.rollout.protocol import checked


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_adapter(tiny_model("qwen36"), tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def request_of(exported):
    return request_to(exported)


def answered(request):
    one = Completion((4, 5, 1), (-1.0, -2.0, -0.5))
    return [[one] * request.n_completions for _ in request.prompts]


def test_exports_have_an_identity_and_few_stay(tmp_path):
    model = tiny_model("qwen36")
    first = export_adapter(model, tmp_path)
    assert export_adapter(model, tmp_path) == first and first.path.name == first.name
    found = [first]
    for seed in range(1, 4):
        randomize_lora(model, seed)
        found.append(export_adapter(model, tmp_path))
    assert len({e.sha256 for e in found}) == 4
    assert {p.name for p in tmp_path.iterdir()} == {e.name for e in found[-2:]}
    found[-1].verify()
    (found[-1].path / "adapter_config.json").unlink()
    assert export_adapter(model, tmp_path) == found[-1], "one that a power failure cut off is written again"
    found[-1].verify()
    (found[-1].path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SamplerError, match="changed after it was exported"):
        found[-1].verify()
    with pytest.raises(SamplerError, match=r"has no adapter_config.json, adapter_model.safetensors"):
        replace(found[-1], path=tmp_path).verify()


def test_a_prompt_has_one_identity_whatever_holds_its_ids():
    assert prompt_identity([1, 2]) == prompt_identity((1, 2)) != prompt_identity([2, 1])
    assert prompt_identity([258]) == hashlib.sha256(b"\2\1\0\0\0\0\0\0").hexdigest(), "the same on every machine"


def test_an_answer_that_fits_is_taken(request_of):
    assert checked(request_of, answered(request_of), "it") == answered(request_of)
    whole = Completion((4,) * 6, (-1.0,) * 6)
    assert checked(replace(request_of, n_completions=1), [[whole]] * 2, "it") == [[whole]] * 2, "cut at the limit"


@pytest.mark.parametrize(
    ("completion", "told"),
    [
        (Completion((), ()), "0 tokens; allowed: 1 to 6"),
        (Completion((4,) * 7, (-1.0,) * 7), "7 tokens; allowed: 1 to 6"),
        (Completion((4, 1), (-1.0,)), "2 tokens and 1 log-probs"),
        (Completion((97, 1), (-1.0, -1.0)), "token 0 is 97; allowed: integers from 0 below 97"),
        (Completion((-1, 1), (-1.0, -1.0)), "token 0 is -1"),
        (Completion((True, 1), (-1.0, -1.0)), "token 0 is True"),
        (Completion(("4", 1), (-1.0, -1.0)), "token 0 is '4'"),
        (Completion((4, 1), (float("nan"), -1.0)), "log-prob of token 0 is nan"),
        (Completion((4, 1), (None, -1.0)), "log-prob of token 0 is None"),
        (Completion((4, 1), (-1.0, 0.5)), "log-prob of token 1 is 0.5"),
        (Completion((4, 1), (-(10**400), -1.0)), "log-prob of token 0 is -1000"),
        (Completion((1, 4, 1), (-1.0,) * 3), "goes on behind the stop token 1 at place 0"),
        (Completion((4, 5), (-1.0,) * 2), "ends after 2 of 6 tokens without a stop token"),
    ],
)
def test_a_response_that_does_not_fit_is_refused(request_of, completion, told):
    answer = answered(request_of)
    answer[1][2] = completion
    with pytest.raises(SamplerError, match="response 2 to prompt 1") as error:
        checked(request_of, answer, "it")
    assert told in str(error.value)


def test_answers_of_another_number_are_refused(request_of):
    with pytest.raises(SamplerError, match="1 prompts of 2"):
        checked(request_of, answered(request_of)[:1], "it")
    with pytest.raises(SamplerError, match="2 responses to prompt 0; 3 were asked for"):
        checked(request_of, [rows[:2] for rows in answered(request_of)], "it")


# HTTP


def test_a_server_draws_from_the_adapter_that_was_exported(request_of):
    model = tiny_model("qwen36").eval()
    with completion_server(generation_config={"repetition_penalty": 1.3}) as served:
        sampler = HttpSampler(served.url)
        answer = sampler.sample(request_of)
        assert served.events == ["/v1/load_lora_adapter", "/v1/models"] + ["/v1/completions"] * 2
        assert answer == sampler.sample(request_of), "seeded; the adapter is loaded once"
        assert served.events.count("/v1/load_lora_adapter") == 1
    assert len({c.token_ids for rows in answer for c in rows}) > 1
    for ids, rows in zip(PROMPTS, answer, strict=True):
        for c in rows:
            logits = model(input_ids=torch.tensor([[*ids, *c.token_ids]])).logits[0, len(ids) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(c.logprobs), wanted.detach(), atol=1e-4, rtol=0)


def test_the_adapter_before_is_unloaded_and_a_changed_one_refused(request_of, tmp_path):
    model = tiny_model("qwen36")
    randomize_lora(model, 5)
    other = export_adapter(model, tmp_path)
    with completion_server() as served:
        sampler = HttpSampler(served.url)
        sampler.sample(request_of)
        sampler.sample(replace(request_of, adapter=other))
        assert list(served.adapters) == [other.name]
        (other.path / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(SamplerError, match="changed after"):
            sampler.sample(replace(request_of, adapter=other))


def test_a_server_that_was_restarted_gets_the_next_adapter(request_of, tmp_path):
    model = tiny_model("qwen36")
    randomize_lora(model, 5)
    other = export_adapter(model, tmp_path)
    with completion_server() as served:
        sampler = HttpSampler(served.url)
        sampler.sample(request_of)
        served.adapters.clear()
        sampler.sample(replace(request_of, adapter=other))
        assert list(served.adapters) == [other.name]
        assert "/v1/unload_lora_adapter" not in served.events


def test_an_adapter_that_another_process_loaded_is_used_and_left(request_of, tmp_path):
    model = tiny_model("qwen36")
    randomize_lora(model, 5)
    other = export_adapter(model, tmp_path)
    with completion_server() as served:
        answer = HttpSampler(served.url).sample(request_of)
        second = HttpSampler(served.url)
        assert second.sample(request_of) == answer
        second.sample(replace(request_of, adapter=other))
        assert list(served.adapters) == [request_of.adapter.name, other.name]


def test_a_response_that_is_cut_at_the_servers_limit_is_refused(request_of):
    with completion_server(max_model_len=8) as served, pytest.raises(SamplerError) as error:
        HttpSampler(served.url).sample(replace(request_of, stop_token_ids=()))
    assert "stopped after 3 of 6 tokens behind prompt 0 of 5" in str(error.value)
    with completion_server(max_model_len=5) as served, pytest.raises(SamplerError, match="maximum context length is 5"):
        HttpSampler(served.url).sample(request_of)


def test_what_a_server_may_lack_is_told(request_of):
    with completion_server(sleep_mode=False) as served:
        with pytest.raises(SamplerError, match=r"vLLM needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"):
            HttpSampler(served.url, sleep=True).acquire()
        with pytest.raises(SamplerError, match=r"does not exist.\"") as error:
            HttpSampler(served.url, load_adapter=False).sample(request_of)
        assert "vLLM needs" not in str(error.value)
        served.load = lambda body: served.unload(body)
        with pytest.raises(SamplerError, match=r"vLLM needs --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and"):
            HttpSampler(served.url).sample(request_of)


def test_sleep_mode_takes_and_gives_devices():
    with completion_server() as served:
        sampler = HttpSampler(served.url, sleep=True)
        assert sampler.exclusive
        sampler.acquire()
        sampler.release()
        assert served.events == ["/wake_up", "/sleep?level=1"]


def without(name):
    def change(answer):
        for choice in answer["choices"]:
            choice.pop(name)
        return answer

    return change


def other_prompt(answer):
    answer["choices"][0]["prompt_token_ids"] = [5, 9, 20, 33]
    return answer


COMPLETIONS = {
    "returned no token_ids": [
        *(without(name) for name in ("token_ids", "prompt_token_ids", "logprobs")),
        lambda answer: answer | {"choices": [choice | {"logprobs": [1]} for choice in answer["choices"]]},
    ],
    "answered another prompt than prompt 0": [other_prompt],
    "answered as model 'base'": [lambda answer: answer | {"model": "base"}],
    "returned no list of choices": [
        lambda answer: answer | {"choices": None},
        lambda answer: answer | {"choices": [{"index": "0"}, {"index": 1}]},
    ],
    "1 responses to prompt 0; 3": [lambda answer: answer | {"choices": answer["choices"][:1]}],
    "did not return JSON": [lambda answer: b"<html>"],
    "returned a list, not an object": [lambda answer: []],
    "sent more than": [lambda answer: b" " * 10**6],
}


@pytest.mark.parametrize(("told", "fault"), [(told, f) for told, kinds in COMPLETIONS.items() for f in kinds])
def test_a_server_that_answers_wrongly_is_refused(request_of, told, fault):
    with completion_server(faults={"/v1/completions": fault}) as served, pytest.raises(SamplerError) as error:
        HttpSampler(served.url).sample(request_of)
    assert told in str(error.value)


def test_an_adapter_that_is_not_listed_is_refused(request_of):
    with (
        completion_server(faults={"/v1/models": lambda found: {"data": []}}) as served,
        pytest.raises(SamplerError, match="does not list adapter longstraw-"),
    ):
        HttpSampler(served.url).sample(request_of)


def test_time_is_bounded_as_a_whole(request_of):
    with completion_server(slow_seconds=0.3) as served:
        start = time.monotonic()
        with pytest.raises(SamplerError, match=r"not done after 1 s|ReadTimeout"):
            HttpSampler(served.url, timeout_seconds=1).sample(request_of)
        assert time.monotonic() - start < 4


def test_a_server_that_never_ends_its_headers_is_given_up(request_of):
    def trickle(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            for _ in range(40):
                connection.sendall(b"x")
                time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,), daemon=True)
        thread.start()
        start = time.monotonic()
        with pytest.raises(SamplerError, match="was not done after 1 s"):
            HttpSampler(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=1).sample(request_of)
        assert time.monotonic() - start < 4


def test_nobody_there(request_of):
    with pytest.raises(SamplerError, match="failed: ConnectError"):
        HttpSampler("http://127.0.0.1:9").sample(request_of)


def test_the_key_is_sent_and_nowhere_else(request_of, monkeypatch):
    monkeypatch.setenv("SAMPLER_KEY", "s3cret")
    with completion_server(faults={"/v1/completions": lambda answer: {}}) as served:
        sampler = HttpSampler(served.url, api_key_variable="SAMPLER_KEY")
        with pytest.raises(SamplerError) as error:
            sampler.sample(request_of)
    assert served.headers[-1]["Authorization"] == "Bearer s3cret"
    assert served.headers[-1]["Accept-Encoding"] == "identity"
    assert "s3cret" not in str(error.value) + json.dumps(sampler.describe()) + repr(vars(sampler))


def test_a_refusal_is_told_without_the_key(request_of, monkeypatch):
    monkeypatch.setenv("SAMPLER_KEY", "s3cret")
    with completion_server(status=401) as served, pytest.raises(SamplerError) as error:
        served.complete = lambda body: b"who is Bearer s3cret?"
        HttpSampler(served.url, load_adapter=False, api_key_variable="SAMPLER_KEY").sample(request_of)
    assert "returned 401: who is Bearer ...?" in str(error.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://me:s3cret@host:1"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ConfigurationError, match="base_url must be") as error:
        HttpSampler(url)
    assert "s3cret" not in str(error.value)


def test_a_key_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("SAMPLER_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="SAMPLER_KEY"):
        HttpSampler("http://host:1", api_key_variable="SAMPLER_KEY")


# Folders


def other_side(folder, change=lambda answer: answer):
    """Answers the first request that appears, as whoever serves the folder would."""
    deadline = time.monotonic() + 20
    while not (found := list(folder.glob("*.request.json"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked = json.loads(found[0].read_text())
    one = {"token_ids": [4, 1], "logprobs": [-1.0, -2.0]}
    answer = {
        "adapter_sha256": asked["adapter"]["sha256"],
        "prompts": [
            {"sha256": prompt_identity(entry["token_ids"]), "completions": [one] * asked["n_completions"]}
            for entry in asked["prompts"]
        ],
    }
    changed = change(answer)
    unfinished = folder / "unfinished"
    unfinished.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    os.replace(unfinished, folder / f"{asked['request_id']}.response.json")


def by_folder(folder, request, change=lambda answer: answer, **options):
    thread = threading.Thread(target=other_side, args=(folder, change))
    thread.start()
    try:
        return DirectorySampler(folder, **options).sample(request)
    finally:
        thread.join()


def test_a_folder_carries_requests_and_answers(request_of, tmp_path):
    (tmp_path / "1-0.response.json").write_text("an answer of an attempt before")
    answer = by_folder(tmp_path, request_of)
    assert answer == [[Completion((4, 1), (-1.0, -2.0))] * 3] * 2
    assert not list(tmp_path.glob("*.request.json")), "what is answered is asked no longer"


ANSWERS = {
    "served adapter other": lambda answer: answer | {"adapter_sha256": "other"},
    "answered other prompts": lambda answer: answer | {"prompts": answer["prompts"][::-1]},
    "lacks a field": lambda answer: {"prompts": []},
    "is not JSON": lambda answer: b"{",
    "is larger than": lambda answer: b" " * 10**6,
    "3 responses": lambda answer: (
        answer | {"prompts": [p | {"completions": p["completions"] * 2} for p in answer["prompts"]]}
    ),
}


@pytest.mark.parametrize("told", ANSWERS)
def test_a_folder_with_a_wrong_answer_is_refused(request_of, tmp_path, told):
    with pytest.raises(SamplerError) as error:
        by_folder(tmp_path, request_of, ANSWERS[told])
    assert told.replace("3 responses", "6 responses to prompt 0; 3 were") in str(error.value)


def test_waiting_for_a_folder_is_bounded(request_of, tmp_path):
    with pytest.raises(SamplerError, match=r"no answer in .* after 0.3 s"):
        DirectorySampler(tmp_path, timeout_seconds=0.3).sample(request_of)
    with pytest.raises(ConfigurationError, match="does not exist"):
        DirectorySampler(tmp_path / "none")
