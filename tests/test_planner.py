"""The planner beside what was measured: peaks of real steps on a CPU, and the committed results of an H200."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_sdk import ConfigurationError, LongStrawSession
from longstraw_sdk.evidence.memory import trace_memory
from longstraw_sdk.evidence.tiny import tiny_model
from longstraw_sdk.planner import Machine, Options, PlanRequest, largest_prompt, parse_size, plan
from longstraw_sdk.planner.activations import capture_peak
from longstraw_sdk.planner.devices import H200, load_profile
from longstraw_sdk.planner.geometry import GLM52, TINY_GLM52, TINY_QWEN3, TINY_QWEN36
from longstraw_sdk.planner.ledger import Ledger
from longstraw_sdk.planner.links import Links
from longstraw_sdk.planner.memory import TERMS, Schedule, ledgers, memory_plan
from longstraw_sdk.planner.model_facts import facts_of, model_facts
from longstraw_sdk.planner.passes import Numbers, Pass
from longstraw_sdk.planner.seconds import _traffic, seconds_plan
from longstraw_sdk.state import StateBytes

GIB = 2**30
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PLAIN = Numbers(model=4, sums=4, lora_rank=4, fused=False, on_gpu=False)
ON_H200 = Numbers(model=2, sums=4, lora_rank=16, fused=True, on_gpu=True)


def result_rows(name):
    return json.loads((RESULTS / f"2026-11-30-{name}.json").read_text())


# --- Peaks on a CPU ---

# prompt, chunk, page, group, response, replay_tokens
SMALL = [(257, 64, 64, 2, 16, None), (513, 128, 64, 4, 32, 64)]
LARGE = [
    (2049, 256, 256, 4, 64, 256),
    (1025, 512, 128, 2, 128, None),
    (101, 100, 16, 8, 7, None),
    (801, 64, 32, 2, 90, 8),
]


def step_peak(model, case, scope):
    """Peak of live tensors of one group with the weights and gradients that were there before."""
    n_prompt, chunk, page, group, response, replay_tokens = case
    torch.manual_seed(0)
    rows = [torch.randint(0, 97, (response,)) for _ in range(group)]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    held = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for p in model.parameters())
    n_packed = max(1, (replay_tokens or 0) // response)
    options = {"chunk_tokens": chunk, "page_tokens": page, "gradient_scope": scope, "replay_tokens": replay_tokens}
    with LongStrawSession(model, **options) as session, trace_memory() as trace:
        with session.capture(torch.randint(0, 97, (n_prompt,))) as prefix:
            for start in range(0, group, n_packed):
                outs = prefix.replay_packed(rows[start : start + n_packed])
                torch.stack([out.logps.sum() for out in outs]).sum().backward()
                del outs
        session.finalize()
    return held + trace.peak_bytes


def planned(facts, case, scope, checkpointing):
    n_prompt, chunk, page, group, response, replay_tokens = case
    request = PlanRequest(
        model="tiny",
        prompt_tokens=n_prompt,
        response_tokens=response,
        group=group,
        scope=scope,
        lora_rank=4,
        checkpointing=checkpointing,
        optimizer=False,
        sampled=False,
    )
    return memory_plan(request, facts, options_of(chunk, page, replay_tokens), PLAIN, reserve=0.0)


def options_of(chunk=8192, page=4096, replay_tokens=None, **changes):
    given = {"tier": "cuda", "context_parallel_size": 1, "expert_parallel_size": 1} | changes
    return Options(chunk_tokens=chunk, page_tokens=page, replay_tokens=replay_tokens, **given)


@pytest.fixture(scope="module")
def tiny():
    made = {}

    def of(architecture, checkpointing):
        key = architecture, checkpointing
        if key not in made:
            model = tiny_model(architecture, max_position_embeddings=8192).train()
            base = model.get_base_model()
            if checkpointing:
                base.activation_checkpointing_enable({"use_reentrant": False})
            made[key] = model, facts_of(architecture, base.config, torch.float32, 4)
        return made[key]

    return of


def check_peak(tiny, architecture, case, scope, checkpointing):
    model, facts = tiny(architecture, checkpointing)
    found, wanted = planned(facts, case, scope, checkpointing).fullest.n_bytes, step_peak(model, case, scope)
    assert found == pytest.approx(wanted, rel=0.1), f"{found:,.0f} planned, {wanted:,} measured"


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("scope", ["response", "full"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen36", "glm52"])
def test_peaks_are_within_a_tenth_of_those_of_real_steps(tiny, architecture, scope, case):
    check_peak(tiny, architecture, case, scope, checkpointing=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen36", "glm52"])
def test_so_are_those_of_checkpointed_models(tiny, architecture):
    check_peak(tiny, architecture, SMALL[1], "full", checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("scope", ["response", "full"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "qwen36", "glm52"])
def test_peaks_of_more_sizes(tiny, architecture, scope, case, checkpointing):
    check_peak(tiny, architecture, case, scope, checkpointing)


@pytest.mark.parametrize("term", ["fixed", "prompt state", "gradient accumulators", "branch"])
def test_control_no_term_can_be_left_out(tiny, term):
    model, facts = tiny("llama", False)
    case = (2049, 64, 64, 2, 16, None) if term in ("prompt state", "gradient accumulators") else SMALL[0]
    fullest = planned(facts, case, "full", False).fullest
    assert abs(fullest.n_bytes - fullest.terms[term] - step_peak(model, case, "full")) > 0.1 * fullest.n_bytes


def test_weights_and_state_are_exact(tiny):
    for architecture in ("qwen36", "llama", "glm52"):
        model, facts = tiny(architecture, False)
        lora = facts.lora_parameters(1) * facts.sum_bytes
        assert facts.base_bytes(1, nf4=False) + lora == sum(p.nbytes for p in model.parameters())
        with LongStrawSession(model, chunk_tokens=64, page_tokens=32, gradient_scope="full") as session:
            with session.capture(torch.randint(0, 97, (300,))) as prefix:
                held = StateBytes.of(facts.specs, 299, 32)
                assert held.resident(5) == prefix.n_bytes, "chunks of 64 leave five boundaries"


# --- Results of an H200 ---

H200_ROWS = [
    row
    for name in ("h200-27b-32k", "h200-27b-128k", "h200-27b-1m")
    for row in result_rows(name)
    if row["system"] == "longstraw"
]


def label(row):
    kept = "" if row["checkpointing"] else "-kept"
    return f"{row['prompt_tokens']}-G{row['group']}-{row['gradient_scope']}-{row['replay_tokens']}{kept}"


def planned_row(row):
    request = PlanRequest(
        model="qwen3.6-27b",
        prompt_tokens=row["prompt_tokens"],
        response_tokens=row["response_tokens"],
        group=row["group"],
        scope=row["gradient_scope"],
        checkpointing=row["checkpointing"],
        optimizer=False,
        sampled=row["sample_seconds"] is not None,
    )
    facts, options = model_facts("qwen3.6-27b", 16), options_of(replay_tokens=row["replay_tokens"])
    memory = memory_plan(request, facts, options, ON_H200, reserve=0.0)
    return memory, seconds_plan(request, facts, options, ON_H200, memory, H200, Links())


@pytest.mark.parametrize("row", H200_ROWS, ids=label)
def test_peaks_of_an_h200(row):
    """Within 3%; 1.2% is the largest that was found."""
    memory, _ = planned_row(row)
    assert memory.fullest.n_bytes / GIB == pytest.approx(row["peak_gib"], rel=0.03)


def test_control_the_kept_activations_are_half_of_a_row():
    (row,) = (row for row in H200_ROWS if not row["checkpointing"])
    memory, _ = planned_row(row)
    assert memory.fullest.phase == "replay"
    without = memory.fullest.n_bytes - memory.fullest.terms["branch"]
    assert without / GIB < 0.6 * row["peak_gib"]


def test_weights_and_state_of_an_h200_are_exact():
    facts = model_facts("qwen3.6-27b", 16)
    for row in H200_ROWS:
        assert (facts.base_bytes(1, nf4=False) + 4 * facts.lora_parameters(1)) / GIB == row["weights_gib"]
        n_boundaries = row["prompt_tokens"] // 8192 if row["gradient_scope"] == "full" else 1
        held = StateBytes.of(facts.specs, row["prompt_tokens"] - 1, 4096)
        assert held.resident(n_boundaries) / GIB == row["state_gib"]


@pytest.mark.parametrize("row", H200_ROWS, ids=label)
def test_seconds_of_an_h200(row):
    """Shares were found from these rows, so this says how well a few numbers describe all of them: 17% at worst, a lone
    pack of 2,048 tokens that took longer than one of 4,096; everything else within 6%."""
    _, seconds = planned_row(row)
    for phase in seconds.phases:
        measured = row.get(f"{phase.phase}_seconds")
        if measured and phase.phase not in ("finalize", "sample"):
            lone = row["group"] == 2 and row["replay_tokens"] == 4096 and phase.phase == "replay"
            assert phase.seconds == pytest.approx(measured, rel=0.2 if lone else 0.06), phase.phase


def test_sampling_is_as_fast_as_it_was_measured():
    (row,) = (row for row in H200_ROWS if row["sample_seconds"])
    _, seconds = planned_row(row | {"response_tokens": 32, "replay_tokens": None})
    (sample,) = (phase for phase in seconds.phases if phase.phase == "sample")
    assert sample.seconds == pytest.approx(row["sample_seconds"], rel=0.06)


def test_layers_of_glm_on_an_h200():
    """Ten layers with 8 of 256 experts, whose pages are all there from the first depth on."""
    rows = [row for row in result_rows("h200-glm-slice") if row["system"] == "longstraw"]
    facts = facts_of("slice", GLM52.config(1, 32), torch.bfloat16, 16)
    longest = max(row["prompt_tokens"] for row in rows) + 8192
    held = facts.base_bytes(1, nf4=False) + 4 * facts.lora_parameters(1)
    held += StateBytes.of(facts.specs, longest, 4096).pages
    for row in rows:
        depth = row["prompt_tokens"]
        run = Pass(
            n_rows=1,
            width=8192,
            resident=depth,
            prefix=depth,
            page_tokens=4096,
            accumulate=False,
            state_only=False,
        )
        peak = held + capture_peak(ledgers(facts, run, ON_H200))
        assert peak / GIB == pytest.approx(row["peak_gib"], rel=0.05)
        selects, experts = row["layer_kind"].startswith("selecting"), row["layer_kind"].endswith("MoE")
        seconds = H200.sparse.layer(experts=experts, selects=selects, n_prefix=depth)
        assert seconds == pytest.approx(row["layer_seconds"], rel=0.1)


SIMULATED = [row for row in result_rows("simulated-ranks") if "estimate" in row and row["group"] == 2]


def check_simulated(row):
    """One rank of many, on plain operators: peak, and what a replay receives."""
    case, glm = row["estimate"], row["model"] == "glm-5.2"
    request = PlanRequest(
        model=row["model"],
        gpus=case["size"],
        prompt_tokens=row["prompt_tokens"] + 1,
        response_tokens=2048,
        group=1,
        scope=row["gradient_scope"],
        checkpointing=not glm,
        optimizer=False,
        sampled=False,
    )
    options = options_of(context_parallel_size=case["size"], expert_parallel_size=case["size"] if glm else 1)
    facts, num = model_facts(row["model"], 16), replace(ON_H200, fused=False)
    memory = memory_plan(request, facts, options, num, reserve=0.0)
    assert memory.fullest.n_bytes / GIB == pytest.approx(row["peak_gib"], rel=0.03)
    replay = case["phases"][f"replay {row['gradient_scope']}"]
    received = _traffic(request, facts, Schedule.of(request, facts, options), num)["replay"]
    # The simulation asked for attention again in backward, and for Qwen's last layer.
    assert received == pytest.approx(replay["received_bytes"] + replay["expert_bytes"], rel=0.15)


@pytest.mark.parametrize("row", [r for r in SIMULATED if r["model"] != "glm-5.2"], ids=lambda r: r["gradient_scope"])
def test_one_rank_of_eight(row):
    check_simulated(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r in SIMULATED if r["model"] == "glm-5.2"], ids=lambda r: r["gradient_scope"])
def test_one_rank_of_thirty_two(row):
    check_simulated(row)


# --- Properties ---


@pytest.fixture(scope="module")
def small_facts():
    geometries = {"qwen36": TINY_QWEN36, "qwen3": TINY_QWEN3, "glm52": TINY_GLM52}
    return {name: facts_of(name, g.config(g.n_units), torch.bfloat16, 4) for name, g in geometries.items()}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["qwen36", "qwen3", "glm52"]),
    scope=st.sampled_from(["response", "full"]),
    prompt=st.integers(300, 200_000),
    more=st.integers(1, 200_000),
    chunk=st.sampled_from([256, 1024]),
    ranks=st.sampled_from([1, 4]),
    tier=st.sampled_from(["cuda", "cpu"]),
)
def test_a_longer_prompt_never_needs_less(small_facts, name, scope, prompt, more, chunk, ranks, tier):
    options = options_of(chunk, 256, None, context_parallel_size=ranks, tier=tier)
    request = PlanRequest(model=name, gpus=ranks, prompt_tokens=prompt, response_tokens=64, group=4, scope=scope)
    short, long = (
        memory_plan(replace(request, prompt_tokens=n), small_facts[name], options, ON_H200, reserve=0.0)
        for n in (prompt, prompt + more)
    )
    assert long.fullest.n_bytes >= short.fullest.n_bytes
    assert long.host_bytes >= short.host_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hybrid model of eight layers, planned in milliseconds."""
    path = tmp_path_factory.mktemp("hybrid")
    TINY_QWEN36.config(TINY_QWEN36.n_units).save_pretrained(path)
    return str(path)


BARE = Machine(reserve=0.0)


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.integers(300, 60_000),
    gpus=st.sampled_from([1, 2, 4]),
    scope=st.sampled_from(["response", "full"]),
    mib=st.integers(8, 100),
)
def test_more_gpus_never_lose_a_plan(folder, prompt, gpus, scope, mib):
    request = PlanRequest(
        model=folder, gpus=gpus, gpu_bytes=mib * 2**20, prompt_tokens=prompt, response_tokens=64, scope=scope
    )
    few, many = plan(request, BARE), plan(replace(request, gpus=2 * gpus), BARE)
    assert many.fits or not few.fits
    same = replace(request, context_parallel_size=few.options.context_parallel_size)
    assert plan(replace(same, gpus=2 * gpus), BARE).peak_bytes <= plan(same, BARE).peak_bytes


@pytest.mark.parametrize("scope", ["response", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": 1},
        {"gpus": 4, "host_bytes": 30 * 2**20},
        {"gpus": 2, "prefix_adapter": "frozen", "chunk_tokens": 512, "replay_tokens": 128},
    ],
    ids=str,
)
def test_the_largest_prompt_fits_and_the_next_one_does_not(folder, changes, scope):
    request = PlanRequest(model=folder, gpu_bytes=60 * 2**20, response_tokens=64, scope=scope, **changes)
    found = largest_prompt(request, BARE)
    assert found.fits and found.searched_prompt
    prompt, step = found.request.prompt_tokens, changes.get("chunk_tokens", 1024)
    assert prompt % step == 0 and prompt > 4 * step
    assert plan(replace(request, prompt_tokens=prompt), BARE).fits
    assert not plan(replace(request, prompt_tokens=prompt + step), BARE).fits


def test_a_machine_that_is_too_small_for_one_chunk_says_so(folder):
    with pytest.raises(ConfigurationError, match=r"not even a prompt of 1,024 tokens fits: .* are missing per GPU"):
        largest_prompt(PlanRequest(model=folder, gpu_bytes=2**20), BARE)


def test_equal_requests_get_equal_plans():
    request = PlanRequest(model="qwen3.6-27b", gpus=8, prompt_tokens=2_097_152, gpu_bytes=141 * GIB)
    assert plan(request).to_json() == plan(request).to_json()


def test_what_a_prompt_needs_beside_the_gpu_goes_to_the_host():
    request = PlanRequest(model="qwen3.6-27b", gpu_bytes=80 * 10**9, prompt_tokens=524_288, scope="response")
    alone, with_host = plan(request), plan(replace(request, host_bytes=64 * GIB))
    assert not alone.fits and any("host memory" in line for line in alone.advice)
    assert with_host.fits and with_host.options.tier == "split"
    assert 0 < with_host.memory.host_layers < with_host.memory.n_layers
    assert with_host.config_arguments["state_device"] == "auto"
    everything = plan(replace(request, host_bytes=64 * GIB, tier="cpu"))
    assert everything.memory.host_bytes >= 32 * GIB > with_host.memory.host_bytes, "65,536 bytes per token"


def test_advice_is_what_was_planned():
    request = PlanRequest(model="qwen3.6-27b", gpu_bytes=80 * 10**9, prompt_tokens=131_072, scope="full")
    found = plan(request)
    assert not found.fits and found.short_bytes > 0
    assert any(line.startswith("NF4") for line in found.advice)
    assert plan(replace(request, base_weights="nf4")).fits
    (gpus,) = (int(line.split()[0]) for line in found.advice if "GPUs: fits" in line)
    assert plan(replace(request, gpus=gpus)).fits and not plan(replace(request, gpus=gpus // 2)).fits


def test_experts_are_spread_until_they_fit():
    found = plan(PlanRequest(model="glm-5.2", gpus=32, prompt_tokens=2_097_152, response_tokens=2048, group=2))
    assert found.fits and found.options.expert_parallel_size > 1
    assert not plan(replace(found.request, expert_parallel_size=1)).fits
    assert any("single layers on one H200" in line for line in found.seconds.assumptions)
    assert {row["gpus"] for row in found.paper} == {32}


def test_a_ledger_follows_lifetimes():
    """x -> a -> b -> c, where b keeps a: forward holds a and b, or b and c without autograd."""
    book = Ledger(100)
    a = book.op(10, book.x)
    b = book.op(20, a, saves=(a,), extra=3)
    book.op(40, b, work=7)
    assert book.kept == 13
    assert book.forward_peak(grad=False) == 20 + 40 + 7
    assert book.forward_peak(grad=True) == 10 + 3 + 20 + 40 + 7
    # Gradients: of c and b beside what is kept, then of b and a, then of a and x.
    assert book.backward_peak() == max(13 + 40 + 20, 13 + 20 + 10, 10 + 100)


# --- Mistakes ---


@pytest.mark.parametrize("text", ["", "141", "GiB", "-3GiB", "0GB", "1e3GiB", "80 gigabytes", "80gb", "nanGiB"])
def test_sizes_need_a_unit(text):
    with pytest.raises(ConfigurationError, match="such as 141GiB or 80GB"):
        parse_size("--gpu-memory", text)


def test_sizes():
    assert parse_size("x", "141GiB") == 141 * GIB
    assert parse_size("x", "80 GB") == 80 * 10**9
    assert parse_size("x", "1.5TiB") == 1.5 * 2**40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 1}, "prompt_tokens must be an integer of at least 2"),
        ({"gpus": 0}, "gpus must be an integer of at least 1"),
        ({"scope": "half"}, "allowed: 'response', 'full'"),
        ({"tier": "disk"}, "allowed: 'cuda', 'split', 'cpu'"),
        ({"gpus": 8, "context_parallel_size": 3}, "does not divide gpus=8"),
    ],
)
def test_a_request_is_checked_when_it_is_made(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        PlanRequest(model="qwen3.6-27b", **changes)


def test_an_unreachable_model_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=r"download config\.json into a folder"):
        model_facts("nobody/no-such-model", 16)
    with pytest.raises(ConfigurationError, match=r"without config\.json"):
        model_facts(str(tmp_path), 16)


def test_a_dense_model_has_no_experts_to_spread():
    with pytest.raises(ConfigurationError, match="must spread evenly"):
        plan(PlanRequest(model="qwen3.6-27b", gpus=2, expert_parallel_size=2))


def test_a_folder_is_planned_from_its_config_alone(tmp_path):
    TINY_QWEN3.config(8).save_pretrained(tmp_path)
    found = plan(PlanRequest(model=str(tmp_path), prompt_tokens=4096, chunk_tokens=1024))
    assert found.fits and found.paper == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_ceilings_of_another_device_come_from_its_own_results(tmp_path):
    profile = load_profile(str(RESULTS / "2026-11-30-h200-27b-1m.json"))
    assert profile.ceilings.products == pytest.approx(786.4e12, rel=1e-3)
    assert "h200-27b-1m.json" in profile.source
    with pytest.raises(ConfigurationError, match="no measured ceilings"):
        load_profile(str(RESULTS / "2026-11-30-h200-glm-slice.json"))
    with pytest.raises(ConfigurationError, match="neither a known device"):
        load_profile("b300")
    request = PlanRequest(model="qwen3.6-27b", prompt_tokens=131_072, scope="response", sampled=False)
    slow = Machine(device=H200.with_ceilings(products=79e12, attention=69e12, attention_backward=40.1e12))
    assert plan(request, slow).seconds.total == pytest.approx(10 * plan(request).seconds.total, rel=0.05)


# --- The command line ---


def run(capsys, *args):
    from longstraw_sdk.cli.app import app

    with pytest.raises(SystemExit) as ended:
        app(["plan", *args])
    return ended.value.code, capsys.readouterr().out


H200_MODEL = ("--model", "qwen3.6-27b", "--gpu-memory", "141GiB")


def test_json_has_what_scripts_rely_on(capsys):
    code, out = run(capsys, *H200_MODEL, "--prompt-tokens", "131_072", "--scope", "response", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] is True
    assert found["terms"].keys() == TERMS.keys()
    assert sum(term["gib"] for term in found["terms"].values()) == pytest.approx(found["peak_gib_per_gpu"])
    assert found["seconds"]["total"] == pytest.approx(sum(n for k, n in found["seconds"].items() if k != "total"))
    assert {"capture", "sample", "score", "replay"} < found["seconds"].keys()
    assert found["options"]["chunk_tokens"] == 8192


def test_the_arguments_it_prints_are_those_of_the_trainer(tmp_path):
    from longstraw_sdk.trainers import LongStrawGRPOConfig

    found = plan(PlanRequest(model="qwen3.6-27b", prompt_tokens=131_072, gpu_bytes=141 * GIB, scope="response"))
    config = LongStrawGRPOConfig(str(tmp_path), **found.config_arguments, report_to=[], bf16=False)
    assert config.chunk_tokens == found.options.chunk_tokens and config.gradient_scope == "response"


def test_a_plan_that_does_not_fit_ends_with_1_and_advice(capsys):
    code, out = run(capsys, *H200_MODEL, "--prompt-tokens", "1048576")
    text = " ".join(out.split())
    assert code == 1 and "does not fit" in text
    assert "GiB are missing per GPU; gradient accumulators takes most" in text
    assert 'gradient_scope="response" (a different gradient): fits' in text


def test_the_papers_rows_stand_beside_the_plan(capsys):
    code, out = run(
        capsys, *H200_MODEL, "--gpus", "8", "--prompt-tokens", "2097152", "--response-tokens", "2048",
        "--scope", "response", "--group", "8", "--context-parallel-size", "8",
    )  # fmt: skip
    assert code == 0 and "6,785.2 s" in out and "97.503 GB" in out
    assert "LongStrawGRPOConfig(" in out and "benchmarks/results" in out


def test_the_largest_prompt_on_the_command_line(capsys):
    code, out = run(capsys, *H200_MODEL, "--largest-prompt", "--scope", "response", "--json")
    found = json.loads(out)
    assert code == 0 and found["largest_prompt"] and found["prompt_tokens"] > 1_048_576


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt-tokens", "2M"], "write digits"),
        ([], "either --prompt-tokens N or --largest-prompt"),
        (["--prompt-tokens", "4096", "--host-memory", "lots"], "--host-memory='lots' is not a size"),
        (["--prompt-tokens", "4096", "--products-tflops", "0"], "positive number of FLOP/s"),
    ],
)
def test_mistakes_on_the_command_line(args, message):
    from longstraw_sdk.cli.app import app

    with pytest.raises(ConfigurationError) as found:
        app(["plan", *H200_MODEL, *args], standalone_mode=False)
    assert message in str(found.value)
