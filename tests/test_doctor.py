"""The doctor finds each fault by name, says how to mend it, and finds none where there is none."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longstraw_sdk.demo.tokenizer import byte_tokenizer
from longstraw_sdk.doctor import Check, Subject, check, devices, examine, placement, software
from longstraw_sdk.doctor import memory as planned
from longstraw_sdk.evidence.artifacts import write_json
from longstraw_sdk.evidence.model_snapshot import model_snapshot
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.placement import RayRuntime, build_direct_ray_plan


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    base = tiny_model("qwen36", vocab_size=258, eos_token_id=256, pad_token_id=257).unload()
    base.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(model_folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def found(name, **subject):
    """The check of that name."""
    (one,) = [c for c in examine(Subject(**subject)) if c.name == name]
    return one


def rows(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_sound_request_has_no_fault(model_folder, tmp_path):
    data = rows(tmp_path, {"prompt": "a", "answer": "b"})
    checks = examine(
        Subject(model=str(model_folder), dataset=data, output_dir=tmp_path / "new" / "run", prompt_tokens=500)
    )
    assert [c for c in checks if not c.ok] == []
    names = {c.name for c in checks}
    assert names >= {"python", "packages", "environment", "gpus", "host", "output folder", "model files"}
    assert names >= {"model architecture", "lora coverage", "positions", "dataset"}
    assert not (tmp_path / "new").exists(), "nothing stays behind"


def test_a_fault_needs_a_remedy():
    with pytest.raises(AssertionError, match="needs a remedy"):
        Check("x", False, "y")


def test_a_model_file_that_is_cut_off(copied):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    one = found("model files", model=str(copied))
    assert not one.ok and "model.safetensors has" in one.found and "download" in one.remedy


def test_a_shard_that_is_missing(copied):
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (copied / "model.safetensors").rename(copied / "model-00001-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors is missing" in found("model files", model=str(copied)).found


def test_weights_that_are_pickles(copied):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "pickles" in found("model files", model=str(copied)).found


def test_a_model_that_is_not_there():
    one = found("model files", model="modell")
    assert not one.ok and one.found == "modell does not exist"


def test_the_manifest_of_a_run(copied, tmp_path):
    from transformers import AutoModelForCausalLM

    manifest = tmp_path / "model-snapshot.json"
    write_json(manifest, model_snapshot(AutoModelForCausalLM.from_pretrained(copied)))
    assert found("model manifest", model=str(copied), model_manifest=manifest).ok
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    one = found("model manifest", model=str(copied), model_manifest=manifest)
    assert not one.ok and "config.json is another" in one.found


def test_an_architecture_without_an_adapter(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path)
    one = found("model architecture", model=str(tmp_path))
    assert not one.ok and "gpt2" in one.found and "models/README.md" in one.remedy


def test_prompts_beyond_the_model(model_folder, monkeypatch):
    subject = {"model": str(model_folder), "prompt_tokens": 500, "response_tokens": 13}
    one = found("positions", **subject)
    assert not one.ok and "512 positions" in one.found and "513" in one.found
    monkeypatch.setenv("LONGSTRAW_POSITIONS", json.dumps({"factor": 4, "original_max_positions": 512}))
    assert found("positions", **subject).ok


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"LONGSTRAW_ATTENTION": "fast"}, "LONGSTRAW_ATTENTION='fast'"), ({"LONGSTRAW_ATENTION": "auto"}, "nobody reads")],
)
def test_environment_variables(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one = found("environment")
    assert not one.ok and said in one.found


def test_data_without_prompts(tmp_path):
    assert "no column prompt among text" in found("dataset", dataset=rows(tmp_path, {"text": "a"})).found
    assert "does not exist" in found("dataset", dataset=str(tmp_path / "none.jsonl")).found


def test_a_folder_that_is_not_writable():
    one = found("output folder", output_dir=Path("/proc/run"))  # not even for root
    assert not one.ok and "cannot be written to" in one.found


def test_an_output_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    one = found("output folder", output_dir=tmp_path / "file" / "run")
    assert not one.ok and "is no folder" in one.found


def test_gpus_that_are_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one = found("gpus", gpus=8)
    assert not one.ok and "8 are asked for" in one.remedy
    assert found("gpus").ok


def test_gpus_of_two_kinds_and_one_that_is_taken(monkeypatch):
    names = ["NVIDIA H200", "NVIDIA H100"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((140 - 100 * i) * 2**30, 141 * 2**30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    checks = {c.name: c for c in devices.examine(Subject())}
    assert checks["gpus"].ok and "slowest" in checks["gpus"].remedy
    assert checks["memory of GPU 0"].ok and not checks["memory of GPU 1"].ok
    assert checks["gpu links"].ok and "2 of 2 pairs" in checks["gpu links"].found
    assert not checks["nccl"].ok


@pytest.mark.parametrize(
    ("capability", "triton", "ok"), [((9, 0), "3.6.0", False), ((9, 0), "3.7.1", True), ((8, 0), "3.6.0", True)]
)
def test_the_triton_that_compiles_the_gated_delta_rule_wrongly(monkeypatch, capability, triton, ok):
    installed = {"fla": object(), "tilelang": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    monkeypatch.setattr(software, "find_spec", installed.get)
    monkeypatch.setattr(software, "version_of", {"triton": triton, "flash-linear-attention": "0.6.0"}.get)
    (one,) = software._delta_rule_kernels()
    assert one.ok == ok and (ok or "tilelang" in one.remedy)
    installed["tilelang"] = object()
    (one,) = software._delta_rule_kernels()
    assert one.ok


def test_the_range_of_wrong_tritons():
    wrong = {v: software.is_miscompiled(v) for v in ("3.3.1", "3.4.0", "3.6.0", "3.7.0", "3.7.1", "4.0.0")}
    assert wrong == {"3.3.1": False, "3.4.0": True, "3.6.0": True, "3.7.0": True, "3.7.1": False, "4.0.0": False}
    assert not software.is_miscompiled(None)


def test_packages_that_are_missing_or_too_old(monkeypatch):
    monkeypatch.setattr(
        software.metadata, "requires", lambda name: ["torch>=99", "nothere>=1", 'absent>=1; extra == "x"']
    )
    told = {c.name: c for c in software._packages()}
    assert not told["package torch"].ok and 'pip install "torch>=99"' in told["package torch"].remedy
    assert told["package nothere"].found == "not installed"
    assert "package absent" not in told, "optional"


def test_an_examination_that_fails_hides_no_other(monkeypatch):
    def breaks(subject):
        raise OSError("the disk\nis gone")

    monkeypatch.setattr(devices, "examine", breaks)
    checks = {c.name: c for c in check.examine(Subject())}
    assert not checks[__name__.rpartition(".")[2]].ok
    assert "the disk is gone" in checks[__name__.rpartition(".")[2]].found
    assert checks["python"].ok and "folder of temporary files" in checks


def test_the_command_prints_names_and_remedies(tmp_path):
    command = [sys.executable, "-m", "longstraw_sdk.cli", "doctor", "--dataset", str(tmp_path / "x.jsonl"), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = json.loads(result.stdout)
    assert result.returncode == 1 and told["ok"] is False
    assert all(c.keys() == {"name", "ok", "found", "remedy"} for c in told["checks"])
    (one,) = [c for c in told["checks"] if not c["ok"]]
    assert one["name"] == "dataset" and one["remedy"]


@pytest.mark.parametrize(("gib", "fits"), [(141, True), (0.001, False)])
def test_the_longest_prompt_is_planned_where_there_are_gpus(model_folder, monkeypatch, gib, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    memory = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: memory)
    subject = Subject(model=str(model_folder), prompt_tokens=400, response_tokens=20, group=4)
    (one,) = planned.examine(subject)
    assert one.name == "memory plan" and one.ok == fits
    assert ("does not fit" in one.found) != fits and "400 prompt tokens, G=4" in one.found
    assert list(planned.examine(Subject(model=str(model_folder)))) == [], "lengths are not known"


def plan_file(tmp_path, **changes):
    given = {"node_ips": ["10.0.0.1", "10.0.0.2"], "gpus_per_node": 2, "runtime_image": "x/y@sha256:" + "ab" * 32}
    path = tmp_path / "plan.json"
    path.write_text(build_direct_ray_plan(run_id="r", **given | changes).to_json())
    return path


def record(ip, **changes):
    resources = {"CPU": 8.0, "GPU": 2.0, f"node:{ip}": 1.0, "mint2m_image_" + "ab" * 32: 1.0} | changes
    return {"NodeID": ip, "NodeManagerAddress": ip, "Alive": True, "Resources": resources}


@pytest.fixture
def cluster_of(monkeypatch):
    def use(*records):
        monkeypatch.setattr(RayRuntime, "connect", lambda *_: nullcontext(SimpleNamespace(nodes=lambda: records)))

    return use


def test_a_cluster_that_fits_its_plan(tmp_path, cluster_of):
    cluster_of(record("10.0.0.1"), record("10.0.0.2"))
    checks = list(placement.examine(Subject(placement_plan=plan_file(tmp_path))))
    assert [c.name for c in checks] == ["placement plan", "ray cluster", "ray node 10.0.0.1", "ray node 10.0.0.2"]
    assert all(c.ok for c in checks) and checks[0].found == "run r: 4 ranks on 2 nodes of 2 GPUs"


def test_a_node_that_is_not_what_the_plan_needs(tmp_path, cluster_of):
    cluster_of(record("10.0.0.1"), record("10.0.0.2", GPU=1.0, CPU=1.0))
    *sound, last = placement.examine(Subject(placement_plan=plan_file(tmp_path)))
    assert all(c.ok for c in sound)
    assert last.name == "ray node 10.0.0.2" and not last.ok and "1 GPUs" in last.found and "1 CPUs" in last.found


@pytest.mark.parametrize(
    ("change", "name", "told"),
    [
        (lambda path: path.unlink(), "placement plan", "No such file"),
        (lambda path: path.write_text("{}"), "placement plan", "no plan of format"),
        (lambda path: path.write_bytes(b"\xff"), "placement plan", "utf-8"),
        (lambda path: plan_file(path.parent, runtime_image=None), "placement plan", "a plan to look at"),
        (lambda path: None, "ray cluster", "no Ray cluster answers at '127.0.0.1:1'"),
    ],
)
def test_a_plan_or_cluster_that_cannot_be_used(tmp_path, change, name, told):
    path = plan_file(tmp_path)
    change(path)
    *_, last = placement.examine(Subject(placement_plan=path, ray_address="127.0.0.1:1"))
    assert last.name == name and not last.ok and told in last.found


def test_without_a_plan_no_cluster_is_asked(monkeypatch):
    monkeypatch.setattr(RayRuntime, "connect", lambda *_: pytest.fail("connected"))
    assert not list(placement.examine(Subject()))
