"""Two hundred updates: killed ten times a run ends with the same bits, holds no more at its end, and is repeatable."""

import gc
import multiprocessing
import os
import random
import signal

import pytest
import torch
import trl_setup
from transformers import TrainerCallback

from longstraw_sdk.evidence import journal as journal_module
from longstraw_sdk.evidence.verify import verify_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

N_UPDATES, N_KILLS, SAVED_EVERY = 200, 10, 5
OPTIONS = {"save_strategy": "steps", "save_steps": SAVED_EVERY, "save_total_limit": 2, "gradient_accumulation_steps": 1}
# 0.3, which other tests take for four updates, would end in weights of no meaning.
OPTIONS |= {"learning_rate": 0.01, "optim": "adamw_torch", "max_grad_norm": 1.0, "beta": 0.05, "logging_steps": 10}
# Of one length, so that what is alive between two updates is as much after each.
OPTIONS |= {"generation_kwargs": {"min_new_tokens": 8}}
PROMPTS = trl_setup.prompts(80).select(range(0, 80, 5))


def new_trainer(folder, **options):
    return trl_setup.our_trainer(folder, dataset=PROMPTS, **(OPTIONS | {"max_steps": N_UPDATES} | options))


class TensorsAlive(TrainerCallback):
    """Bytes of all tensors that Python knows of, after every step."""

    def __init__(self):
        self.n_bytes = {}

    def on_step_begin(self, args, state, control, **kwargs):
        gc.collect()
        alive = {}
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor):
                storage = thing.untyped_storage()
                alive[storage.data_ptr()] = storage.nbytes()
        self.n_bytes[state.global_step] = sum(alive.values())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    alive = TensorsAlive()
    trainer = new_trainer(tmp_path_factory.mktemp("unbroken"), callbacks=[alive])
    trainer.train()
    return trl_setup.lora(trainer.model), alive.n_bytes


def train_and_die(folder, update, stage, resume):
    """Train in a process that is killed as it writes the entry of `stage` in `update`; its exit code."""

    def child():
        stock = journal_module.Journal.append

        def append(self, written, **facts):
            if (written, facts.get("update")) == (stage, update):
                os.kill(os.getpid(), signal.SIGKILL)
            return stock(self, written, **facts)

        journal_module.Journal.append = append
        new_trainer(folder).train(resume_from_checkpoint=resume)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(600)
    return process.exitcode


def test_killed_ten_times_it_ends_with_the_same_bits(tmp_path, unbroken):
    drawn = random.Random(0)
    for update in sorted(drawn.sample(range(SAVED_EVERY + 1, N_UPDATES), N_KILLS)):
        stage = drawn.choice(["sampled", "scored", "rewarded", "replayed", "finalized"])
        resume = any(tmp_path.glob("checkpoint-*/checkpoint-manifest.json"))
        assert train_and_die(tmp_path, update, stage, resume) == -signal.SIGKILL, (update, stage)
        saved = max(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
        assert saved == update // SAVED_EVERY * SAVED_EVERY
    trainer = new_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == N_UPDATES
    assert torch.equal(trl_setup.lora(trainer.model), unbroken[0])
    assert "updates in order" in "\n".join(verify_run(tmp_path))


def test_tensors_alive_after_the_third_update_are_those_after_the_last(unbroken):
    n_bytes = unbroken[1]
    assert len(n_bytes) == N_UPDATES and n_bytes[3] > 0
    assert n_bytes[N_UPDATES - 1] == n_bytes[3]
    assert max(n_bytes[i] for i in range(3, N_UPDATES)) == n_bytes[3], "nor was it more between"


def test_seeds_repeat_to_the_bit(tmp_path):
    found = {}
    for seed in (1, 2):
        for again in ("a", "b"):
            trainer = new_trainer(tmp_path / f"{seed}{again}", seed=seed, max_steps=20)
            trainer.train()
            found[seed, again] = trl_setup.lora(trainer.model)
    assert torch.equal(found[1, "a"], found[1, "b"]) and torch.equal(found[2, "a"], found[2, "b"])
    assert not torch.equal(found[1, "a"], found[2, "a"]), "control: another seed is another run"
