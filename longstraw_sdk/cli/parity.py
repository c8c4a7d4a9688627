"""`longstraw parity`: replay against conventional autograd, on tiny models or on a model folder."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from ..lora import base_model_of
from ..types import CausalLM

if TYPE_CHECKING:
    from ..adapter import ResidentStateAdapter
    from ..evidence.parity import ParityResult

_MODES = {"full": ("full", "live"), "response": ("response", "live"), "frozen": ("full", "frozen")}


def parity(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Built-in tiny model (qwen36, llama, qwen2, qwen3, mistral, glm52) or a model folder. Repeats."
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float64, float32 or bfloat16. Repeats.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="full, response or frozen. Repeats.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length P.")] = 100,
    response_tokens: Annotated[str, typer.Option(help="Response lengths, comma-separated.")] = "7,23,12,1",
    chunk_tokens: Annotated[int, typer.Option(min=2, help="Prompt tokens per forward.")] = 16,
    page_tokens: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 8,
    adapter: Annotated[str | None, typer.Option(help="module:Class; picked by model type if unset.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompt, responses, loss weights and LoRA.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Write a report: all figures, models and versions, under one sha256.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Compare nothing; check the sha256 of a report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """Compare log-probs and LoRA gradients of replay with conventional autograd; exit 1 if a bound is passed.

    The conventional side holds the whole graph of the whole sequence, so keep --prompt-tokens to what fits.
    """
    if check is not None:
        from ..evidence.parity_report import read_report

        report = read_report(check)
        failed = [row for row in report["rows"] if not row["passed"]]
        typer.echo(f"{len(report['rows'])} comparisons, {len(failed)} failed; sha256 {report['sha256']}")
        raise typer.Exit(1 if failed else 0)
    from ..evidence.parity import ParityCase, check_parity

    unknown = [m for m in mode or () if m not in _MODES]
    if unknown:
        raise ConfigurationError(f"--mode {unknown[0]!r} is not known; allowed: {', '.join(_MODES)}")
    try:
        lengths = tuple(int(n) for n in response_tokens.split(","))
    except ValueError:
        raise ConfigurationError(f"--response-tokens {response_tokens!r} must be lengths such as 7,23,12,1") from None
    results = []
    models = {}
    names = model or ["qwen36", "llama", "qwen3"]
    for name in names:
        subject, chosen = _load(name, adapter, seed)
        if output is not None:
            from ..evidence.model_snapshot import model_snapshot

            models[name] = model_snapshot(subject)
        for one_dtype, one_mode in itertools.product(dtype or ["float64", "float32", "bfloat16"], mode or list(_MODES)):
            scope, prefix_adapter = _MODES[one_mode]
            case = ParityCase(
                dtype=one_dtype,
                gradient_scope=scope,  # type: ignore[arg-type]
                prefix_adapter=prefix_adapter,  # type: ignore[arg-type]
                prompt_tokens=prompt_tokens,
                response_tokens=lengths,
                chunk_tokens=chunk_tokens,
                page_tokens=page_tokens,
                seed=seed,
            )
            result = check_parity(subject, case, chosen)
            results.append((name, one_mode, result))
            if not as_json:
                _print_row(name, one_mode, result, first=len(results) == 1)
    rows = [{"model": n, "mode": m} | r.as_dict() for n, m, r in results]
    if output is not None:
        from ..evidence.parity_report import write_report

        sha256 = write_report(output, rows, models)
        if not as_json:
            typer.echo(f"{output}: sha256 {sha256}")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if not all(result.passed for _, _, result in results):
        raise typer.Exit(1)


def _print_row(name: str, mode: str, result: ParityResult, *, first: bool) -> None:
    if first:
        typer.echo(
            f"{'model':<12} {'mode':<9} {'dtype':<9} {'log-prob diff':>13} {'grad rel. L2':>13} {'allowed':>9} "
            f"{'cosine':>13}"
        )
    verdict = "ok" if result.passed else "FAILED"
    typer.echo(
        f"{name[-12:]:<12} {mode:<9} {result.case.dtype:<9} {result.logp_error:>13.1e} {result.gradient_error:>13.1e} "
        f"{result.allowed:>9.1e} {result.cosine:>13.10f}  {verdict}"
    )


def _load(name: str, adapter: str | None, seed: int) -> tuple[CausalLM, ResidentStateAdapter | None]:
    """The LoRA model and the adapter to check it with."""
    from ..evidence.parity import randomize_lora
    from ..evidence.tiny import ARCHITECTURES, tiny_model

    chosen = _adapter(adapter)
    if name in ARCHITECTURES:
        subject = tiny_model(name, seed=seed)
        return subject, chosen or _default_adapter(subject)
    if not Path(name).is_dir():
        raise ConfigurationError(
            f"--model {name!r} is neither a built-in architecture ({', '.join(ARCHITECTURES)}) nor a model folder"
        )
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    chosen = chosen or _default_adapter(base)
    subject = get_peft_model(base, chosen.lora_config(r=8))
    randomize_lora(subject, seed, std=0.02)
    return subject, chosen


def _default_adapter(model: CausalLM) -> ResidentStateAdapter:
    """Sparse choices on a tape: rounding flips them, and then two right computations differ."""
    from ..adapter import adapter_for
    from ..models.glm52 import GLM52Adapter

    chosen = adapter_for(base_model_of(model))
    return GLM52Adapter(tape="replay") if isinstance(chosen, GLM52Adapter) else chosen


def _adapter(name: str | None) -> ResidentStateAdapter | None:
    if name is None:
        return None
    module_name, _, class_name = name.partition(":")
    try:
        found: ResidentStateAdapter = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--adapter {name!r} cannot be loaded ({error}); write module:Class") from error
    return found
