"""Placement without Ray: plan, cluster faults, journal, reports, checkpoints, and a driver on a cluster in memory."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from ray_cases import advantages, groups, loss, new_model

from longstraw_sdk import (
    ConfigurationError,
    InputError,
    LifecycleError,
    NumericsError,
    PlacementError,
    RankLostError,
)
from longstraw_sdk.evidence.journal import read_journal
from longstraw_sdk.placement import (
    DirectRayDriver,
    DirectRayPlan,
    PromptGroup,
    RankProgram,
    build_direct_ray_plan,
    validate_cluster,
)
from longstraw_sdk.placement.checkpoint import (
    pack_state,
    prune_checkpoints,
    read_checkpoint,
    unpack_state,
    write_checkpoint,
)
from longstraw_sdk.placement.cleanup import clean_up
from longstraw_sdk.placement.ownership import OWNERSHIP, OwnershipJournal
from longstraw_sdk.placement.report import check_places, check_reports
from longstraw_sdk.placement.runtime import Actors, RayRuntime, Release, _raise

DIGEST = "0123456789abcdef" * 4
IMAGE = f"registry.example:5000/team/longstraw@sha256:{DIGEST}"
RESOURCE = f"mint2m_image_{DIGEST}"
IPS = ["10.0.0.1", "10.0.0.2"]


def plan_of(**changes):
    return build_direct_ray_plan(
        **{"run_id": "first", "node_ips": IPS, "gpus_per_node": 2, "runtime_image": IMAGE} | changes
    )


def program_of(**changes):
    return RankProgram(
        **{"model": "ray_cases:new_model", "loss": "ray_cases:loss", "context_parallel_size": 2} | changes
    )


# --- plan ---


def test_a_plan_says_at_the_top_where_and_in_what_it_runs():
    found = json.loads(plan_of().to_json())
    assert found["node_ips"] == IPS and found["gpus_per_node"] == 2
    assert found["runtime_image"] == IMAGE and found["image_resource"] == RESOURCE


def test_bundles_and_actors_are_bound_to_node_and_image():
    plan = plan_of()
    assert plan.bundles == (
        {"CPU": 2.0, "GPU": 2.0, "node:10.0.0.1": 0.003, RESOURCE: 0.003},
        {"CPU": 2.0, "GPU": 2.0, "node:10.0.0.2": 0.002, RESOURCE: 0.002},
    )
    assert [(r.rank, r.node_ip, r.slot, r.bundle) for r in plan.ranks] == [
        (0, IPS[0], 0, 0), (1, IPS[0], 1, 0), (2, IPS[1], 0, 1), (3, IPS[1], 1, 1),
    ]  # fmt: skip
    actors = (plan.coordinator, *plan.ranks)
    assert all(a.resources == {f"node:{a.node_ip}": 0.001, RESOURCE: 0.001} for a in actors)
    for i, bundle in enumerate(plan.bundles):
        inside = [a for a in actors if a.bundle == i]
        assert sum(a.num_gpus for a in inside) == bundle["GPU"] and sum(a.num_cpus for a in inside) == bundle["CPU"]
        for name in (f"node:{IPS[i]}", RESOURCE):
            assert sum(a.resources[name] for a in inside) == pytest.approx(bundle[name], abs=1e-9), "they fit"
    assert len({a.name for a in actors}) == len(actors)
    assert all(a.name.startswith(plan.prefix) and "first" in plan.prefix for a in actors)


def test_no_run_takes_names_of_another():
    assert not plan_of(run_id="a-rank-0").group_name.startswith(plan_of(run_id="a").prefix)


@pytest.mark.parametrize("image", [IMAGE, None])
def test_a_plan_is_the_same_text_every_time_and_is_read_back(image):
    text = plan_of(runtime_image=image).to_json()
    assert text == plan_of(runtime_image=image).to_json()
    assert DirectRayPlan.from_json(text) == plan_of(runtime_image=image)
    assert DirectRayPlan.from_json(text).to_json() == text


def test_a_plan_to_look_at_has_no_image():
    plan = plan_of(runtime_image=None)
    assert plan.image_resource is None
    assert all("mint2m" not in name for bundle in plan.bundles for name in bundle)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"runtime_image": "team/longstraw:latest"}, "digest"),
        ({"runtime_image": f"team/longstraw:v1@sha256:{DIGEST[:-1]}"}, "64 hex"),
        ({"runtime_image": f"team/longstraw@sha256:{DIGEST.upper()}"}, "64 hex"),
        ({"runtime_image": f"sha256:{DIGEST}"}, "repository@sha256"),
        ({"runtime_image": f"team/longstraw@sha256:{DIGEST}\n"}, "repository@sha256"),
        ({"node_ips": []}, "at least one address"),
        ({"node_ips": "10.0.0.1"}, "list"),
        ({"node_ips": ["node-1"]}, "not its name"),
        ({"node_ips": ["10.0.0.1", "10.0.0.01"]}, "10.0.0.01"),
        ({"node_ips": ["10.0.0.1", "10.0.0.1"]}, "more than once"),
        ({"gpus_per_node": 0}, "at least 1"),
        ({"gpus_per_node": 2.0}, "integer"),
        ({"gpus_per_node": True}, "integer"),
        ({"gpus_per_node": 10000}, "512"),
        ({"run_id": "../x"}, "run_id"),
        ({"run_id": ""}, "run_id"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, told):
    with pytest.raises(ConfigurationError, match=told):
        plan_of(**changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["ranks"][1].update(node_ip="10.0.0.2"),
        lambda p: p["ranks"].pop(),
        lambda p: p["placement_group"]["bundles"][0].pop(RESOURCE),
        lambda p: p["coordinator"]["resources"].update({RESOURCE: 0}),
        lambda p: p.update(image_resource="mint2m_image_" + "0" * 64),
        lambda p: p.update(image_resource=None),
        lambda p: p.update(gpus_per_node=1),
        lambda p: p.update(gpus_per_node=True),
        lambda p: p.update(node_ips=["10.0.0.1", "nowhere"]),
        lambda p: p.update(extra=1),
        lambda p: p.update(format=2),
        lambda p: p.pop("runtime_image"),
        lambda p: p.pop("ranks"),
    ],
)
def test_a_plan_that_was_edited_is_refused(change):
    content = json.loads(plan_of().to_json())
    change(content)
    with pytest.raises(InputError, match="plan"):
        DirectRayPlan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InputError, match="no plan"):
        DirectRayPlan.from_json(text)


# --- the cluster ---


def record(ip, alive=True, **changes):
    resources = {"CPU": 2.0, "GPU": 2.0, f"node:{ip}": 1.0, RESOURCE: 1.0, "memory": 1e9} | changes
    return {
        "NodeID": f"id of {ip}",
        "NodeManagerAddress": ip,
        "Alive": alive,
        "Resources": {name: amount for name, amount in resources.items() if amount is not None},
    }


def sound():
    return [record(ip) for ip in IPS]


def test_a_cluster_that_fits_passes_beside_nodes_of_others_and_records_of_the_dead():
    extra = [record("10.0.0.9", GPU=None, **{RESOURCE: None}), record(IPS[0], alive=False)]
    facts = validate_cluster(plan_of(), [*extra, *sound()])
    assert facts.node_ids(plan_of()) == {ip: f"id of {ip}" for ip in IPS}
    validate_cluster(plan_of(), [record(ip, CPU=64.0, GPU=8.0) for ip in IPS])


FAULTS = {
    "no node": ([], ["no live Ray node (no node was ever there); live are 10.0.0.1"]),
    "dead node": ([record(IPS[1], alive=False)], ["its 1 earlier records are dead"]),
    "two nodes": ([record(IPS[1]), record(IPS[1])], ["2 live Ray nodes"]),
    "few GPUs": ([record(IPS[1], GPU=1.0)], ["1 GPUs, but"]),
    "no GPUs": ([record(IPS[1], GPU=None)], ["0 GPUs, but"]),
    "few CPUs": ([record(IPS[1], CPU=1.0)], ["1 CPUs, but"]),
    "no node resource": ([record(IPS[1], **{f"node:{IPS[1]}": None})], ["'node:10.0.0.2'"]),
    "no image": ([record(IPS[1], **{RESOURCE: None})], ["declares no image"]),
    "other image": (
        [record(IPS[1], **{RESOURCE: None, "mint2m_image_" + "f" * 64: 1.0})],
        ["declares mint2m_image_" + "f" * 64],
    ),
    "too little of the image": ([record(IPS[1], **{RESOURCE: 0.0005})], [repr(RESOURCE)]),
    "all of them": (
        [record(IPS[1], GPU=0.0, CPU=0.0, **{f"node:{IPS[1]}": None, RESOURCE: None})],
        ["0 GPUs", "0 CPUs", "'node:10.0.0.2'", "declares no image"],
    ),
}


@pytest.mark.parametrize(("records", "told"), FAULTS.values(), ids=FAULTS)
def test_every_fault_is_listed(records, told):
    with pytest.raises(PlacementError) as error:
        validate_cluster(plan_of(), [record(IPS[0]), *records])
    text = str(error.value)
    assert all(line in text for line in told)
    assert text.count("\n- 10.0.0.2: ") == len(told) and "\n- 10.0.0.1: " not in text


def test_faults_of_all_nodes_are_listed_at_once():
    with pytest.raises(PlacementError, match="2 faults") as error:
        validate_cluster(plan_of(), [record(IPS[0], GPU=1.0)])
    assert "10.0.0.1: 1 GPUs" in str(error.value) and "10.0.0.2: no live" in str(error.value)


def test_a_plan_to_look_at_is_not_validated():
    with pytest.raises(ConfigurationError, match="to look at"):
        validate_cluster(plan_of(runtime_image=None), sound())


# --- the program ---


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "ray_cases.new_model"}, "module:function"),
        ({"loss": loss}, "module:function"),
        ({"optimizer": "a:b; import os"}, "module:function"),
        ({"session": {"backend": "local"}}, "session has backend"),
        ({"session": {"chunk": 1}}, "allowed: chunk_tokens"),
        ({"model_arguments": {"x": object()}}, "JSON"),
        ({"model_arguments": {"x": (1, 2)}}, "JSON"),
        ({"optimizer_arguments": {"lr": float("nan")}}, "JSON"),
        ({"context_parallel_size": 0}, "at least 1"),
        ({"expert_parallel_size": 4}, "must divide"),
    ],
)
def test_programs_that_cannot_be_sent_are_refused(changes, told):
    with pytest.raises(ConfigurationError, match=told):
        program_of(**changes)


def test_a_group_has_responses_or_draws_them():
    for given in ({}, {"responses": ((1,),), "n_samples": 1, "max_new_tokens": 1}, {"n_samples": 2}):
        with pytest.raises(InputError):
            PromptGroup(prompt_ids=(1, 2), **given)


# --- the journal ---


def test_what_is_owned_follows_from_the_journal(tmp_path):
    with OwnershipJournal(tmp_path) as journal:
        journal.begin(plan_of(), program_of())
        assert not journal.owned
        names = journal.own(plan_of())
        assert not journal.owned, "drawn, not written"
        assert names != journal.own(plan_of()), "no attempt takes names of another"
        journal.write("creating_group", group=names.group)
        assert journal.owned.group == names.group and not journal.owned.actors
        journal.write("creating_actors", actors=list(names.actors))
        for state in ("actors_created", "running", "failed", "releasing"):
            journal.write(state)
            assert journal.owned == names
    with OwnershipJournal(tmp_path) as journal:
        assert journal.owned == names
        journal.write("released")
        assert not journal.owned


def test_a_run_has_one_driver(tmp_path):
    with OwnershipJournal(tmp_path / "first") as journal:
        journal.begin(plan_of(), program_of())
        with pytest.raises(LifecycleError, match="is alive"):
            OwnershipJournal(tmp_path / "first")
        with pytest.raises(LifecycleError, match="is alive"):
            clean_up(tmp_path, "first")
    OwnershipJournal(tmp_path / "first").close()


def test_a_run_goes_on_with_its_own_program_also_on_other_nodes(tmp_path):
    with OwnershipJournal(tmp_path) as journal:
        for plan in (plan_of(), plan_of(), plan_of(node_ips=["10.0.0.1", "10.0.0.7"]), plan_of()):
            journal.begin(plan, program_of())
        assert [e["stage"] for e in journal.entries] == ["planned"] * 3
        with pytest.raises(InputError, match="another program"):
            journal.begin(plan_of(), program_of(max_grad_norm=1.0))


# --- reports ---


def places():
    return [
        {"node_id": f"id of {r.node_ip}", "node_ip": r.node_ip, "accelerators": [str(r.slot)]} for r in plan_of().ranks
    ]


NODE_IDS = {ip: f"id of {ip}" for ip in IPS}


@pytest.mark.parametrize(
    ("rank", "changes", "told"),
    [
        (2, {"node_id": "id of 10.0.0.1"}, ["rank 2 runs on node", "10.0.0.1 holds the slots [0, 0, 1]"]),
        (2, {"node_ip": "10.0.0.7"}, ["rank 2 calls its address 10.0.0.7"]),
        (1, {"accelerators": ["0"]}, ["ranks 0 and 1 share accelerator 0"]),
        (1, {"accelerators": []}, ["rank 1 has 0 accelerators"]),
        (3, {"accelerators": ["1", "2"]}, ["rank 3 has 2 accelerators"]),
    ],
)
def test_ranks_must_be_where_they_were_planned(rank, changes, told):
    check_places(plan_of(), NODE_IDS, places())
    found = places()
    found[rank].update(changes)
    with pytest.raises(PlacementError) as error:
        check_places(plan_of(), NODE_IDS, found)
    assert all(line in str(error.value) for line in told)


def reports(uuids=(None, None)):
    phases = [{"phase": "capture", "update": 0, "ok": True}, {"phase": "replay", "update": 0, "ok": True}]
    return [{"phases": [dict(p) for p in phases], "observed": {"uuid": uuid}} for uuid in uuids]


ASKED = [[("capture", 0), ("replay", 0)]] * 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r[1]["phases"].pop(), "rank 1 differs from what it was asked for at phase 1"),
        (lambda r: r[1]["phases"].reverse(), "at phase 0"),
        (lambda r: r[0]["phases"][1].update(update=1), "rank 0 differs from what it was asked for at phase 1"),
        (lambda r: r[0]["phases"].append({"phase": "step", "update": 0, "ok": True}), "at phase 2"),
        (lambda r: r[0]["phases"][1].update(ok=False), "rank 0 did not finish replay"),
        (lambda r: [x["observed"].update(uuid="GPU-1") for x in r], "the same accelerator"),
    ],
)
def test_ranks_must_do_what_they_were_asked(change, told):
    check_reports(ASKED, reports())
    check_reports(ASKED, reports(("GPU-1", "GPU-2")))
    found = reports()
    change(found)
    with pytest.raises(PlacementError, match=told):
        check_reports(ASKED, found)


# --- checkpoints ---


def stepped(optimizer_class, n_steps, state=None, **options):
    """A model and its optimizer after steps on gradients that depend on the step."""
    torch.manual_seed(0)
    model = new_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_class(trained, **options)
    if state is not None:
        unpack_state(model, optimizer, state)
    for i in range(*n_steps):
        for j, p in enumerate(trained):
            p.grad = torch.full_like(p, (i + 1) * (-1) ** j)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(p):
    return True


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_state_as_if_it_had_not_stopped(optimizer, options):
    through, _ = stepped(optimizer, (0, 4), **options)
    half = pack_state(*stepped(optimizer, (0, 2), **options), everything)
    resumed, its_optimizer = stepped(optimizer, (2, 4), half, **options)
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), resumed.parameters(), strict=True))
    without, _ = stepped(optimizer, (2, 4), **options)
    assert not all(torch.equal(a, b) for a, b in zip(through.parameters(), without.parameters(), strict=True))
    assert its_optimizer.param_groups[0]["lr"] == 0.01


def test_parts_of_a_state_make_the_whole():
    model, optimizer = stepped(torch.optim.AdamW, (0, 2), lr=0.01)
    small = {p for p in model.parameters() if p.numel() < 100}
    parts = [pack_state(model, optimizer, taken) for taken in (small.__contains__, lambda p: p not in small)]
    assert 0 < len(parts[0]) < len(parts[1])
    other = new_model()
    its_optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.5)
    for part in parts:
        unpack_state(other, its_optimizer, part)
    assert pack_state(other, its_optimizer, everything) == pack_state(model, optimizer, everything)


def test_settings_of_the_optimizer_are_kept():
    model, optimizer = stepped(torch.optim.AdamW, (0, 1), lr=0.01, betas=(0.8, 0.9))
    optimizer.param_groups[0]["lr"] = 0.001
    state = pack_state(model, optimizer, everything)
    _, resumed = stepped(torch.optim.AdamW, (0, 0), state, lr=0.01)
    assert resumed.param_groups[0]["lr"] == 0.001 and resumed.param_groups[0]["betas"] == (0.8, 0.9)


def test_an_optimizer_that_keeps_other_things_is_refused():
    model, optimizer = stepped(torch.optim.AdamW, (0, 1), lr=0.01)
    optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(ConfigurationError, match="another optimizer"):
        pack_state(model, optimizer, everything)


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    model, optimizer = stepped(torch.optim.AdamW, (0, 1), lr=0.01)
    state = pack_state(model, optimizer, everything)
    other = new_model()
    name, weight = next((n, p) for n, p in other.named_parameters() if p.requires_grad)
    weight.data = weight.data.float()
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(InputError, match=name.split(".")[-3]):
        unpack_state(other, torch.optim.AdamW([p for p in other.parameters() if p.requires_grad]), state)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_a_checkpoint_is_whole_or_refused(tmp_path):
    from longstraw_sdk.evidence.artifacts import file_sha256
    from longstraw_sdk.evidence.manifest import MANIFEST

    states = {"adapter.safetensors": b"abc", "experts-1.safetensors": b"d"}
    (tmp_path / ".update-000003").mkdir()
    (tmp_path / ".update-000003" / "left over").touch()
    (tmp_path / "update-000003").mkdir()
    folder = write_checkpoint(tmp_path, 3, states, {})
    sha256 = file_sha256(folder / MANIFEST)
    assert read_checkpoint(folder, sha256) == states
    assert [p.name for p in tmp_path.iterdir()] == ["update-000003"]
    with pytest.raises(InputError, match="not the checkpoint that its journal names"):
        read_checkpoint(folder, "0" * 64)
    (folder / "adapter.safetensors").write_bytes(b"abd")
    with pytest.raises(InputError, match=r"adapter\.safetensors is not what was written"):
        read_checkpoint(folder, sha256)


def test_the_last_two_checkpoints_stay(tmp_path):
    for update in range(8, 13):
        write_checkpoint(tmp_path, update, {}, {})
        prune_checkpoints(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000011", "update-000012"]


# --- which error is told ---


def task_error(cause):
    error = RuntimeError("of Ray")
    error.cause = cause
    return error


HELD_BACK = task_error(LifecycleError("another rank refused"))
DEAD = RuntimeError("the actor died\nat length")


@pytest.mark.parametrize(
    ("failed", "lost", "silent", "kind", "told"),
    [
        ({}, {"rank 1": DEAD}, [], RankLostError, "rank 1 died in replay"),
        ({"rank 0": task_error(OSError("reset"))}, {"rank 1": DEAD}, [], RankLostError, "rank 1 died"),
        ({"rank 0": task_error(OSError("reset"))}, {}, ["rank 1"], RankLostError, "rank 1 did not answer .* reset"),
        ({"rank 0": HELD_BACK, "rank 1": task_error(InputError("bad id"))}, {}, [], InputError, "bad id"),
        ({"rank 0": task_error(InputError("bad id"))}, {}, ["rank 1"], InputError, "bad id"),
        ({"rank 0": task_error(KeyError("x"))}, {}, [], PlacementError, "rank 0 failed in replay: KeyError"),
        ({}, {}, ["rank 0", "rank 1"], PlacementError, "rank 0, rank 1 did not answer in replay within 5 s"),
    ],
)
def test_the_error_that_explains_the_others_is_told(failed, lost, silent, kind, told):
    with pytest.raises(kind, match=told) as error:
        _raise("replay", failed, lost, silent, 5.0)
    assert type(error.value) is kind
    _raise("replay", {}, {}, [], 5.0)


# --- a driver on a cluster in memory ---


class Killed(BaseException):
    """The driver's process ends here."""


class Cluster:
    """What a runtime creates, as long as it exists; `fault` raises once, in the phase or call that it names."""

    def __init__(self):
        self.things = {"placement group of others"}
        self.fault = None
        self.journal_path = None
        self.calls = []
        self.sticky = set()
        self.leaks = []

    def records(self):
        return [record(ip) for ip in IPS]

    def owned_in_journal(self):
        entries, _ = read_journal(self.journal_path)
        return {n for e in entries for n in [e.get("group"), *(e.get("actors") or [])] if n}

    def create(self, name):
        assert name in self.owned_in_journal(), f"{name} is created before the journal owns it"
        assert name not in self.things
        self.things.add(name)

    def trip(self, where):
        self.calls.append(where)
        if self.fault is not None and self.fault[0] == where:
            error, self.fault = self.fault[1], None
            raise error


class Remote:
    def __init__(self, actor, phase):
        self.actor, self.phase = actor, phase

    def remote(self, *args, **options):
        return self.actor, self.phase, args, options


class Actor:
    """Answers as a rank whose adapter is the number of steps that it took."""

    def __init__(self, cluster, name, place=None):
        self._cluster, self._name, self._place = cluster, name, place
        self._phases, self._steps = [], 0

    def __getattr__(self, phase):
        if phase.startswith("__"):
            raise AttributeError(phase)
        return Remote(self, phase)

    def answer(self, phase, args, options):
        assert self._name in self._cluster.things, "it is asked while it exists"
        if phase in ("place", "listen", "close"):
            return {"place": self._place, "listen": 1234, "close": self._cluster.leaks}[phase]
        if phase == "report":
            phases, self._phases = self._phases, []
            return {"phases": phases, "observed": {"uuid": None}}
        if phase == "open":
            environment, program, self._steps, states = args
            assert environment["MASTER_PORT"] == "1234"
            kept = ["shared"] + [f"experts {int(environment['RANK']) % 2}"] * (program.expert_parallel_size > 1)
            assert states == ([f"{what} {self._steps}".encode() for what in kept] if self._steps else [])
        self._phases.append({"phase": phase, "update": self._steps, "ok": True})
        if phase == "finalize":
            return {"gradient": {"sha256": f"gradient {self._steps}", "norm": 1.0}, "reductions": []}
        if phase == "step":
            self._steps += 1
            return f"adapter {self._steps}"
        if phase == "state":
            rank = self._name.split(":")[-1].split("-")[1]
            return f"{'shared' if options['shared'] else f'experts {rank}'} {self._steps}".encode()
        return [[1, 2]] * 2 if phase == "sample" else None


class MemoryRuntime:
    def __init__(self, cluster):
        self.cluster = cluster

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def validate_cluster(self, plan):
        return validate_cluster(plan, self.cluster.records())

    def create_group(self, plan, name, timeout_s):
        self.cluster.trip("before create_group")
        self.cluster.create(name)
        self.cluster.trip("create_group")
        return "group id"

    def create_actors(self, plan, names):
        self.cluster.trip("before create_actors")
        found = []
        for spec, place in zip((plan.coordinator, *plan.ranks), [places()[0], *places()], strict=True):
            self.cluster.create(names[spec.name])
            self.cluster.trip("create_actors")
            found.append(Actor(self.cluster, names[spec.name], place))
        return Actors(found[0], tuple(found[1:]))

    def call(self, calls, what, timeout_s, grace_s=30.0):
        self.cluster.trip(what)
        return {name: actor.answer(*given) for name, (actor, *given) in calls.items()}

    def release(self, owned, run_id, timeout_s):
        names = {owned.group, *owned.actors} - {None}
        assert names <= self.cluster.owned_in_journal()
        kept = names & self.cluster.things & self.cluster.sticky
        gone = names & self.cluster.things - kept
        self.cluster.things -= gone
        return Release(sorted(gone), sorted(names - gone - kept), sorted(kept), sorted(self.cluster.things - kept))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    cluster = Cluster()
    cluster.journal_path = tmp_path / "first" / OWNERSHIP

    def connect(cls, address="auto", timeout_s=60.0):
        cluster.trip("connect")
        return MemoryRuntime(cluster)

    monkeypatch.setattr(RayRuntime, "connect", classmethod(connect))
    return cluster


def driver_on(tmp_path, **options):
    given = {"groups": lambda n: [*groups(1)], "advantages": advantages} | options
    return DirectRayDriver(plan_of(), program_of(), tmp_path, **given)


def states_of(tmp_path):
    return [e["stage"] for e in read_journal(tmp_path / "first" / OWNERSHIP)[0]]


ALL_STATES = [
    "planned", "connecting", "validated", "creating_group", "group_created", "creating_actors", "actors_created",
    "running", "closed", "closed", "ranks_closed", "releasing", "released", "ended",
]  # fmt: skip


def test_a_run_goes_through_its_states_and_leaves_nothing(tmp_path, cluster):
    result = driver_on(tmp_path).run(2)
    assert states_of(tmp_path) == ALL_STATES
    assert result.n_closed == 2 and result.n_lost == 0
    assert (result.checkpoint / "adapter.safetensors").read_bytes() == b"shared 2"
    assert cluster.things == {"placement group of others"}
    sessions = json.loads((tmp_path / "first" / "artifacts" / "rank-sessions.json").read_text())["ranks"]
    assert [r["planned"]["local_rank"] for r in sessions] == [0, 1, 0, 1]
    manifest = json.loads((tmp_path / "first" / "artifacts" / "checkpoint-manifest.json").read_text())
    assert manifest["checkpoint"] == "update-000002" and "adapter.safetensors" in manifest["files"]


def test_a_run_that_ended_is_not_run_again_and_may_be_longer(tmp_path, cluster):
    driver_on(tmp_path).run(1)
    n_calls = len(cluster.calls)
    assert driver_on(tmp_path).run(1).n_closed == 1
    assert len(cluster.calls) == n_calls and states_of(tmp_path)[-1] == "ended"
    result = driver_on(tmp_path).run(3)
    assert (result.checkpoint / "adapter.safetensors").read_bytes() == b"shared 3"


def test_experts_of_each_rank_go_back_to_those_that_hold_them(tmp_path, cluster):
    options = {"groups": lambda n: groups(1), "advantages": advantages}
    for n_updates in (1, 2):
        driver = DirectRayDriver(plan_of(), program_of(expert_parallel_size=2), tmp_path, **options)
        checkpoint = driver.run(n_updates).checkpoint
    found = {path.stem: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    assert found == {"adapter": b"shared 2", "experts-0": b"experts 0 2", "experts-1": b"experts 1 2"}


def test_a_driver_that_is_terminated_leaves_nothing(tmp_path, cluster):
    def terminated(n_closed):
        os.kill(os.getpid(), signal.SIGTERM)
        return groups(1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        driver_on(tmp_path, groups=terminated).run(1)
    assert error.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert states_of(tmp_path)[-2:] == ["releasing", "released"] and cluster.things == {"placement group of others"}


FAILURES = [
    "before create_group", "create_group", "before create_actors", "create_actors", "its start", "listen",
    "open of update 0", "capture of update 0", "sample of update 0", "score of update 0", "replay of update 0",
    "sweep of update 0", "finalize of update 0", "step of update 0", "state of update 1", "report of update 1",
    "replay of update 1", "close of update 2",
]  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
@pytest.mark.parametrize("where", FAILURES)
def test_any_failure_is_rolled_back_and_the_run_goes_on_later(tmp_path, cluster, where, error):
    cluster.fault = (where, error)
    with pytest.raises(type(error)):
        driver_on(tmp_path).run(2)
    assert cluster.fault is None, "it was raised"
    assert cluster.things == {"placement group of others"}
    assert states_of(tmp_path)[-3:] == ["failed", "releasing", "released"]
    result = driver_on(tmp_path).run(2)
    assert (result.checkpoint / "adapter.safetensors").read_bytes() == b"shared 2"
    assert states_of(tmp_path).count("closed") == 2


@pytest.mark.parametrize("where", FAILURES[7:-1])
def test_a_lost_rank_is_answered_from_the_last_closed_update(tmp_path, cluster, where):
    cluster.fault = (where, RankLostError("rank 1 died"))
    result = driver_on(tmp_path).run(2)
    assert result.n_lost == 1 and (result.checkpoint / "adapter.safetensors").read_bytes() == b"shared 2"
    assert states_of(tmp_path).count("closed") == 2 and states_of(tmp_path).count("released") == 2
    assert cluster.things == {"placement group of others"}


def test_ranks_may_be_lost_as_often_as_allowed(tmp_path, cluster):
    cluster.fault = ("replay of update 0", RankLostError("rank 1 died"))
    with pytest.raises(RankLostError):
        driver_on(tmp_path, max_lost=0).run(2)
    assert cluster.things == {"placement group of others"}


@pytest.mark.parametrize("at", range(len(ALL_STATES)))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("by", ["driver", "cleanup"])
def test_a_driver_killed_at_any_state_is_recovered(tmp_path, cluster, monkeypatch, at, when, by):
    """Killed before or after the entry is on the disk: nothing that runs in the process then can write or remove."""
    write, n_written = OwnershipJournal.write, 0

    def killing(self, state, **facts):
        nonlocal n_written
        if (n_written == at and when == "before") or n_written > at:
            n_written = len(ALL_STATES)
            raise Killed
        write(self, state, **facts)
        n_written += 1
        if n_written > at and when == "after":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(OwnershipJournal, "write", killing)
        with pytest.raises(Killed):
            driver_on(tmp_path).run(2)
    if by == "cleanup" and cluster.journal_path.exists():
        owned_before = cluster.things - {"placement group of others"}
        found = clean_up(tmp_path, "first")
        assert set(found.removed) == owned_before and not found.kept
        assert found.left == ["placement group of others"]
        assert cluster.things == {"placement group of others"}
        assert clean_up(tmp_path, "first").removed == []
    result = driver_on(tmp_path).run(2)
    assert (result.checkpoint / "adapter.safetensors").read_bytes() == b"shared 2"
    assert cluster.things == {"placement group of others"}
    assert states_of(tmp_path).count("closed") == 2 and states_of(tmp_path)[-1] == "ended"


def test_what_cannot_be_removed_stays_owned_and_is_told(tmp_path, cluster):
    cluster.fault = ("create_group", RuntimeError("boom"))
    driver = driver_on(tmp_path)

    class Everything(set):
        def __rand__(self, other):
            return set(other)

    cluster.sticky = Everything()
    with pytest.raises(RuntimeError, match="boom") as error:
        driver.run(1)
    assert "longstraw cleanup --run first" in error.value.__notes__[0]
    assert len(clean_up(tmp_path, "first").kept) == 1 and states_of(tmp_path)[-1] == "releasing"
    cluster.sticky = set()
    assert len(clean_up(tmp_path, "first").removed) == 1 and states_of(tmp_path)[-1] == "released"


def test_a_plan_to_look_at_is_refused_before_anything_is_written(tmp_path, cluster):
    with pytest.raises(ConfigurationError, match="to look at"):
        DirectRayDriver(
            plan_of(runtime_image=None), program_of(), tmp_path / "runs", groups=groups, advantages=advantages
        )
    assert not (tmp_path / "runs").exists() and cluster.calls == []


@pytest.mark.parametrize(
    ("program", "given", "kind", "told"),
    [
        ({"context_parallel_size": 3}, {}, ConfigurationError, "does not divide"),
        ({}, {"groups": lambda n: groups(1)[:1]}, ConfigurationError, "1 prompt groups for 2 contexts"),
        ({}, {"groups": lambda n: []}, ConfigurationError, "0 prompt groups"),
        ({}, {"advantages": lambda group, rows: [1.0]}, InputError, "1 advantages were given for 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_left(tmp_path, cluster, program, given, kind, told):
    options = {"groups": lambda n: groups(1), "advantages": advantages} | given
    with pytest.raises(kind, match=told):
        DirectRayDriver(plan_of(), program_of(**program), tmp_path, **options).run(1)
    assert cluster.things == {"placement group of others"}


@pytest.mark.parametrize(("phase", "told"), [("finalize", "gradients"), ("step", "weights"), ("sample", "responses")])
def test_ranks_that_differ_close_no_update(tmp_path, cluster, monkeypatch, phase, told):
    sound = Actor.answer

    def differs(self, asked, args, options):
        found = sound(self, asked, args, options)
        if asked == phase and "rank-1-" in self._name:
            return {"finalize": {"gradient": {"sha256": "other"}}, "step": "other", "sample": [[3]]}[phase]
        return found

    monkeypatch.setattr(Actor, "answer", differs)
    options = {"groups": lambda n: [groups(1)[1]] * 2}
    with pytest.raises(NumericsError, match=told):
        driver_on(tmp_path, **options).run(1)
    assert "closed" not in states_of(tmp_path) and cluster.things == {"placement group of others"}


def test_pages_that_are_left_are_told(tmp_path, cluster):
    cluster.leaks = ["page 3 has no owner"]
    with pytest.raises(LifecycleError, match="page 3 has no owner"):
        driver_on(tmp_path).run(1)
    assert cluster.things == {"placement group of others"}


def test_ranks_elsewhere_than_planned_are_not_opened(tmp_path, cluster, monkeypatch):
    moved = places()
    moved[3]["accelerators"] = ["0"]
    monkeypatch.setitem(globals(), "places", lambda: moved)
    with pytest.raises(PlacementError, match="ranks 2 and 3 share accelerator 0"):
        driver_on(tmp_path).run(1)
    assert not any(call.startswith("open") for call in cluster.calls)
    assert cluster.things == {"placement group of others"}


def test_a_cluster_with_faults_creates_nothing(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(cluster, "records", lambda: [record(IPS[0])])
    with pytest.raises(PlacementError, match="no live Ray node"):
        driver_on(tmp_path).run(1)
    assert states_of(tmp_path) == ["planned", "connecting"]


# --- the edges ---


def test_cleanup_of_a_run_that_never_began_ends_with_one_message(tmp_path):
    command = [sys.executable, "-m", "longstraw_sdk.cli", "cleanup", "--run", "first", "--run-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and "no driver began run 'first'" in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_without_ray_a_run_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"longstraw-sdk\[ray\]"):
        RayRuntime.connect("127.0.0.1:1")


def test_a_connection_to_another_cluster_is_not_taken(monkeypatch):
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for address in ("auto", "10.0.0.1:6379"):
        with RayRuntime.connect(address) as runtime:
            assert not runtime._ours
    with pytest.raises(ConfigurationError, match=r"connected to '10\.0\.0\.1:6379', but address='10\.0\.0\.2:6379'"):
        RayRuntime.connect("10.0.0.2:6379")


def test_names_are_lazy_and_typos_are_reported():
    import longstraw_sdk.placement as placement

    assert set(placement.__all__) <= set(dir(placement))
    with pytest.raises(AttributeError, match="DirectRayDriver"):
        placement.DirectRayDrive  # noqa: B018
