"""An update of several generations, some of whose rows are masked: none of a prompt's gradient is lost between them."""

import pytest
import torch
import trl_setup

from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.prefix import Prefix

OPTIONS = {"max_steps": 1, "mask_truncated_completions": True, "max_completion_length": 40, "temperature": 1.0}
OPTIONS |= {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "learning_rate": 1.0}


def step_of(trainer):
    before = trl_setup.lora(trainer.model).clone()
    trainer.train()
    return trl_setup.lora(trainer.model) - before


@pytest.fixture
def trls(tmp_path):
    trainer = trl_setup.stock_trainer(tmp_path / "trl", **OPTIONS)
    step = step_of(trainer)
    (logged,) = [h for h in trainer.state.log_history if "completions/clipped_ratio" in h]
    assert 0 < logged["completions/clipped_ratio"] < 1, "some rows are masked, others are not"
    return step


def test_the_step_is_trls(tmp_path, trls):
    assert relative_l2(step_of(trl_setup.our_trainer(tmp_path / "ours", **OPTIONS)), trls) < 1e-4


def test_control_without_the_sweeps_it_is_not(tmp_path, trls, monkeypatch):
    monkeypatch.setattr(Prefix, "sweep", lambda self: 0)
    monkeypatch.setattr(Prefix, "needs_sweep", property(lambda self: False))
    assert relative_l2(step_of(trl_setup.our_trainer(tmp_path / "ours", **OPTIONS)), trls) > 1e-2
    assert torch.isfinite(trls).all()
