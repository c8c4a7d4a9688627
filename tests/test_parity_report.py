"""A parity report of a model folder says what it compared and notices when it is touched."""

import json

import pytest
from typer.testing import CliRunner

from longstraw_sdk import InputError
from longstraw_sdk.cli.app import app
from longstraw_sdk.evidence.artifacts import file_sha256
from longstraw_sdk.evidence.parity_report import read_report, write_report
from longstraw_sdk.evidence.tiny import tiny_model

run = CliRunner().invoke


def test_the_report_of_a_model_folder(tmp_path):
    folder, report = tmp_path / "model", tmp_path / "report.json"
    tiny_model("llama", n_layers=2).unload().save_pretrained(folder)
    options = ["--dtype", "float64", "--mode", "response", "--prompt-tokens", "33", "--output", str(report)]
    done = run(app, ["parity", "--model", str(folder), *options])
    assert done.exit_code == 0, done.output
    found = read_report(report)
    (row,) = found["rows"]
    assert row["passed"] and row["case"]["prompt_tokens"] == 33 and row["mode"] == "response"
    files = found["models"][str(folder)]["files"]
    assert files["model.safetensors"]["sha256"] == file_sha256(folder / "model.safetensors")
    assert found["sha256"] in done.output and found["versions"]["torch"]
    checked = run(app, ["parity", "--check", str(report)])
    assert checked.exit_code == 0 and "1 comparisons, 0 failed" in checked.output

    touched = json.loads(report.read_text())
    touched["rows"][0]["gradient_error"] = 0.0
    report.write_text(json.dumps(touched))
    with pytest.raises(InputError, match="changed after it was written"):
        read_report(report)


def test_a_failed_comparison_stays_one(tmp_path):
    write_report(tmp_path / "report.json", [{"passed": False}], {})
    checked = run(app, ["parity", "--check", str(tmp_path / "report.json")])
    assert checked.exit_code == 1 and "1 failed" in checked.output
    with pytest.raises(InputError, match="does not exist"):
        write_report(tmp_path / "none" / "report.json", [], {})
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(InputError, match="no parity report"):
        read_report(tmp_path / "report.json")
