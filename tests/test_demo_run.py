"""The demo end to end, small; with `-m slow` the whole of it, which must learn."""

import json

import pytest

from longstraw_sdk.demo import run as demo_run
from longstraw_sdk.demo.report import write_report
from longstraw_sdk.demo.run import DemoConfig, run_demo
from longstraw_sdk.demo.warmup import WarmUpReport
from longstraw_sdk.errors import ConfigurationError


def ignore(part, done, total, remark):
    pass


# Of glm52 the comparison with TRL alone takes minutes: its stock indexer copies all keys for every query.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["qwen36", pytest.param("glm52", marks=pytest.mark.slow)])
def test_small_run_writes_adapter_metrics_pictures_and_report(tmp_path, monkeypatch, model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(demo_run, "warm_up", lambda *args, **kwargs: WarmUpReport((), (), 0.0))
    uneven = demo_run._uneven_reward  # an untrained model earns nothing
    monkeypatch.setattr(demo_run, "needle_reward", lambda completions, answer, **kwargs: uneven(completions))
    config = DemoConfig(model=model, n_steps=1, prompts_per_step=1, n_held_out=1, n_compare_steps=1)
    result = run_demo(config, tmp_path, ignore)
    report = write_report(result, tmp_path)

    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert {"mean_reward_before", "mean_reward_after", "seconds", "gradient_scope"} <= metrics.keys()
    assert metrics["gradient_scope"] == "full"
    assert metrics["trl_reward_curve"] == metrics["reward_curve"] and len(metrics["reward_curve"]) == 1
    assert metrics["prompt_tokens_without_sharing"] == 8 * metrics["prompt_tokens_forwarded"]
    assert {"capture", "sample", "score", "replay", "backward", "sweep"} <= metrics["peak_bytes_by_phase"].keys()
    assert metrics["trl_peak_bytes"] > 5 * metrics["peak_bytes"]
    page = report.read_text()
    assert page.count("data:image/png;base64,") == 3
    for name in ("reward_curve", "memory", "tokens"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base_model")
    assert "longstraw" not in (tmp_path / "base_model" / "config.json").read_text()
    PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert AutoTokenizer.from_pretrained(tmp_path / "base_model")("β")["input_ids"] == list("β".encode())


def test_unknown_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="qwen36, dense, glm52"):
        run_demo(DemoConfig(model="gpt"), tmp_path / "never", ignore)
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "seed"), [("qwen36", 0), ("qwen36", 1), ("qwen36", 2), ("glm52", 0)])
def test_whole_demo_learns(tmp_path, model, seed):
    result = run_demo(DemoConfig(model=model, seed=seed), tmp_path, ignore)
    assert result.mean_reward_before < 0.4
    assert result.mean_reward_after > 0.9
    assert result.trl_reward_curve == result.reward_curve[:2]
