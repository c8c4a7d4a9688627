"""Trainers and benchmarks that the ranks of a `RankPool` run."""

import dataclasses
import hashlib
import os
import tempfile
from pathlib import Path

import pytest
import torch
import trl_setup
from fake_vllm import fake_vllm

from longstraw_sdk import LongStrawSession
from longstraw_sdk.bench import context_bytes
from longstraw_sdk.bench.group_steps import Run, StepPlan, run_steps
from longstraw_sdk.bench.systems import Group, Options
from longstraw_sdk.evidence.memory import trace_memory
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.models.glm52.expert_shards import keep_expert_shard
from longstraw_sdk.planner.geometry import TINY_QWEN36
from longstraw_sdk.trainers.expert_shards import whole_adapter
from longstraw_sdk.types import local


def _model(architecture, options):
    """Four layers; with experts spread, this rank's part."""
    model, size = tiny_model(architecture, n_layers=4), options.get("expert_parallel_size", 1)
    return model if size == 1 else keep_expert_shard(model, int(os.environ["RANK"]) % size, size)


def _whole(trainer):
    """The adapter of all ranks, by name."""
    if hasattr(trainer, "longstraw"):
        return whole_adapter(trainer.model, trainer.longstraw.adapter)
    return {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}


def _run(trainer, checkpoint=None):
    start = {name: p.clone() for name, p in _whole(trainer).items()}
    trainer.train(resume_from_checkpoint=checkpoint)
    history = [h for h in trainer.state.log_history if "reward" in h]
    names = ("reward", "reward_std", "loss", "num_tokens", "entropy", "grad_norm")
    logged = {k: [h[k] for h in history] for k in names if k in history[0]}
    end = _whole(trainer)
    digest = hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in end.values())).hexdigest()
    if hasattr(trainer, "longstraw"):
        trainer.longstraw.close()
    return logged, torch.cat([(end[n] - start[n]).flatten() for n in end]), digest


def train(kind, architecture, options, folder=None):
    """(logged values, trained vector minus its start, digest of the adapter) of one `.train()`."""
    make = {"ours": trl_setup.our_trainer, "stock": trl_setup.stock_trainer}[kind]
    with tempfile.TemporaryDirectory() as scratch:
        return _run(make(Path(folder or scratch), model=_model(architecture, options), **options))


def train_sharded(architecture, options):
    """`train` as `accelerate launch` starts it with an FSDP2 configuration, and how many parameters are spread."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setenv("FSDP_VERSION", "2")
        trainer = trl_setup.our_trainer(Path(scratch), model=_model(architecture, options), **options)
        spread = sum(local(p) is not p for p in trainer.model.parameters())
        return *_run(trainer), spread


def train_by_engine(options):
    """(what this rank's engine was called for, whether it saw a launcher's variables, digest of the adapter)."""
    model = tiny_model("qwen36", n_layers=4)
    model.config._name_or_path = "base"
    with fake_vllm() as engines, tempfile.TemporaryDirectory() as scratch:
        digest = _run(trl_setup.our_trainer(Path(scratch), model=model, **options))[2]
    return engines.events, any("RANK" in seen or "MASTER_ADDR" in seen for seen in engines.environments), digest


def resume(architecture, options, folder):
    return _run(trl_setup.our_trainer(Path(folder), model=_model(architecture, options), **options), True)


def count_reward_calls():
    """How often the reward function of a context of two is called on this rank, in three steps of one prompt."""
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        return trl_setup.checksum_reward(completion_ids)

    options = {"max_steps": 3, "gradient_accumulation_steps": 1, "context_parallel_size": 2}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trl_setup.our_trainer(Path(scratch), reward=reward, **options)
        trainer.train()
        trainer.longstraw.close()
    return len(calls)


def train_masked():
    """(steps, replayed tokens, size of the update) of a run whose rows are all truncated and so masked."""
    options = {"max_steps": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    options |= {"mask_truncated_completions": True, "context_parallel_size": 2}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trl_setup.our_trainer(Path(scratch), **options)
        generate = trainer._generate_single_turn
        trainer._generate_single_turn = lambda *a, **k: ([[5] * len(ids) for ids in generate(*a, **k)[0]], None)
        before = trl_setup.lora(trainer.model).clone()
        trainer.train()
        trainer.longstraw.close()
        change = float((trl_setup.lora(trainer.model) - before).norm())
        return trainer.state.global_step, trainer.longstraw.stats.replayed_tokens, change


def replay_bytes(dtype, n_response, architecture="llama", n_layers=1, checkpointing=False):
    """(bytes that this rank received in a replay and its backward, widths, bytes by formula)."""
    model = tiny_model(architecture, n_layers=n_layers).to(dtype)
    if checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    config = model.get_base_model().config
    prompt = torch.arange(40) % config.vocab_size
    with LongStrawSession(model, chunk_tokens=16, page_tokens=8, context_parallel_size=2, probe=False) as session:
        with session.capture(prompt) as prefix:
            before = session.backend.context.received_bytes
            loss = prefix.replay(torch.arange(n_response) % config.vocab_size).logps.sum()
            loss.backward()
            received = session.backend.context.received_bytes - before
        session.finalize()
    formula = context_bytes.replay_bytes(model, 2, n_response, 1, checkpointing=checkpointing, output_travels=False)
    return received, (config.num_attention_heads, config.num_key_value_heads, config.head_dim), formula


def peak_of_a_group(context_parallel_size):
    """Peak of live bytes on this rank while a group of two behind 600 tokens is captured, replayed and reduced."""
    model = tiny_model("llama", n_layers=2, max_position_embeddings=1024)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    options = {"chunk_tokens": 64, "page_tokens": 16, "context_parallel_size": context_parallel_size, "probe": False}
    with LongStrawSession(model, **options) as session, trace_memory() as trace:
        with session.capture(torch.arange(600) % 97) as prefix:
            for start in (3, 7):
                prefix.replay(torch.arange(start, start + 16)).logps.sum().backward()
        session.finalize()
    return trace.peak_bytes


def bench_of_two():
    """Rows of a plan whose runs are this rank alone, and both ranks as a context with chunks of its own."""
    runs = (Run("full", 16), Run("full", 16, ranks=2, chunk_tokens=32))
    group = Group(prompt_tokens=60, size=3, response_tokens=9)
    plan = StepPlan(
        preset="test",
        models=((dataclasses.replace(TINY_QWEN36, n_units=1), ()),),
        groups=(group,),
        runs=runs,
        options=Options(chunk_tokens=16, page_tokens=16),
        warm_up=Group(prompt_tokens=20, size=2, response_tokens=5),
        ceiling_tokens=64,
        device=torch.device("cpu"),
        n_processes=2,
    )
    *_, result = run_steps(plan, lambda done: None)
    return result.rows()
