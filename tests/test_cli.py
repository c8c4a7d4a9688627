"""The command line as a person meets it."""

import json
import subprocess
import sys

import pytest


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
    result = run("bench", "cpu-glm-memory", "--output-dir", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "cpu-glm-memory.json").read_text())
    assert {"device", "cpu_cores", "date", "versions"} <= found["machine"].keys()
    assert found["settings"]["dtype"] == "float32"
    peaks = {(m["system"], m["prompt_tokens"]): m["peak_bytes"] for m in found["measurements"]}
    assert peaks["longstraw", 2**18] <= 1.2 * peaks["longstraw", 2**14]
    assert peaks["transformers", 2**16] > 10 * peaks["transformers", 2**12], "grows with the prompt"
    assert all(m["seconds"] > 0 and m["tokens_per_second"] > 0 for m in found["measurements"])
    assert (tmp_path / "cpu-glm-memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["parity", "--model", "nowhere"], "neither a built-in architecture"),
        (["parity", "--mode", "backward"], "allowed: full, response, frozen"),
        (["parity", "--dtype", "int8"], "float64, float32, bfloat16"),
        (["parity", "--response-tokens", "a,b"], "lengths such as"),
        (["parity", "--adapter", "no.such:Thing"], "module:Class"),
        (["bench", "gpu"], "allowed: cpu-glm-memory"),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(args, message):
    result = run(*args)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
