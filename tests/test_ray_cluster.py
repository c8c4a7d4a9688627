"""A real Ray cluster of two nodes on this machine, whose GPUs and images are numbers that the nodes declare.

Each node is a raylet with an address of its own. On 127.0.0.1 that does not work: Ray takes it for "this machine" and
looks for the head at the machine's outer address, where it does not listen; other addresses of 127/8 it takes as they
are. So both nodes are seen as two, ranks meet over gloo, and only what a GPU would compute runs on the CPU.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray_cases as cases
import torch
from safetensors.torch import load_file

from longstraw_sdk import ConfigurationError, InputError, LifecycleError, PlacementError, RankLostError
from longstraw_sdk.doctor import Subject, placement
from longstraw_sdk.evidence.journal import read_journal
from longstraw_sdk.evidence.parity import relative_l2
from longstraw_sdk.placement import DirectRayDriver, RankProgram, RayRuntime, build_direct_ray_plan
from longstraw_sdk.placement.ownership import OWNERSHIP, OwnershipJournal
from longstraw_sdk.placement.ranks import Ranks

ray = pytest.importorskip("ray", reason='needs Ray: pip install "longstraw-sdk[ray]"')

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127/8 as addresses of its own"),
]

TOLERANCE = 1e-10
"""Relative L2 in float64, where two ranks sum in another order: four digits above rounding."""

TESTS = Path(__file__).resolve().parent
IPS = ["127.0.0.2", "127.0.0.3"]
IMAGE = "registry.example/longstraw@sha256:" + "ab" * 32
OTHER_IMAGE = "registry.example/longstraw@sha256:" + "cd" * 32
FOREIGN = "the group of someone else"


def plan_of(run_id, **changes):
    given = {"node_ips": IPS, "gpus_per_node": 1, "runtime_image": IMAGE} | changes
    return build_direct_ray_plan(run_id=run_id, **given)


class LocalCluster:
    """Two raylets, and a placement group that nobody here may touch."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        # Sockets lie in it, and their paths may have 107 bytes: pytest's folders are too deep. Ray writes the address
        # of a test cluster into the folder `ray` of RAY_TMPDIR, and nothing makes it before.
        self.folder = tempfile.mkdtemp(prefix="ray-")
        Path(self.folder, "ray").mkdir()
        os.environ["RAY_TMPDIR"] = self.folder
        self.victim = Path(self.folder, "kill-rank-1")
        os.environ["LONGSTRAW_TEST_KILL"] = str(self.victim)
        self._cluster = Cluster()
        self._nodes = {ip: self.add(ip) for ip in IPS}
        self.address = self._cluster.address
        with RayRuntime.connect(self.address):
            group = ray.util.placement_group([{f"node:{IPS[1]}": 0.001}], name=FOREIGN, lifetime="detached")
            assert group.wait(30)

    def add(self, ip):
        """A node; once more where it was not there within 30 s, a constant of Ray that a busy machine exceeds."""
        try:
            return self._add(ip)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            return self._add(ip)

    def _add(self, ip):
        head = {"include_dashboard": False} if self._cluster.head_node is None else {}
        return self._cluster.add_node(
            node_ip_address=ip,
            num_cpus=1,
            num_gpus=1,
            resources={plan_of("any").image_resource: 1},
            object_store_memory=80 * 2**20,
            **head,
        )

    def remove(self, ip):
        self._cluster.remove_node(self._nodes.pop(ip), allow_graceful=False)

    def put_back(self, ip):
        self._nodes[ip] = self.add(ip)

    def there(self):
        """Names of actors and placement groups."""
        with RayRuntime.connect(self.address) as runtime:
            groups = [record["name"] for record in runtime._groups().values()]
            return sorted(groups + runtime._actor_names())

    def close(self):
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster():
    """Variables that the nodes and their workers inherit: no telemetry, and modules of the tests are importable."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("LONGSTRAW_TEST_KILL", "")
        patch.setenv("RAY_TMPDIR", "")
        cluster = LocalCluster()
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def reference():
    return cases.run_in_one_process(2)


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    if "cluster" in request.fixturenames:
        assert request.getfixturevalue("cluster").there() == [FOREIGN]


def program_of(tmp_path, **changes):
    given = {
        "model": "ray_cases:model_of_rank",
        "loss": "ray_cases:deadly_loss",
        "optimizer": "ray_cases:RecordingAdamW",
        "optimizer_arguments": {"lr": cases.LR, "folder": str(tmp_path)},
        "session": cases.SESSION,
        "context_parallel_size": 2,
    }
    return RankProgram(**given | changes)


def driver_of(cluster, tmp_path, run_id, **changes):
    given = {"groups": cases.groups, "advantages": cases.advantages, "address": cluster.address}
    given |= {"plan": plan_of(run_id), "program": program_of(tmp_path), "timeouts": cases.TIMEOUTS} | changes
    return DirectRayDriver(run_dir=tmp_path, **given)


def entries_of(tmp_path, run_id):
    return read_journal(tmp_path / run_id / OWNERSHIP)[0]


def states_of(tmp_path, run_id):
    return [entry["stage"] for entry in entries_of(tmp_path, run_id)]


def check_adapter(checkpoint, wanted):
    found = load_file(checkpoint / "adapter.safetensors")
    assert {f"weight/{name}" for name in wanted} <= found.keys()
    for name, weight in wanted.items():
        assert relative_l2(found[f"weight/{name}"], weight) < TOLERANCE, name


def test_two_ranks_close_updates_that_equal_one_process(cluster, reference, tmp_path):
    gradients, adapters = reference
    result = driver_of(cluster, tmp_path, "equal").run(2)
    assert result.n_closed == 2 and result.n_lost == 0
    for update, wanted in enumerate(gradients):
        assert all(float(g.norm()) > 1e-6 for g in wanted), "LoRA B is not zero, so no gradient is"
        for rank in range(2):
            found = torch.load(tmp_path / f"{rank}-{update}.pt")
            worst = max(relative_l2(f, w) for f, w in zip(found, wanted, strict=True))
            assert worst < TOLERANCE, (rank, update)
    check_adapter(result.checkpoint, adapters[1])
    check_adapter(result.checkpoint.with_name("update-000001"), adapters[0])
    assert relative_l2(gradients[1][0], gradients[0][0]) > 1e-3, "the updates differ, so their order would show"

    sessions = json.loads((tmp_path / "equal/artifacts/rank-sessions.json").read_text())["ranks"]
    assert [rank["planned"]["node_ip"] for rank in sessions] == IPS
    assert [rank["observed"]["node_ip"] for rank in sessions] == IPS
    assert len({rank["observed"]["node_id"] for rank in sessions}) == 2
    (closed, *_) = [e for e in entries_of(tmp_path, "equal") if e["stage"] == "closed"]
    assert closed["reductions"] == [
        {"group": "context", "ranks": [0, 1], "operation": "sum", "n_parameters": 46, "n_elements": 6784}
    ]
    released = entries_of(tmp_path, "equal")[-2]
    assert released["stage"] == "released" and len(released["removed"]) == 4
    assert len(released["left"]) == 1 and FOREIGN in released["left"][0]


def test_every_fault_of_the_cluster_is_told_and_nothing_is_created(cluster, tmp_path):
    plan = plan_of("faults", node_ips=[*IPS, "127.0.0.9"], gpus_per_node=2, runtime_image=OTHER_IMAGE)
    program = program_of(tmp_path)
    with pytest.raises(PlacementError, match="7 faults") as error:
        driver_of(cluster, tmp_path, "faults", plan=plan, program=program).run(1)
    lines = str(error.value).splitlines()[1:]
    for ip in IPS:
        found = [line for line in lines if line.startswith(f"- {ip}: ")]
        assert len(found) == 3 and "1 GPUs" in found[0] and "1 CPUs" in found[1]
        assert f"declares {plan_of('any').image_resource}, another image" in found[2]
    assert lines[-1].startswith("- 127.0.0.9: no live Ray node")
    assert states_of(tmp_path, "faults") == ["planned", "connecting"]


def test_the_doctor_examines_the_cluster(cluster, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_of("examined").to_json())
    subject = Subject(placement_plan=path, ray_address=cluster.address)
    assert [c.name for c in placement.examine(subject) if c.ok] == [
        "placement plan",
        "ray cluster",
        *(f"ray node {ip}" for ip in IPS),
    ]
    path.write_text(plan_of("examined", gpus_per_node=2).to_json())
    assert [c.name for c in placement.examine(subject) if not c.ok] == [f"ray node {ip}" for ip in IPS]


def test_a_node_that_is_taken_ends_the_run_in_time_and_releases_the_rest(cluster, tmp_path):
    with RayRuntime.connect(cluster.address):
        taken = ray.util.placement_group([{"GPU": 1, f"node:{IPS[1]}": 0.001}], name="of someone with a GPU")
        assert taken.wait(30)
        start = time.monotonic()
        limits = cases.Timeouts(group=2)
        with pytest.raises(PlacementError, match=r"within 2 s: CPUs or GPUs of .* are taken"):
            driver_of(cluster, tmp_path, "taken", timeouts=limits).run(1)
        assert time.monotonic() - start < 20
        ray.util.remove_placement_group(taken)
    assert states_of(tmp_path, "taken")[-3:] == ["failed", "releasing", "released"]
    assert any("of someone with a GPU" in what for what in entries_of(tmp_path, "taken")[-1]["left"])


def test_ranks_refuse_what_would_make_another_gradient(cluster, tmp_path):
    """Controls: without these refusals, the run above would not have to be equal."""
    plan, program = plan_of("controls"), program_of(tmp_path)
    with OwnershipJournal(tmp_path / "controls") as journal, RayRuntime.connect(cluster.address) as runtime:
        owned = journal.own(plan)
        try:
            runtime.create_group(plan, owned.group, 60)
            specs = (plan.coordinator, *plan.ranks)
            actors = runtime.create_actors(plan, dict(zip((s.name for s in specs), owned.actors, strict=True)))
            ranks = Ranks(plan, program, runtime, actors, cases.TIMEOUTS)
            ranks.places()
            with pytest.raises(LifecycleError, match="before open"):
                ranks.everywhere("finalize")
            ranks.open(0, {})
            (group,) = cases.groups(0)
            other = (*group.prompt_ids[:-1], group.prompt_ids[-1] ^ 1)
            with pytest.raises(InputError, match="given different prompt"):
                ranks.on("capture", {0: (group.prompt_ids,), 1: (other,)})
            ranks.everywhere("capture", [(group.prompt_ids,)] * 2)
            ranks.everywhere("score", [(group.responses,)] * 2)
            with pytest.raises(InputError, match="response 3 was asked for, but 3 were scored"):
                ranks.everywhere("replay", [(3, 1.0)] * 2)
            ranks.everywhere("replay", [(0, 1.0)] * 2)
            with pytest.raises(LifecycleError, match="finalize"):
                ranks.everywhere("step")
            with pytest.raises(PlacementError, match="did not finish finalize, capture, replay, step"):
                ranks.reports()
            # Ranks that wait for one that was not asked, as a hung one would leave them:
            with pytest.raises(PlacementError, match="rank 0 did not answer in finalize of update 0 within 3 s"):
                ranks.on("finalize", {0: ()}, timeout_s=3)
        finally:
            assert not runtime.release(owned, "controls", 30).kept


def test_a_rank_that_dies_in_a_replay_is_answered_from_the_last_closed_update(cluster, reference, tmp_path):
    n_asked = []

    def groups(n_closed):
        if n_closed == 1 and 1 not in n_asked:
            cluster.victim.touch()
        n_asked.append(n_closed)
        return cases.groups(n_closed)

    result = driver_of(cluster, tmp_path, "died", groups=groups).run(2)
    assert n_asked == [0, 1, 1] and not cluster.victim.exists(), "the first update was not taken again"
    assert result.n_lost == 1 and result.n_closed == 2
    states = states_of(tmp_path, "died")
    at = states.index("failed")
    assert states[at - 1] == "closed" and states[at : at + 3] == ["failed", "releasing", "released"]
    assert "rank 1 died in replay of update 1" in entries_of(tmp_path, "died")[at]["error"]
    check_adapter(result.checkpoint, reference[1][1])


def kill_driver(cluster, tmp_path, run_id, n_updates, when, state):
    plan, program = plan_of(run_id), program_of(tmp_path)
    command = [sys.executable, str(TESTS / "ray_driver.py"), cluster.address, str(tmp_path), plan.to_json()]
    command += [json.dumps(program.as_dict()), str(n_updates), when, state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == -9, done.stderr
    return states_of(tmp_path, run_id)


def clean_up(tmp_path, run_id, *more):
    command = [sys.executable, "-m", "longstraw_sdk.cli", "cleanup", "--run", run_id, "--run-dir", str(tmp_path)]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, check=False)


KILLS = [
    # when, state, updates asked for, kinds of what it leaves
    ("before", "group_created", 1, ["placement group"]),
]
SLOW_KILLS = [
    ("after", "closed", 2, ["actor"] * 3 + ["placement group"]),
    ("after", "planned", 1, []),
    ("after", "connecting", 1, []),
    ("after", "validated", 1, []),
    ("after", "creating_group", 1, []),
    ("after", "group_created", 1, ["placement group"]),
    ("after", "creating_actors", 1, ["placement group"]),
    ("before", "actors_created", 1, ["actor"] * 3 + ["placement group"]),
    ("after", "actors_created", 1, ["actor"] * 3 + ["placement group"]),
    ("after", "running", 1, ["actor"] * 3 + ["placement group"]),
    ("before", "closed", 1, ["actor"] * 3 + ["placement group"]),
    ("after", "releasing", 1, ["actor"] * 3 + ["placement group"]),
    ("before", "released", 1, []),
    ("after", "released", 1, []),
]


@pytest.mark.parametrize(
    ("when", "state", "n_updates", "kinds"), KILLS + [pytest.param(*k, marks=pytest.mark.slow) for k in SLOW_KILLS]
)
def test_a_driver_killed_at_a_state_is_cleaned_up_after_and_goes_on(
    cluster, reference, tmp_path, when, state, n_updates, kinds
):
    states = kill_driver(cluster, tmp_path, "killed", n_updates, when, state)
    assert (states[-1] == state) == (when == "after")
    found = cluster.there()
    assert len(found) == len(kinds) + 1, "what it created is still there"
    done = clean_up(tmp_path, "killed", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [what.rpartition(" ")[0] for what in told["removed"]] == kinds and not told["kept"]
    assert sorted(what.rpartition(" ")[2] for what in told["removed"]) == [name for name in found if name != FOREIGN]
    assert len(told["left"]) == 1 and FOREIGN in told["left"][0]
    assert cluster.there() == [FOREIGN]
    again = clean_up(tmp_path, "killed")
    assert again.returncode == 0 and "nothing of run killed was there" in again.stdout

    if kinds and len(kinds) < 4 and when == "before":
        return  # that a run goes on after this is shown by the others
    n_closed = states.count("closed")
    result = driver_of(cluster, tmp_path, "killed").run(n_updates)
    assert result.n_closed == n_updates and states_of(tmp_path, "killed").count("closed") == n_updates
    assert n_closed == (state in ("closed", "releasing", "released") and (when, state) != ("before", "closed"))
    check_adapter(result.checkpoint, reference[1][n_updates - 1])


def test_actors_that_do_not_start_in_time_are_removed_while_they_start(cluster, tmp_path):
    limits = cases.Timeouts(actors=0.5)
    with pytest.raises(PlacementError, match=r"rank 0.* did not answer in its start within 0.5 s"):
        driver_of(cluster, tmp_path, "slow", timeouts=limits).run(1)
    assert states_of(tmp_path, "slow")[-4:] == ["creating_actors", "failed", "releasing", "released"]


@pytest.mark.slow
def test_ranks_with_experts_of_their_own_go_on_from_a_checkpoint(cluster, tmp_path):
    """One update each by two drivers, against two in one process that holds all experts."""
    from longstraw_sdk.models.glm52.expert_shards import keep_expert_shard

    program = program_of(
        tmp_path, model="ray_cases:glm_of_rank", model_arguments={"n_parts": 2}, expert_parallel_size=2
    )
    for n_updates in (1, 2):
        checkpoint = driver_of(cluster, tmp_path, "experts", program=program).run(n_updates).checkpoint
    names = ["adapter.safetensors", "experts-0.safetensors", "experts-1.safetensors"]
    assert sorted(p.name for p in checkpoint.glob("*.safetensors")) == names
    _, adapters = cases.run_in_one_process(2, cases.whole_glm)
    shared = load_file(checkpoint / names[0])
    for rank in range(2):
        whole = cases.whole_glm()
        whole.load_state_dict(adapters[1], strict=False)
        own = {n: p for n, p in keep_expert_shard(whole, rank, 2).named_parameters() if p.requires_grad}
        experts = load_file(checkpoint / names[1 + rank])
        assert sum(key.startswith("weight/") for key in experts) >= 8
        for name, weight in own.items():
            found = experts[f"weight/{name}"] if ".experts." in name else shared[f"weight/{name}"]
            assert relative_l2(found, weight.detach()) < TOLERANCE, name


@pytest.mark.slow
def test_a_driver_goes_on_without_cleanup_and_removes_what_the_last_one_left(cluster, reference, tmp_path):
    kill_driver(cluster, tmp_path, "again", 2, "after", "closed")
    assert len(cluster.there()) == 5
    result = driver_of(cluster, tmp_path, "again").run(2)
    assert "recovering" in states_of(tmp_path, "again")
    check_adapter(result.checkpoint, reference[1][1])


@pytest.mark.slow
def test_a_node_that_dies_ends_the_step_and_the_run_goes_on_when_it_is_back(cluster, reference, tmp_path):
    def groups(n_closed):
        if n_closed == 1 and IPS[1] in cluster._nodes and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            cluster.remove(IPS[1])
        return cases.groups(n_closed)

    with pytest.raises((RankLostError, PlacementError)):
        driver_of(cluster, tmp_path, "node", groups=groups).run(2)
    assert any("died in capture of update 1" in e.get("error", "") for e in entries_of(tmp_path, "node"))
    assert states_of(tmp_path, "node").count("closed") == 1
    cluster.put_back(IPS[1])
    result = driver_of(cluster, tmp_path, "node", groups=groups).run(2)
    check_adapter(result.checkpoint, reference[1][1])


def test_nothing_that_answers_is_told_in_time(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(PlacementError, match=f"no Ray cluster answers at '127.0.0.2:{port}'"):
        RayRuntime.connect(f"127.0.0.2:{port}", 5)
    assert time.monotonic() - start < 5
    with pytest.raises(ConfigurationError, match="Ray client"):
        RayRuntime.connect("ray://127.0.0.2:10001", 5)


def test_a_head_that_hangs_is_told_in_time(tmp_path):
    """In a process of its own: Ray keeps trying in a thread."""
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.2", 0))
        hanging.listen()
        address = f"127.0.0.2:{hanging.getsockname()[1]}"
        with OwnershipJournal(tmp_path / "hangs") as journal:
            journal.begin(plan_of("hangs"), program_of(tmp_path))
        start = time.monotonic()
        done = clean_up(tmp_path, "hangs", "--address", address, "--timeout", "3")
    assert done.returncode == 2 and "within 3 s" in " ".join(done.stderr.split()), done.stderr
    assert time.monotonic() - start < 60
