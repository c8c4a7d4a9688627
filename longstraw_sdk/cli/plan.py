"""`longstraw plan`: does a group fit, how, and how long does its step take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..planner import Plan

GIB = 2**30


def plan(
    model: Annotated[
        str,
        typer.Option(help="A folder with config.json, a Hub id, or a built-in geometry: qwen3.6-27b, glm-5.2."),
    ],
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, with its unit: 141GiB, 80GB.")],
    gpus: Annotated[int, typer.Option(help="GPUs of all nodes together.")] = 1,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for pages, per GPU; without it pages stay on GPUs.")
    ] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Prompt tokens, such as 2097152 or 2_097_152.")] = None,
    largest_prompt: Annotated[
        bool, typer.Option("--largest-prompt", help="Search the largest prompt that fits instead.")
    ] = False,
    response_tokens: Annotated[str, typer.Option(help="Tokens of every response.")] = "1024",
    group: Annotated[int, typer.Option(help="Responses per prompt.")] = 8,
    scope: Annotated[str, typer.Option(help="full or response.")] = "full",
    prefix_adapter: Annotated[str, typer.Option(help="live or frozen.")] = "live",
    lora_rank: Annotated[int, typer.Option(help="LoRA rank, on every linear.")] = 16,
    base_weights: Annotated[str, typer.Option(help="model (dtype of the config) or nf4.")] = "model",
    checkpointing: Annotated[bool, typer.Option(help="Forward each layer again in backward.")] = True,
    sampled: Annotated[bool, typer.Option(help="Responses are drawn from the resident state.")] = True,
    chunk_tokens: Annotated[int | None, typer.Option(help="Fix it instead of choosing.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Fix it instead of choosing.")] = None,
    replay_tokens: Annotated[int | None, typer.Option(help="Fix it instead of choosing.")] = None,
    tier: Annotated[str | None, typer.Option(help="Fix where pages live: cuda, split or cpu.")] = None,
    context_parallel_size: Annotated[int | None, typer.Option(help="Fix it instead of choosing.")] = None,
    expert_parallel_size: Annotated[int | None, typer.Option(help="Fix it instead of choosing.")] = None,
    device: Annotated[str, typer.Option(help="h200, or a JSON file of longstraw bench with measured ceilings.")] = (
        "h200"
    ),
    products_tflops: Annotated[float | None, typer.Option(help="Ceiling of matrix products instead.")] = None,
    attention_tflops: Annotated[float | None, typer.Option(help="Ceiling of attention instead.")] = None,
    attention_backward_tflops: Annotated[float | None, typer.Option(help="The same of its backward.")] = None,
    node_gpus: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    within_node_gb: Annotated[float, typer.Option(help="GB/s that a GPU receives within its node.")] = 400.0,
    between_nodes_gb: Annotated[float, typer.Option(help="GB/s that a GPU receives from other nodes.")] = 50.0,
    reserve: Annotated[
        str | None, typer.Option(help="Memory per GPU to leave to CUDA and fragmentation; default 2 GiB and 2%.")
    ] = None,
    plain_operators: Annotated[
        bool, typer.Option("--plain-operators", help="Plan for PyTorch alone, without fused kernels.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan a step on a group from a config alone. Exit code 0 if it fits, 1 if not, 2 for mistakes."""
    from ..planner import Machine, PlanRequest, parse_size
    from ..planner import largest_prompt as search
    from ..planner import plan as find
    from ..planner.devices import load_profile
    from ..planner.links import Links

    if largest_prompt == (prompt_tokens is not None):
        raise ConfigurationError("give either --prompt-tokens N or --largest-prompt")
    if min(within_node_gb, between_nodes_gb) <= 0:
        raise ConfigurationError("--within-node-gb and --between-nodes-gb must be positive")
    if node_gpus < 1:
        raise ConfigurationError(f"--node-gpus must be at least 1, got {node_gpus}")
    ceilings = {
        "products": products_tflops,
        "attention": attention_tflops,
        "attention_backward": attention_backward_tflops,
    }
    machine = Machine(
        device=load_profile(device).with_ceilings(**{n: None if t is None else t * 1e12 for n, t in ceilings.items()}),
        links=Links(node_ranks=node_gpus, within_node=within_node_gb * 1e9, between_nodes=between_nodes_gb * 1e9),
        reserve=None if reserve is None else parse_size("--reserve", reserve),
        kernels=not plain_operators,
    )
    request = PlanRequest(
        model=model,
        gpus=gpus,
        gpu_bytes=parse_size("--gpu-memory", gpu_memory),
        host_bytes=0 if host_memory is None else parse_size("--host-memory", host_memory),
        prompt_tokens=2 if prompt_tokens is None else _tokens("--prompt-tokens", prompt_tokens),
        response_tokens=_tokens("--response-tokens", response_tokens),
        group=group,
        scope=scope,  # type: ignore[arg-type]
        prefix_adapter=prefix_adapter,  # type: ignore[arg-type]
        lora_rank=lora_rank,
        base_weights=base_weights,  # type: ignore[arg-type]
        checkpointing=checkpointing,
        sampled=sampled,
        chunk_tokens=chunk_tokens,
        page_tokens=page_tokens,
        replay_tokens=replay_tokens,
        tier=tier,  # type: ignore[arg-type]
        context_parallel_size=context_parallel_size,
        expert_parallel_size=expert_parallel_size,
    )
    found = search(request, machine) if largest_prompt else find(request, machine)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(found, Console())
    if not found.fits:
        raise typer.Exit(1)


def _tokens(name: str, text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isascii() or not digits.isdigit() or int(digits) < 1 or text.startswith("_"):
        raise ConfigurationError(f"{name}={text!r} is not a number of tokens; write digits, as 2097152 or 2_097_152")
    return int(digits)


def _print(found: Plan, console: Console) -> None:
    request = found.request
    verdict = "[bold green]fits[/]" if found.fits else "[bold red]does not fit[/]"
    what = (
        f"{found.facts.name}, {request.prompt_tokens:,} prompt tokens, G={request.group} x {request.response_tokens:,}"
    )
    kind = f"{request.scope} scope, {request.gpus} GPUs of {request.gpu_bytes / GIB:.1f} GiB"
    largest = " (the largest prompt)" if found.searched_prompt else ""
    console.print(f"{escape(what)}{largest}, {kind}: {verdict}", highlight=False)
    console.print(_memory_table(found))
    console.print(_seconds_table(found))
    for line in _lines(found):
        console.print(escape(line), highlight=False)
    if found.paper:
        console.print(_paper_table(found))


def _memory_table(found: Plan) -> Table:
    from ..planner.memory import TERMS

    table = Table("GiB per GPU", box=SIMPLE, pad_edge=False, caption=f"fullest in {found.memory.fullest.phase}")
    for phase in found.memory.phases:
        table.add_column(phase.phase, justify="right")
    for name in TERMS:
        table.add_row(name, *(f"{phase.terms[name] / GIB:.2f}" for phase in found.memory.phases))
    table.add_section()
    table.add_row("all", *(f"[bold]{phase.n_bytes / GIB:.2f}[/]" for phase in found.memory.phases))
    return table


def _seconds_table(found: Plan) -> Table:
    table = Table("seconds (estimates)", box=SIMPLE, pad_edge=False)
    for name in ("computing", "from host memory", "links", "all"):
        table.add_column(name, justify="right")
    for phase in found.seconds.phases:
        table.add_row(phase.phase, *(f"{n:,.2f}" for n in (phase.compute, phase.staging, phase.links, phase.seconds)))
    table.add_section()
    table.add_row("step", "", "", "", f"[bold]{found.seconds.total:,.1f}[/]")
    return table


def _lines(found: Plan) -> Iterator[str]:
    arguments = ", ".join(f"{name}={value!r}" for name, value in found.config_arguments.items())
    yield f"LongStrawGRPOConfig({arguments})"
    if found.memory.host_bytes:
        yield f"Host memory: {found.memory.host_bytes / GIB:.1f} GiB per GPU for pages."
    if not found.fits:
        terms = found.memory.fullest.terms
        largest = max((name for name in terms if name != "reserve"), key=lambda name: terms[name])
        missing, host = found.short_bytes / GIB, (found.memory.host_bytes - found.request.host_bytes) / GIB
        if missing > 0:
            yield f"{missing:.1f} GiB are missing per GPU; {largest} takes most, {terms[largest] / GIB:.1f} GiB."
        if host > 0:
            yield f"{host:.1f} GiB of host memory are missing per GPU."
        yield from found.advice
    yield from found.notes
    yield f"Seconds: from {found.seconds.source}."
    yield from (f"- {line}" for line in found.seconds.assumptions)


def _paper_table(found: Plan) -> Table:
    from ..planner.paper import PAPER_SETTING

    table = Table("arXiv 2607.14952", "figure", "published", "this plan", box=SIMPLE, pad_edge=False)
    table.caption, table.caption_justify = PAPER_SETTING, "left"
    seconds = {phase.phase: phase.seconds for phase in found.seconds.phases}
    ours = {
        "capture": f"{seconds['capture']:,.0f} s",
        f"step {found.request.scope} {found.request.group}": f"{found.seconds.total:,.0f} s",
        f"peak {found.request.scope}": f"{found.peak_bytes / 1e9:,.1f} GB",
        f"replay {found.request.scope}": f"{seconds['replay'] / found.request.group:,.1f} s",
    }
    for row in found.paper:
        same = (row["gpus"], row["prompt_tokens"]) == (
            found.options.context_parallel_size,
            found.request.prompt_tokens,
        )
        for key, figure in row["figures"].items():
            place = f"{row['gpus']} GPUs, {row['prompt_tokens']:,}"
            table.add_row(place, key, figure, ours.get(key, "") if same else "")
    return table
