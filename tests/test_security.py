"""What comes from others is data: nothing in it runs, leads out of its folder, or carries a secret away."""

import ast
import logging
import pickle
from pathlib import Path

import pytest
import torch
import trl_setup
from completion_server import completion_server

from longstraw_sdk import InputError
from longstraw_sdk.evidence.artifacts import inside
from longstraw_sdk.evidence.manifest import MANIFEST, problems_of, write_manifest
from longstraw_sdk.evidence.verify import verify_run
from longstraw_sdk.rollout import HttpSampler

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for top in ("longstraw_sdk", "trainers", "models") for path in (ROOT / top).rglob("*.py"))
OPTIONS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "gradient_accumulation_steps": 1}

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen", "yaml.load"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def faults_of(text):
    """Calls and imports that run what they read."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                yield ast.unparse(node.func)
            if any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords):
                yield "shell=True"
            if any(k.arg == "weights_only" and ast.unparse(k.value) == "False" for k in node.keywords):
                yield "weights_only=False"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        yield from (name for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)


def test_no_module_runs_what_it_reads():
    assert len(SOURCES) > 150
    found = {str(path.relative_to(ROOT)): faults for path in SOURCES if (faults := list(faults_of(path.read_text())))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "x = torch.load(p)",
        "eval(s)",
        "run(c, shell=True)",
        "load(p, weights_only=False)",
    ],
)
def test_control_such_a_module_is_found(text):
    assert list(faults_of(text))


class Payload:
    """Makes the file `mark` when it is unpickled without restrictions."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trl_setup.our_trainer(folder, **OPTIONS).train()
    return folder / "checkpoint-1"


def copied(checkpoint, folder):
    copy = folder / checkpoint.name
    copy.mkdir(parents=True)
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_control_the_payload_runs_where_nothing_restricts_it(tmp_path):
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_a_pickle_in_a_checkpoint_does_not_run(tmp_path, checkpoint, name):
    """Its manifest says that all is well: whoever made the checkpoint wrote that, too."""
    copy, mark = copied(checkpoint, tmp_path), tmp_path / "ran"
    torch.save({"state": Payload(mark), "cpu": Payload(mark)}, copy / name)
    (copy / MANIFEST).unlink()
    write_manifest(copy, {})
    assert problems_of(copy) == []
    trainer = trl_setup.our_trainer(tmp_path / "out", **(OPTIONS | {"max_steps": 2}))
    if name == "training_args.bin":  # which nobody reads
        trainer.train(resume_from_checkpoint=str(copy))
    else:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            trainer.train(resume_from_checkpoint=str(copy))
    assert not mark.exists()


def test_an_adapter_that_is_a_pickle_does_not_run(tmp_path, checkpoint):
    copy, mark = copied(checkpoint, tmp_path), tmp_path / "ran"
    (copy / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.x.lora_A.weight": Payload(mark)}, copy / "adapter_model.bin")
    (copy / MANIFEST).unlink()
    write_manifest(copy, {})
    trainer = trl_setup.our_trainer(tmp_path / "out", **(OPTIONS | {"max_steps": 2}))
    with pytest.raises(Exception, match=r"Weights only load failed|adapter_model\.safetensors"):
        trainer.train(resume_from_checkpoint=str(copy))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "a/../../outside.json"])
def test_names_do_not_lead_out_of_a_folder(tmp_path, name):
    with pytest.raises(InputError, match="leads out of"):
        inside(tmp_path / "run", name)
    assert inside(tmp_path / "run", "a/../b.json")


def test_links_do_not_lead_out_of_a_run(tmp_path, checkpoint):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    copy = copied(checkpoint, tmp_path)
    (copy / "link.json").symlink_to(secret)
    assert "symbolic link" in "; ".join(problems_of(copy))
    rollouts = checkpoint.parent / "run" / "rollouts"
    first = min(rollouts.glob("*.json"))
    content = first.read_bytes()
    first.unlink()
    first.symlink_to(secret)
    with pytest.raises(InputError, match="leads out of"):
        verify_run(checkpoint.parent)
    first.unlink()
    first.write_bytes(content)
    assert verify_run(checkpoint.parent)


def test_secrets_reach_neither_files_nor_logs(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("SAMPLER_KEY", "secret-of-the-sampler")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-environment")
    caplog.set_level(logging.DEBUG, "longstraw_sdk")
    with completion_server() as served:
        sampler = HttpSampler(served.url, api_key_variable="SAMPLER_KEY")
        trainer = trl_setup.our_trainer(
            tmp_path, sampler=sampler, hub_token="secret-of-the-hub", **(OPTIONS | {"learning_rate": 0.0})
        )
        trainer.train()
        assert any("secret-of-the-sampler" in str(headers) for headers in served.headers), "it was sent"
    out, err = capfd.readouterr()
    said = caplog.text + out + err
    read = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(read) > 10
    for secret in ("secret-of-the-sampler", "secret-of-the-environment"):
        assert secret not in said
        assert [path for path, data in read.items() if secret.encode() in data] == []
    holding = {path.name for path, data in read.items() if b"secret-of-the-hub" in data}
    assert holding == {"training_args.bin"}, "where transformers writes its arguments as they are"
    assert "secret-of-the-hub" not in said
