"""A run in which something else fails: it ends loudly, and goes on from its last whole checkpoint to the same bits."""

import contextlib
import errno
import logging
import os
import signal
import time

import peft.peft_model
import pytest
import torch
import trl_setup
from failing import SAID, layers_of, no_memory_in_backward
from transformers import TrainerCallback

from longstraw_sdk import ConfigurationError, NumericsError
from longstraw_sdk.evidence import journal as journal_module
from longstraw_sdk.evidence.artifacts import read_json
from longstraw_sdk.evidence.journal import Journal
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.trainers import grpo_trainer
from longstraw_sdk.trainers.stop_cleanly import StopCleanly

OPTIONS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "gradient_accumulation_steps": 1}
STAGES = ["sampled", "rewarded", "replayed", "finalized", "stepped", "saved"]


def new_trainer(folder, **options):
    return trl_setup.our_trainer(folder, **(OPTIONS | options))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    trainer = new_trainer(tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    return trl_setup.lora(trainer.model)


def check_goes_on(folder, unbroken, **options):
    trainer = new_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(trl_setup.lora(trainer.model), unbroken)
    assert trainer.state.global_step == 3
    assert "updates in order" in "\n".join(verify_run(folder))


class InStep(TrainerCallback):
    """Enters `context()` for step `n`."""

    def __init__(self, n, context):
        self.n, self.context = n, context

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.n - 1:
            self.entered = self.context()
            self.entered.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.n:
            self.entered.__exit__(None, None, None)


def test_memory_that_runs_out_in_a_backward(tmp_path, unbroken):
    trainer = new_trainer(tmp_path)
    trainer.add_callback(InStep(2, lambda: no_memory_in_backward(trainer.model)))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert any("the planner" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in trainer.model.parameters()), "nothing half-added is left"
    assert trainer.longstraw.pool.audit() == [] and trainer.longstraw.pool.owners == ()
    check_goes_on(tmp_path, unbroken)


def test_memory_that_holds_smaller_packs_only(tmp_path, unbroken, caplog):
    trainer = new_trainer(tmp_path)
    narrow = []

    def allocate(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if torch.is_grad_enabled() and hidden.shape[0] > 1:
            narrow.append(hidden.shape)
            raise torch.OutOfMemoryError(SAID)

    def hook():
        return layers_of(trainer.model)[-1].register_forward_pre_hook(allocate, with_kwargs=True)

    trainer.add_callback(InStep(2, hook))
    with caplog.at_level(logging.WARNING, "longstraw_sdk"):
        trainer.train()
    assert narrow and "they run as" in caplog.text
    assert trl_setup.lora(trainer.model) == pytest.approx(unbroken, rel=0, abs=1e-5)
    assert "3 updates in order" in "\n".join(verify_run(tmp_path))


def test_a_gradient_that_is_not_finite(tmp_path, unbroken):
    trainer = new_trainer(tmp_path)

    @contextlib.contextmanager
    def poisoned():
        p = next(p for p in trainer.model.parameters() if p.requires_grad)
        handle = p.register_hook(lambda gradient: gradient * float("nan"))
        yield
        handle.remove()

    trainer.add_callback(InStep(2, poisoned))
    with pytest.raises(NumericsError, match="NaN or infinite in 1 of"):
        trainer.train()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    check_goes_on(tmp_path, unbroken)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def on_second(function):
    """`function`, that finds no space when it is called for the second checkpoint."""

    def write(*args, **kwargs):
        if any("checkpoint-2" in str(arg) for arg in (*args, *kwargs.values())):
            no_space()
        return function(*args, **kwargs)

    return write


WRITERS = {
    "adapter": (peft.peft_model, "safe_save_file"),
    "optimizer": (torch, "save"),
    "rollouts": (grpo_trainer, "save_rollouts"),
    "manifest": (grpo_trainer, "write_manifest"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_full_while_a_checkpoint_is_written(tmp_path, unbroken, monkeypatch, writer):
    module, name = WRITERS[writer]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, on_second(getattr(module, name)))
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            new_trainer(tmp_path).train()
    assert (tmp_path / "checkpoint-2").exists(), "it began"
    check_goes_on(tmp_path, unbroken)
    began = [e for e in Journal(tmp_path / "run" / "journal.jsonl").entries if e["stage"] == "began"]
    assert len(began) == 2 and began[1]["checkpoint"] == "checkpoint-1"


def test_a_disk_that_is_full_while_the_journal_is_written(tmp_path, unbroken, monkeypatch):
    stock = Journal.append

    def append(self, stage, **facts):
        if [e["stage"] for e in self.entries].count("saved") == 1 and stage == "finalized":
            with self.path.open("a") as file:
                file.write('{"seq": 8, "sta')  # what fitted
            no_space()
        return stock(self, stage, **facts)

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.Journal, "append", append)
        with pytest.raises(OSError, match="No space left"):
            new_trainer(tmp_path).train()
    check_goes_on(tmp_path, unbroken)


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "longstraw_rollouts.safetensors"]
)
def test_a_checkpoint_that_is_cut_off_is_left_out(tmp_path, unbroken, name):
    new_trainer(tmp_path).train()
    last = tmp_path / "checkpoint-3"
    if not (last / name).exists():
        pytest.fail(f"{name} is not among {sorted(p.name for p in last.iterdir())}")
    cut_off(last / name)
    with pytest.raises(ConfigurationError, match=f"not a whole checkpoint: .*{name}"):
        new_trainer(tmp_path).train(resume_from_checkpoint=str(last))
    trainer = new_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(trl_setup.lora(trainer.model), unbroken)


OTHERS = {
    "other linears": (lambda: tiny_model("llama"), "it lacks .*it has besides"),
    "other rank": (lambda: tiny_model("qwen36", rank=8), "it has in another shape"),
    "more layers": (lambda: tiny_model("qwen36", n_layers=8), "it has besides"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_lora_is_refused(tmp_path, other):
    """What it lacks would stay as it was made."""
    make, told = OTHERS[other]
    new_trainer(tmp_path, model=make(), max_steps=1).train()
    trainer = new_trainer(tmp_path, max_steps=2)
    before = trl_setup.lora(trainer.model).clone()
    with pytest.raises(ConfigurationError, match=f"another model or configuration.*{told}"):
        trainer.train(resume_from_checkpoint=True)
    assert torch.equal(trl_setup.lora(trainer.model), before)


def test_a_finished_run_is_not_trained_further(tmp_path, unbroken):
    new_trainer(tmp_path).train()
    check_goes_on(tmp_path, unbroken)
    assert "3 updates in order" in "\n".join(verify_run(tmp_path))


@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_at_any_stage_ends_behind_a_saved_update(tmp_path, unbroken, monkeypatch, stage):
    """Of the second update. The signal comes as the stage's entry is about to be written."""
    stock, sent = Journal.append, []

    def append(self, written, **facts):
        if [e["stage"] for e in self.entries].count("saved") == 1 and written == stage and not sent:
            sent.append(written)
            os.kill(os.getpid(), signal.SIGTERM)
        return stock(self, written, **facts)

    trainer = new_trainer(tmp_path)
    stop = StopCleanly(trainer)
    trainer.add_callback(stop)
    with monkeypatch.context() as patch, stop.listening():
        patch.setattr(journal_module.Journal, "append", append)
        trainer.train()
    ended_at = 3 if stage == "saved" else 2  # the signal comes behind the question of the second update
    assert sent == [stage] and stop.stopped and trainer.state.global_step == ended_at
    assert (tmp_path / f"checkpoint-{ended_at}").is_dir()
    check_goes_on(tmp_path, unbroken)


def test_a_clock_that_jumps(tmp_path, unbroken, monkeypatch):
    """Back and forth by hours, as a machine whose clock is set does; measured seconds come from another clock."""
    stock, calls = time.time, []

    def jumping():
        calls.append(None)
        return stock() + 7200 * (-1) ** len(calls)

    monkeypatch.setattr(time, "time", jumping)
    trainer = new_trainer(tmp_path)
    trainer.train()
    assert calls and torch.equal(trl_setup.lora(trainer.model), unbroken)
    assert "3 updates in order" in "\n".join(verify_run(tmp_path))
    (rank,) = read_json(tmp_path / "run" / "rank-sessions.json")["ranks"]
    assert all(0 <= seconds < 600 for seconds in rank["seconds"].values())


def test_a_data_worker_that_dies(tmp_path):
    """While it loads a row of the last update, which it does some updates ahead."""
    armed = tmp_path / "armed"

    def load(batch):
        if armed.exists() and torch.utils.data.get_worker_info() is not None and victim in batch["prompt"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    rows = trl_setup.prompts().with_transform(load)
    options = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1, "dataset": rows, "max_steps": 6}
    whole = new_trainer(tmp_path / "whole", **options)
    victim = rows[list(whole._get_train_sampler())[4 * 5]]["prompt"]
    whole.train()
    armed.touch()
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (exited unexpectedly|killed by signal)"):
        new_trainer(tmp_path / "broken", **options).train()
    armed.unlink()
    assert (tmp_path / "broken" / "checkpoint-1").is_dir() and not (tmp_path / "broken" / "checkpoint-5").exists()
    trainer = new_trainer(tmp_path / "broken", **options)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(trl_setup.lora(trainer.model), trl_setup.lora(whole.model))
