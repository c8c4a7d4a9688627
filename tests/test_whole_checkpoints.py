"""A checkpoint is resumed only if it was written to its end and is what was written."""

import json
import logging

import pytest
import torch
import trl_setup

from longstraw_sdk import ConfigurationError, InputError
from longstraw_sdk.evidence.manifest import MANIFEST, problems_of, read_manifest, write_manifest
from longstraw_sdk.trainers import grpo_trainer
from longstraw_sdk.trainers.whole_checkpoints import checkpoint_to_resume


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "checkpoint-3"
    (path / "ref").mkdir(parents=True)
    (path / "weights").write_bytes(b"\0" * 1000)
    (path / "ref" / "state.json").write_text("{}")
    (path / "empty").touch()
    write_manifest(path, {"global_step": 3})
    return path


def test_a_manifest_lists_every_file(folder):
    assert problems_of(folder) == []
    found = read_manifest(folder)
    assert sorted(found["files"]) == ["empty", "ref/state.json", "weights"]
    assert found["files"]["weights"]["bytes"] == 1000 and found["facts"] == {"global_step": 3}
    write_manifest(folder, {})
    assert problems_of(folder) == [], "written again it lists neither itself nor what is left of an unfinished one"


def changed(folder):
    (folder / "weights").write_bytes(b"\0" * 999 + b"\1")


def truncated(folder):
    (folder / "weights").write_bytes(b"\0" * 999)


def linked(folder):
    (folder / "weights").rename(folder.parent / "weights")
    (folder / "weights").symlink_to(folder.parent / "weights")


def linked_folder(folder):
    (folder / "ref").rename(folder.parent / "ref")
    (folder / "ref").symlink_to(folder.parent / "ref")


def outside(folder):
    listed = json.loads((folder / MANIFEST).read_text())
    listed["files"]["../weights"] = listed["files"].pop("weights")
    (folder / "weights").rename(folder.parent / "weights")
    (folder / MANIFEST).write_text(json.dumps(listed))


DAMAGE = {
    "weights is not what was written": [changed, truncated],
    "ref/state.json is missing": [lambda f: (f / "ref" / "state.json").unlink()],
    "optimizer.bin is not in the manifest": [lambda f: (f / "optimizer.bin").touch()],
    "is a symbolic link": [linked, linked_folder],
    "outside of the folder": [outside],
    "has no checkpoint-manifest.json": [lambda f: (f / MANIFEST).unlink()],
    "is not JSON": [lambda f: (f / MANIFEST).write_text("{"), lambda f: (f / MANIFEST).write_bytes(b"\xff")],
    "is not a manifest of format 1": [
        lambda f: (f / MANIFEST).write_text("[]"),
        lambda f: (f / MANIFEST).write_text('{"format": 2, "files": {}}'),
    ],
}


@pytest.mark.parametrize(("told", "damage"), [(told, damage) for told, kinds in DAMAGE.items() for damage in kinds])
def test_every_damage_is_told(folder, told, damage):
    damage(folder)
    (problem,) = problems_of(folder)
    assert told in problem


def test_a_note_may_be_added_later(folder):
    (folder / "evaluation.json").write_text("{}")
    assert problems_of(folder) == []


def test_a_link_is_refused_when_the_manifest_is_written(folder):
    (folder / "link").symlink_to(folder / "weights")
    with pytest.raises(InputError, match="symbolic link"):
        write_manifest(folder, {})


def test_what_may_be_resumed(folder, caplog):
    root = folder.parent
    assert checkpoint_to_resume(None, str(root)) is None and checkpoint_to_resume(False, str(root)) is None
    assert checkpoint_to_resume(True, str(root)) == checkpoint_to_resume(str(folder), str(root)) == str(folder)
    with pytest.raises(ConfigurationError, match="is no folder"):
        checkpoint_to_resume(str(root / "none"), str(root))
    with pytest.raises(ConfigurationError, match="holds no whole checkpoint; name"):
        checkpoint_to_resume(True, str(root / "none"))
    (root / "checkpoint-20").mkdir()
    (root / "checkpoint-x").mkdir()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(True, str(root)) == str(folder)
    assert "checkpoint-20 is left out" in caplog.text
    changed(folder)
    with pytest.raises(ConfigurationError, match="not a whole checkpoint: weights is not what was written"):
        checkpoint_to_resume(str(folder), str(root))
    with pytest.raises(ConfigurationError, match=r"no whole checkpoint \(checkpoint-20: .*; checkpoint-3: weights"):
        checkpoint_to_resume(True, str(root))


def test_a_checkpoint_of_another_trainer_is_taken_with_a_warning(folder, caplog):
    (folder / MANIFEST).unlink()
    assert checkpoint_to_resume(str(folder), "") == str(folder)
    assert "is not checked" in caplog.text
    (folder / "longstraw_rollouts.safetensors").touch()  # but not one that this trainer did not finish
    with pytest.raises(ConfigurationError, match="was not written to its end"):
        checkpoint_to_resume(str(folder), "")


class Killed(BaseException):
    pass


SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 4}


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("save_rollouts", marks=pytest.mark.slow),
        "write_manifest",
        pytest.param("rotate_checkpoints", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_dies_while_it_saves_goes_on_from_a_whole_checkpoint(tmp_path, monkeypatch, stage):
    unbroken = trl_setup.our_trainer(tmp_path / "a", **SAVING)
    unbroken.train()
    kept = [path.name for path in sorted((tmp_path / "a").glob("checkpoint-*"))]
    assert kept == ["checkpoint-4"] and read_manifest(tmp_path / "a" / kept[0])["facts"]["global_step"] == 4

    stock, calls = getattr(grpo_trainer, stage), []

    def dies(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise Killed
        return stock(*args, **kwargs)

    monkeypatch.setattr(grpo_trainer, stage, dies)
    with pytest.raises(Killed):
        trl_setup.our_trainer(tmp_path / "b", **SAVING).train()
    monkeypatch.undo()
    whole = [path.name for path in sorted((tmp_path / "b").glob("checkpoint-*")) if not problems_of(path)]
    assert whole == (["checkpoint-2", "checkpoint-3"] if stage == "rotate_checkpoints" else ["checkpoint-2"])
    resumed = trl_setup.our_trainer(tmp_path / "b", **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(trl_setup.lora(resumed.model), trl_setup.lora(unbroken.model))
