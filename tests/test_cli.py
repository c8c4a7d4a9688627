"""The command line as a person meets it."""

import json
import subprocess
import sys

import pytest
import torch

from longstraw_sdk.bench import PRESETS
from longstraw_sdk.bench.result import ROW_FIELDS


def run(*args):
    command = [sys.executable, "-c", "from longstraw_sdk.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_help_names_every_command_and_option():
    top = run("--help")
    assert top.returncode == 0
    assert "demo" in top.stdout and "parity" in top.stdout
    demo = run("demo", "--help")
    for option in ("--output-dir", "--model", "--seed", "--compare-steps", "--json"):
        assert option in demo.stdout


def test_version():
    from longstraw_sdk import __version__

    assert run("--version").stdout.strip() == __version__


def test_parity_prints_json_and_passes():
    result = run(
        "parity", "--model", "llama", "--dtype", "float64", "--mode", "full", "--prompt-tokens", "20", "--json"
    )
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["passed"] and row["gradient_error"] <= row["allowed"] == 1e-10
    assert row["case"]["prompt_tokens"] == 20


def test_bench_measures_both_systems_and_writes_json_and_picture(tmp_path):
    result = run("bench", "--preset", "cpu-glm-memory", "--output-dir", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "cpu-glm-memory.json").read_text())
    assert {"device", "cpu_cores", "date", "versions"} <= found[0]["machine"].keys()
    assert found[0]["settings"]["dtype"] == "float32"
    assert all(row.keys() >= set(ROW_FIELDS) for row in found)
    peaks = {(m["system"], m["prompt_tokens"]): m["peak_bytes"] for m in found}
    assert peaks["longstraw", 2**18] <= 1.2 * peaks["longstraw", 2**14]
    assert peaks["transformers", 2**16] > 10 * peaks["transformers", 2**12], "grows with the prompt"
    assert all(m["seconds"] > 0 and m["tokens_per_second"] > 0 for m in found)
    assert (tmp_path / "cpu-glm-memory.png").read_bytes().startswith(b"\x89PNG")


def test_bench_help_names_the_presets():
    shown = " ".join(run("bench", "--help").stdout.split())
    for preset in PRESETS:
        assert preset in shown


@pytest.mark.slow
def test_bench_simulates_ranks_and_writes_json_and_picture(tmp_path):
    result = run("bench", "--preset", "cpu-simulated-ranks", "--output-dir", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "cpu-simulated-ranks.json").read_text())
    assert all(row.keys() >= set(ROW_FIELDS) for row in found)
    steps = [row for row in found if "estimate" in row]
    assert len(steps) < len(found), "and the measurements behind them"
    assert steps[0]["complete"] and {"links", "experts", "whole model", "whole prompt"} <= steps[0]["settings"].keys()
    cases = {(s["estimate"]["geometry"], s["estimate"]["size"], s["prompt_tokens"]): s["estimate"] for s in steps}
    assert {size for _, size, _ in cases} == {2, 8} and {n for *_, n in cases} == {4096, 8192}
    for (geometry, size, _), case in cases.items():
        half, whole = (cases[geometry, size, n]["phases"]["capture"] for n in (4096, 8192))
        assert 1.9 < whole["received_bytes"] / half["received_bytes"] < 3, "grows with the prompt"
        groups = [s["group"] for s in steps if s["estimate"] == case]
        assert groups == [2, 8, 2, 8]
        assert (case["phases"]["capture"]["expert_bytes"] > 0) == ("glm" in geometry)
        assert case["memory"]["peak_full"] > case["memory"]["peak_response"] > case["memory"]["weights"]
    assert (tmp_path / "cpu-simulated-ranks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_the_simulation_of_whole_models_needs_a_gpu(tmp_path):
    result = run("bench", "--preset", "simulated-ranks", "--output-dir", str(tmp_path))
    assert result.returncode == 2
    assert "needs a CUDA device of at least 64 GiB, and there is none" in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_the_command_line_runs_as_a_module():
    command = [sys.executable, "-m", "longstraw_sdk.cli", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == run("--version").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["parity", "--model", "nowhere"], "neither a built-in architecture"),
        (["parity", "--mode", "backward"], "allowed: full, response, frozen"),
        (["parity", "--dtype", "int8"], "float64, float32, bfloat16"),
        (["parity", "--response-tokens", "a,b"], "lengths such as"),
        (["parity", "--adapter", "no.such:Thing"], "module:Class"),
        (["bench", "--preset", "gpu"], "allowed: cpu-small"),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(args, message):
    result = run(*args)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
