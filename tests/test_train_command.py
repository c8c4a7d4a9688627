"""`longstraw train` and `longstraw report`: from a YAML file to a page, and what ends a run early."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from longstraw_sdk.demo.tokenizer import byte_tokenizer
from longstraw_sdk.errors import ConfigurationError, InputError
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.report import page, read_run, write_page

YAML = """model_name_or_path: model
dataset_name: data.jsonl
reward_funcs: [rewards.length]
output_dir: out
dtype: float32
max_steps: 3
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
max_completion_length: 6
chunk_tokens: 16
page_tokens: 8
logging_steps: 1
save_strategy: "no"
bf16: false
use_cpu: true
learning_rate: 0.001
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    base = tiny_model("qwen36", vocab_size=258, eos_token_id=256, pad_token_id=257).unload()
    base.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"say something about {i}", "answer": str(i)} for i in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(
        "import time\n"
        "def length(completions, **kw):\n    return [float(sum(map(ord, c)) % 7) for c in completions]\n"
        "def slow(completions, **kw):\n    time.sleep(0.5)\n    return length(completions)\n"
    )
    (folder / "run.yaml").write_text(YAML)
    return folder


def start(folder, *args):
    command = [sys.executable, "-m", "longstraw_sdk.cli", *args]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder, *args):
    process = start(folder, *args)
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def trained(folder):
    """(output folder, what the command printed)."""
    code, out, err = run(folder, "train", "--config", "run.yaml", "--json", "--max_steps", "2")
    assert code == 0, err
    return folder / "out", out


def test_flags_stand_above_the_file_and_every_line_is_json(trained):
    _, out = trained
    *logs, summary = [json.loads(line) for line in out.splitlines()]
    assert [line["step"] for line in logs if "reward" in line] == [1, 2], "--max_steps 2, not the file's 3"
    assert summary["summary"]["updates"] == 2 and summary["summary"]["stopped_by"] is None


def test_the_run_is_whole_and_holds_what_was_logged(trained):
    output, _ = trained
    assert (output / "adapter_model.safetensors").exists()
    assert "2 updates in order" in "\n".join(verify_run(output))
    recorded = read_run(output)
    assert recorded.ended and recorded.n_updates == 2 and recorded.n_starts == 1
    assert recorded.series("reward")[0] == [1, 2]
    assert set(recorded.seconds[0]) >= {"capture", "sample", "replay", "sweep"}


def test_the_report_has_its_pictures_and_what_was_checked(trained, tmp_path):
    path = write_page(read_run(trained[0]), tmp_path)
    text = path.read_text()
    for name in ("rewards", "memory", "time"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "drift.png").exists() and "was logged" in text
    assert "journal entries seal each other" in text and "gradient scope <b>full</b>" in text


def test_the_report_says_what_is_broken(trained, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(trained[0]), str(copy)], check=True)
    metrics = copy / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"reward": ', '"reward": 1', 1) + '{"half a li')
    recorded = read_run(copy)
    assert (
        "Broken: metrics.jsonl is missing or not what was written" in write_page(recorded, tmp_path / "r").read_text()
    )
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        verify_run(copy)


def test_drift_is_drawn_where_it_was_logged(trained):
    recorded = read_run(trained[0])
    assert page._drift(recorded) is None
    recorded.metrics[1]["kl"] = 0.5
    assert page._drift(recorded) is not None


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(InputError, match=r"journal\.jsonl is missing: name a run folder"):
        read_run(tmp_path)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_closed_and_saved_update(folder, number):
    output = f"stopped-{number}"
    flags = ("--output_dir", output, "--reward_funcs", "rewards.slow", "--no_doctor")
    process = start(folder, "train", "--config", "run.yaml", "--max_steps", "60", *flags)
    journal = folder / output / "run" / "journal.jsonl"
    for _ in range(600):
        time.sleep(0.2)
        if journal.exists() and '"stepped"' in journal.read_text():
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    last = read_run(folder / output).n_updates
    assert 1 <= last < 60 and f"stopped after update {last}, which is closed and saved" in err
    assert (folder / output / f"checkpoint-{last}").is_dir()
    assert f"{last} updates in order" in "\n".join(verify_run(folder / output))
    if number == signal.SIGINT:
        flags = (*flags, "--resume_from_checkpoint", "true", "--quiet")
        code, out, err = run(folder, "train", "--config", "run.yaml", "--max_steps", str(last + 1), *flags)
        assert code == 0 and out == "", err
        recorded = read_run(folder / output)
        assert recorded.n_starts == 2 and recorded.n_updates == last + 1
        verify_run(folder / output)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max_stepz", "3"), "--max_stepz"),
        (("--reward_funcs", "nothing"), "reward_funcs 'nothing' is not known; allowed:"),
        (("--reward_funcs", "rewards.nothing"), "cannot be imported"),
        (("--lora_dropout", "0.1"), "lora_dropout=0.1"),
        (("--use_peft", "false"), "LongStraw trains LoRA"),
        (("--use_dora",), "use_dora"),
        (("--dataset_streaming",), "dataset_streaming=True"),
        (("--config", "none.yaml"), "none.yaml"),
        ((), "a model, data and a reward are needed"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_work_is_refused(folder, monkeypatch, flags, said):
    from longstraw_sdk.trainers import train_script

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = flags if not flags or flags[0] == "--config" else ("--config", "run.yaml", *flags)
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")):
        train_script.run(train_script.parse(given))


def test_the_doctor_stands_before_the_run(folder):
    flags = ("--dataset_name", "none.jsonl", "--output_dir", "never")
    code, _out, err = run(folder, "train", "--config", "run.yaml", *flags)
    assert code == 2 and "dataset" in err and "the run was not started" in err
    assert not (folder / "never").exists()


def test_help_shows_the_options_of_all_four_parts(folder):
    code, out, _ = run(folder, "train", "--help")
    assert code == 0
    for option in ("--chunk_tokens", "--lora_r", "--reward_funcs", "--quiet", "--learning_rate", "--config FILE.yaml"):
        assert option in out, option


def test_a_second_signal_ends_at_once():
    from types import SimpleNamespace

    from longstraw_sdk.trainers.stop_cleanly import StopCleanly

    stop = StopCleanly(SimpleNamespace(longstraw=SimpleNamespace(backend=SimpleNamespace(world=None))))
    before = signal.getsignal(signal.SIGTERM)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    with stop.listening():
        assert stop.on_step_end(None, None, control) is control and not control.should_training_stop
        os.kill(os.getpid(), signal.SIGTERM)
        stop.on_step_end(None, None, control)
        assert control.should_training_stop and control.should_save and stop.stopped
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
