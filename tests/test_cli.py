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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["parity", "--model", "nowhere"], "neither a built-in architecture"),
        (["parity", "--mode", "backward"], "allowed: full, response, frozen"),
        (["parity", "--dtype", "int8"], "float64, float32, bfloat16"),
        (["parity", "--response-tokens", "a,b"], "lengths such as"),
        (["parity", "--adapter", "no.such:Thing"], "module:Class"),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(args, message):
    result = run(*args)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
