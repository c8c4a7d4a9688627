"""What a run leaves behind: enough to go on from any stage to the same bits, and to notice what is changed in it."""

import json
import logging
import multiprocessing
import os
import shutil
import signal

import pytest
import torch
import trl_setup
from completion_server import completion_server
from safetensors.torch import load_file, save_file
from trl.trainer import grpo_trainer as trl_grpo_trainer
from typer.testing import CliRunner

from longstraw_sdk import ConfigurationError, InputError, SamplerError
from longstraw_sdk.cli.app import app
from longstraw_sdk.evidence import journal as journal_module
from longstraw_sdk.evidence.artifacts import read_json, write_json
from longstraw_sdk.evidence.digests import seal
from longstraw_sdk.evidence.journal import START, Journal
from longstraw_sdk.evidence.manifest import MANIFEST, write_manifest
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.rollout import HttpSampler
from longstraw_sdk.trainers import outside_sampling, run_facts

UPDATE = ["sampled", "scored", "rewarded", "replayed", "finalized", "stepped", "saved"]
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


def stages(folder):
    return [entry["stage"] for entry in Journal(folder / "run" / "journal.jsonl").entries]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    trl_setup.our_trainer(folder, beta=0.1, **SAVING).train()
    return folder


def test_a_run_can_be_checked(finished):
    found = "\n".join(verify_run(finished))
    assert "3 updates in order, each with one finalize and one step" in found
    assert "3 of 3 saved checkpoints are there" in found and "1 ranks, 0 accelerators" in found
    assert verify_run(finished / "run")
    assert stages(finished) == ["began", *[*UPDATE[:4] * 2, *UPDATE[4:]] * 3, "ended"], "two generations an update"
    phases = [json.loads(line)["phase"] for line in (finished / "run" / "memory.jsonl").read_text().splitlines()]
    assert {"capture", "sample", "score", "replay", "backward", "sweep"} == set(phases)
    request = read_json(finished / "run" / "request.json")
    assert request["gradient_scope"] == "full" and request["arguments"]["beta"] == 0.1
    assert request["reward_functions"] == ["checksum_reward"]


def test_log_probs_of_the_old_policy_are_a_stage(tmp_path):
    """Two updates on one generation: what the first of them leaves is not the policy that drew."""
    options = {"num_iterations": 2, "gradient_accumulation_steps": 1, "beta": 0.1, "max_steps": 2}
    trl_setup.our_trainer(tmp_path, **options).train()
    update = ["replayed", "finalized", "stepped"]
    assert stages(tmp_path) == ["began", "sampled", "scored", "scored", "rewarded", *update, *update, "ended"]
    scored = [e["what"] for e in Journal(tmp_path / "run" / "journal.jsonl").entries if e["stage"] == "scored"]
    assert scored == ["old", "reference"]
    verify_run(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_adapter": "frozen", "gradient_scope": "response"},
        {"scale_rewards": "batch", "steps_per_generation": 2},
        {"scale_rewards": "none", "loss_type": "dr_grpo"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_runs_of_other_objectives_can_be_checked(tmp_path, options):
    trainer = trl_setup.our_trainer(tmp_path, max_steps=2, **options)
    trainer.train()
    assert "2 updates in order" in "\n".join(verify_run(tmp_path))
    scope = read_json(tmp_path / "run" / "gradient-witness.json")["gradient_scope"]
    assert scope == options.get("gradient_scope", "full")


def test_rewards_that_are_missing_are_nobodys_advantage(tmp_path):
    def some(completion_ids, **kwargs):
        return [None if i % 4 == 1 else float(len(ids)) for i, ids in enumerate(completion_ids)]

    trl_setup.our_trainer(tmp_path, max_steps=1, reward=some).train()
    assert verify_run(tmp_path)


@pytest.mark.parametrize(("n", "reward"), [(6, 0.3), (7, 0.7), (7, 1000.1)])
def test_equal_rewards_are_rounded_and_honest(tmp_path, n, reward):
    """The float32 mean of equal rewards is off in its last digit, and the advantages are that digit divided by 1e-4."""

    def equal(completions, **kwargs):
        return [reward] * len(completions)

    sizes = {"num_generations": n, "per_device_train_batch_size": n, "gradient_accumulation_steps": 1, "max_steps": 1}
    trl_setup.our_trainer(tmp_path, reward=equal, **sizes).train()
    verify_run(tmp_path)


@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
def test_a_run_that_goes_on_within_a_generation_batch_can_be_checked(tmp_path, options):
    options = SAVING | {"gradient_accumulation_steps": 1, "max_steps": 2} | options
    trl_setup.our_trainer(tmp_path, **options).train()
    shutil.rmtree(tmp_path / "checkpoint-2")
    trl_setup.our_trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    assert stages(tmp_path).count("began") == 2 and not (tmp_path / "run-1").exists()
    assert "3 updates in order" in "\n".join(verify_run(tmp_path)), "the second was taken twice"


def test_a_checkpoint_of_another_folder_begins_a_run_of_its_own(tmp_path):
    first = {"gradient_accumulation_steps": 1, **SAVING, "max_steps": 1}
    trl_setup.our_trainer(tmp_path / "a", **first).train()
    trl_setup.our_trainer(tmp_path / "b", **(first | {"seed": 5})).train()
    trainer = trl_setup.our_trainer(tmp_path / "b", **(first | {"max_steps": 2}))
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert (tmp_path / "b" / "run-1").exists()
    found = "\n".join(verify_run(tmp_path / "b", checkpoints=False))
    assert "1 updates in order" in found


def test_a_journal_that_is_cut_off_is_read_to_there(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    with (folder / "run" / "journal.jsonl").open("a") as journal:
        journal.write('{"seq": 99, "sta')
    assert "ends in the middle of an entry" in "\n".join(verify_run(folder))
    shutil.copytree(folder / "checkpoint-1", folder / "checkpoint-99")
    assert "not of this run: checkpoint-99" in "\n".join(verify_run(folder))


def test_responses_of_a_rollout_function_are_on_record(tmp_path):
    def rollout(prompts, trainer):
        ids = [trainer._tokenizer(p)["input_ids"] for p in prompts]
        return {"prompt_ids": ids, "completion_ids": [[5, 6 + i % 3, 1] for i in range(len(ids))], "logprobs": None}

    trl_setup.our_trainer(tmp_path, max_steps=1, rollout_func=rollout).train()
    verify_run(tmp_path)
    entries = Journal(tmp_path / "run" / "journal.jsonl").entries
    assert [e["sampler"]["name"] for e in entries if e["stage"] == "sampled"] == ["rollout_func"] * 2


def test_secrets_are_not_written():
    given = {
        "hub_token": "s3cret",
        "pad_token": "<pad>",
        "a": [{"token": "s3cret", "api_key": "s3cret"}],
        "token": None,
    }
    found = run_facts.finite(given | {"num_tokens": 3})
    assert "s3cret" not in json.dumps(found)
    assert found["pad_token"] == "<pad>" and found["num_tokens"] == 3 and found["token"] is None


# Tampering


def edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def resealed(folder, change):
    """Entries are changed by someone who knows how to seal them again."""
    path = folder / "run" / "journal.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    changed = change(entries)
    previous, lines = START, []
    for seq, entry in enumerate(entries if changed is None else changed):
        entry |= {"seq": seq, "previous": previous}
        previous = entry["sha256"] = seal(entry)
        lines.append(json.dumps(entry, sort_keys=True) + "\n")
    path.write_text("".join(lines))


def first(entries, stage):
    return next(entry for entry in entries if entry["stage"] == stage)


def other_token(content):
    content["rows"][0]["token_ids"][0] += 1


def better_reward(content):
    content["rewards"][0][0] += 1.0


def consistent_reward(folder):
    """A reward is raised, and the journal's hash of the file with it: the advantages do not follow any more."""
    path = folder / "run" / "rollouts" / "00000000.rewards.json"
    content = json.loads(path.read_text())
    better_reward(content)
    sha256 = write_json(path, content)
    resealed(folder, lambda entries: first(entries, "rewarded").update(file_sha256=sha256))


def consistent_token(folder):
    path = folder / "run" / "rollouts" / "00000000-0.json"
    content = json.loads(path.read_text())
    other_token(content)
    sha256 = write_json(path, content)
    resealed(folder, lambda entries: first(entries, "sampled").update(file_sha256=sha256))


def without(stage):
    return lambda folder: resealed(folder, lambda entries: entries.remove(first(entries, stage)))


def twice(stage):
    def change(entries):
        entries.insert(entries.index(first(entries, stage)), dict(first(entries, stage)))

    return lambda folder: resealed(folder, change)


def other_checkpoint(folder):
    path = folder / "checkpoint-2"
    (path / "trainer_state.json").write_text("{}")
    write_manifest(path, {})


def of_run(name, change):
    return lambda folder: change(folder / "run" / name)


TAMPERED = {
    "request": (of_run("request.json", lambda p: edited(p, lambda c: c.update(gradient_scope="response"))), "request"),
    "model": (of_run("model-snapshot.json", lambda p: edited(p, lambda c: c.update(frozen_sha256="0"))), "model-snap"),
    "metrics": (of_run("metrics.jsonl", lambda p: p.write_text("{}\n")), "metrics.jsonl is missing or not what"),
    "memory": (of_run("memory.jsonl", lambda p: p.write_text("{}\n")), "memory.jsonl is missing or not what"),
    "ranks": (of_run("rank-sessions.json", lambda p: edited(p, lambda c: c["ranks"].append({}))), "rank-sessions"),
    "witness": (of_run("gradient-witness.json", lambda p: edited(p, lambda c: c.update(norm=0.0))), "gradient-witness"),
    "rollouts": (of_run("rollouts/00000002-0.json", lambda p: edited(p, other_token)), "update 1"),
    "rewards": (of_run("rollouts/00000002.rewards.json", lambda p: edited(p, better_reward)), "update 1"),
    "gone": (of_run("rollouts/00000002.rewards.json", lambda p: p.unlink()), "is missing"),
    "manifest": (of_run(MANIFEST, lambda p: edited(p, lambda c: c["files"].clear())), MANIFEST),
    "journal": (
        of_run("journal.jsonl", lambda p: p.write_text(p.read_text().replace("reference", "old"))),
        "was changed",
    ),
    "no-journal": (of_run("journal.jsonl", lambda p: p.unlink()), "is missing: this is no run folder"),
    "empty-journal": (of_run("journal.jsonl", lambda p: p.write_text("")), "is empty"),
    "checkpoint": (lambda f: (f / "checkpoint-2" / "optimizer.pt").write_bytes(b""), "checkpoint-2: optimizer.pt"),
    "link": (lambda f: (f / "checkpoint-2" / "x").symlink_to(f / "README.md"), "symbolic link"),
    "other-checkpoint": (other_checkpoint, "not the one that this run saved"),
    "reward-and-hash": (consistent_reward, "advantages do not follow from the rewards"),
    "token-and-hash": (consistent_token, "replayed responses are not among those that were drawn"),
    "no-finalize": (without("finalized"), "stepped on a gradient that was not finalized"),
    "two-finalizes": (twice("finalized"), "finalized twice before a step"),
    "two-steps": (twice("stepped"), "follows update 1"),
    "no-step": (without("stepped"), "update 1"),
    "no-sample": (without("sampled"), "nothing was sampled before it"),
    "no-beginning": (without("began"), "before the run began"),
    "other-policy": (
        lambda f: resealed(f, lambda e: first(e, "stepped").update(adapter_sha256="0")),
        "other LoRA weights than the last update left",
    ),
    "outside": (
        lambda f: resealed(f, lambda e: first(e, "sampled").update(rollouts="../../../secret")),
        "leads out of",
    ),
    "unknown-stage": (lambda f: resealed(f, lambda e: first(e, "saved").update(stage="blessed")), "is not known"),
    "lacking": (lambda f: resealed(f, lambda e: first(e, "stepped").pop("adapter_sha256") and None), "lacks"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_every_kind_of_tampering_is_caught(finished, tmp_path, kind):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    tamper, told = TAMPERED[kind]
    tamper(folder)
    with pytest.raises(InputError) as error:
        verify_run(folder)
    assert told in str(error.value)


def test_the_command_says_what_broke(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    run = CliRunner().invoke
    sound = run(app, ["verify-run", str(folder)])
    assert sound.exit_code == 0 and "ok  3 updates in order" in sound.output
    TAMPERED["rewards"][0](folder)
    broken = run(app, ["verify-run", str(folder), "--json"])
    assert broken.exit_code == 1
    found = json.loads(broken.output)
    assert not found["ok"] and "00000002.rewards.json is not what was written" in found["broken"]
    assert "broken  entry" in run(app, ["verify-run", str(folder), "--no-checkpoints"]).output
    assert isinstance(run(app, ["verify-run", str(tmp_path / "none")]).exception, InputError)


# Killed and resumed


def in_child(folder, kill_at, checkpoint=None, **options):
    """Train in a process of its own that is killed, as by kill -9, at the `kill_at`-th entry of the journal."""

    def child():
        stock = journal_module.Journal.append

        def append(self, stage, **facts):
            if len(self.entries) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return stock(self, stage, **facts)

        journal_module.Journal.append = append
        trl_setup.our_trainer(folder, **(SAVING | options)).train(resume_from_checkpoint=checkpoint)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    return process.exitcode


OBJECTIVE = {"beta": 0.1, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = trl_setup.our_trainer(folder, **(SAVING | OBJECTIVE))
    trainer.train()
    return load_file(folder / "checkpoint-3" / "adapter_model.safetensors"), trl_setup.lora(trainer.model)


QUICK = (2, 6, 7, 8, 11, 13)


@pytest.mark.parametrize(
    "kill_at", [pytest.param(i, marks=[] if i in QUICK else pytest.mark.slow) for i in range(1, 1 + 2 * len(UPDATE))]
)
def test_killed_at_any_stage_a_run_goes_on_to_the_same_bits(tmp_path, unbroken, kill_at):
    """The run dies as it is about to write entry `kill_at`: those of the first update are 1 to 7."""
    assert in_child(tmp_path, kill_at, **OBJECTIVE) == -signal.SIGKILL
    assert stages(tmp_path) == ["began", *UPDATE * 2][:kill_at]
    whole = kill_at >= len(UPDATE)  # "saved" is written when the checkpoint is whole already
    trainer = trl_setup.our_trainer(tmp_path, **(SAVING | OBJECTIVE))
    trainer.train(resume_from_checkpoint=whole)
    assert torch.equal(trl_setup.lora(trainer.model), unbroken[1])
    saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    assert saved.keys() == unbroken[0].keys() and all(torch.equal(saved[n], t) for n, t in unbroken[0].items())
    verify_run(tmp_path)
    entries = Journal(tmp_path / "run" / "journal.jsonl").entries
    drawn = [entry for entry in entries if entry["stage"] == "sampled"]
    interrupted = len(UPDATE) < kill_at < 2 * len(UPDATE)  # the second update, whose checkpoint is not whole yet
    assert [entry["reused"] for entry in drawn].count(True) == int(interrupted)
    assert (tmp_path / "run-1").exists() != whole, "what is not continued is moved aside"


def test_rollouts_of_another_policy_are_not_used_again(tmp_path):
    """The second update is interrupted, and goes on from a first checkpoint that someone changed."""
    assert in_child(tmp_path, 12, **OBJECTIVE) == -signal.SIGKILL
    other = tmp_path / "checkpoint-1" / "adapter_model.safetensors"
    weights = load_file(other)
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other, {"format": "pt"})
    write_manifest(tmp_path / "checkpoint-1", {})
    trl_setup.our_trainer(tmp_path, **(SAVING | OBJECTIVE)).train(resume_from_checkpoint=True)
    entries = Journal(tmp_path / "run" / "journal.jsonl").entries
    assert not any(entry["reused"] for entry in entries if entry["stage"] == "sampled")
    with pytest.raises(InputError, match="other LoRA weights"):
        verify_run(tmp_path)


# Samplers outside


def outside(folder, served, **options):
    sampler = HttpSampler(served.url, **options.pop("sampler", {}))
    return trl_setup.our_trainer(folder, sampler=sampler, **(SAVING | {"gradient_accumulation_steps": 1} | options))


def test_a_server_draws_what_is_trained_on(tmp_path):
    with completion_server() as served:
        trainer = outside(tmp_path, served)
        trainer.train()
    verify_run(tmp_path)
    logged = [h for h in trainer.state.log_history if "reward" in h]
    assert len(logged) == 3
    for entry in logged:
        assert 0 <= entry["sampling/sampling_logp_difference/mean"] < 1e-4
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert len([e for e in served.events if e == "/v1/load_lora_adapter"]) == 3, "each update's policy is loaded"
    entries = [e for e in Journal(tmp_path / "run" / "journal.jsonl").entries if e["stage"] == "sampled"]
    assert [e["sampler"]["name"] for e in entries] == ["http"] * 3
    rows = read_json(tmp_path / "run" / "rollouts" / entries[0]["rollouts"])["rows"]
    assert len(rows) == 4 and all(len(row["logprobs"]) == len(row["token_ids"]) for row in rows)


def test_trls_vllm_server_is_asked_by_the_adapter_and_nothing_is_merged(tmp_path):
    with completion_server() as served:
        asked = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": served.url}
        trainer = trl_setup.our_trainer(tmp_path / "a", **(SAVING | asked | {"gradient_accumulation_steps": 1}))
        base = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        trainer.train()
        by_sampler = outside(tmp_path / "b", served)
        by_sampler.train()
    assert trainer.args.use_vllm and served.events.count("/v1/completions") == 6
    assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base) and base
    assert torch.equal(trl_setup.lora(trainer.model), trl_setup.lora(by_sampler.model))
    verify_run(tmp_path / "a")


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("both draw responses", {"sampler": HttpSampler("http://127.0.0.1:9")}),
        ("vllm_structured_outputs_regex='a+': not used", {"vllm_structured_outputs_regex": "a+"}),
        ("vllm_server_timeout=1.0", {"vllm_server_timeout": 1.0}),
    ],
    ids=["sampler", "regex", "timeout"],
)
def test_what_a_vllm_server_is_not_asked_for_is_refused(tmp_path, told, options):
    with pytest.raises(ConfigurationError) as error:
        trl_setup.our_trainer(tmp_path, use_vllm=True, vllm_mode="server", **options)
    assert told in str(error.value)


def test_a_tool_conversation_goes_on_with_a_sampler(tmp_path, monkeypatch):
    with completion_server() as served:
        trainer = outside(tmp_path, served, max_completion_length=20)
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"add": lambda a, b: a + b}], [{}]
        trainer.max_tool_calling_iterations = 1
        monkeypatch.setattr(trainer, "_get_tool_suffix_ids", lambda messages: [5, int(messages[0]["content"])])
        monkeypatch.setattr(trl_grpo_trainer, "parse_response", lambda *args, **kwargs: {})
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 4}}}
        completions = [[{"role": "assistant", "tool_calls": [call]}]]
        ids, logprobs = [[4]], [[-1.0]]
        trainer._tool_call_loop([[]], [[9, 20, 33]], ids, completions, logprobs, None, {})
        assert served.events.count("/v1/completions") == 1
    assert ids[0][:3] == [4, 5, 6] and logprobs[0][:3] == [-1.0, 0.0, 0.0], "the tool's answer was not drawn"
    assert len(ids[0]) == len(logprobs[0]) > 3 and all(logprob < 0 for logprob in logprobs[0][3:])


def test_a_sampler_with_a_stale_adapter_is_caught(tmp_path):
    with completion_server(serve_stale=True) as served:
        trainer = outside(tmp_path, served, learning_rate=30.0, sampler={"max_logprob_difference": 0.05})
        with pytest.raises(SamplerError, match="it does not serve the policy"):
            trainer.train()
    assert stages(tmp_path).count("stepped") >= 1, "the first policy is the one that is served"
    assert stages(tmp_path)[-1] in ("sampled", "scored", "rewarded"), "nothing was replayed after it was caught"
    with completion_server() as served:
        trainer = outside(tmp_path, served, learning_rate=30.0, sampler={"max_logprob_difference": 0.05})
        trainer.train(resume_from_checkpoint=True)
        assert "/v1/completions" in served.events, "what was refused is drawn anew"
    verify_run(tmp_path)


def test_what_a_server_drew_is_used_again_after_a_crash(tmp_path):
    """The served random numbers differ from call to call, so a second drawing would be another one."""
    with completion_server() as served:
        stock, calls = served.complete, []

        def other_each_time(body):
            calls.append(body)
            return stock(body | {"seed": body["seed"] + len(calls)})

        served.complete = other_each_time
        whole = outside(tmp_path / "a", served)
        whole.train()
        calls.clear()
        entries = Journal(tmp_path / "a" / "run" / "journal.jsonl").entries
        second = [e["stage"] for e in entries].index("replayed", len(UPDATE) + 1)

        stock_append = Journal.append

        class Crash(BaseException):
            pass

        def append(self, stage, **facts):
            if len(self.entries) == second:
                raise Crash
            return stock_append(self, stage, **facts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "append", append)
            with pytest.raises(Crash):
                outside(tmp_path / "b", served).train()
        before = len(calls)
        resumed = outside(tmp_path / "b", served)
        resumed.train(resume_from_checkpoint=True)
        assert len(calls) == before + 1, "the second update's responses are on the disk; the third's are drawn"
    assert torch.equal(trl_setup.lora(resumed.model), trl_setup.lora(whole.model))
    verify_run(tmp_path / "b")


def test_devices_change_hands_in_order(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger=outside_sampling.__name__), completion_server() as served:
        trainer = outside(tmp_path, served, max_steps=1, sampler={"sleep": True})
        held = []
        stock = served.complete

        def complete(body):
            held.append(sum(prefix.n_bytes for prefix in trainer._prefixes.values()))
            return stock(body)

        served.complete = complete
        trainer.train()
    said = [record.message.partition(": ")[2] or record.message for record in caplog.records]
    assert said == [
        "trainer leaves cpu",
        "sampler takes its devices",
        "sampler gave its devices back",
        "trainer is back on cpu",
    ]
    assert served.events[0] == "/wake_up" and served.events[-1] == "/sleep?level=1"
    assert held == [0], "no resident state while the other samples"


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"no_repeat_ngram_size": 2}},
        {"vllm_importance_sampling_correction": False},
        {"prefix_adapter": "frozen"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_a_sampler_would_not_see_are_refused(tmp_path, options):
    sampler = HttpSampler("http://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        trl_setup.our_trainer(tmp_path, sampler=sampler, **options)


# One capture, many steps


def test_eight_steps_on_one_capture_equal_eight_recaptures(tmp_path):
    """prefix_adapter="frozen": the paper's eight cycles of eight responses behind one prompt."""
    options = {
        "prefix_adapter": "frozen",
        "max_steps": 8,
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "dataset": trl_setup.prompts(1),
    }
    kept = trl_setup.our_trainer(tmp_path / "a", **options)
    kept.train()
    n_prefix = len(options["dataset"]["prompt"][0].split()) - 1
    assert kept.longstraw.stats.captured_tokens == n_prefix

    again = trl_setup.our_trainer(tmp_path / "b", **options)
    stock = again._close_update

    def close_and_drop():
        stock()
        again._drop_all()

    again._close_update = close_and_drop
    again.train()
    assert again.longstraw.stats.captured_tokens == 8 * n_prefix
    assert torch.equal(trl_setup.lora(kept.model), trl_setup.lora(again.model))
    assert not torch.equal(trl_setup.lora(kept.model), trl_setup.lora(trl_setup.our_trainer(tmp_path / "c").model))
