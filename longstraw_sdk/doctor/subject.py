"""What is examined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..errors import ConfigurationError
from ..types import GradientScope


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run that is to start. What is None is not examined.

    Args:
        model: a model folder or hub id.
        model_manifest: a run's `model-snapshot.json`, whose files the folder must still hold.
        dataset: a .jsonl or .parquet file, a folder or hub id.
        dataset_config, dataset_split: which part of it.
        output_dir: where the run will write.
        gpus: how many GPUs a node must have; None takes what there is, none included.
        prompt_tokens, response_tokens: the longest of each, which must fit in the model's positions, and on GPUs with
            `group` responses in memory.
        group, scope: responses per prompt, and the gradient scope.
        placement_plan: what `DirectRayPlan.to_json` wrote; the Ray cluster at `ray_address` must be what it needs.
        ray_address: `ip:port` of the head, or "auto".
        model_options: further arguments of `from_pretrained`, as `revision`.
    """

    model: str | None = None
    model_manifest: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    output_dir: Path | None = None
    gpus: int | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    group: int = 8
    scope: GradientScope = "full"
    placement_plan: Path | None = None
    ray_address: str = "auto"
    model_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scope not in get_args(GradientScope):
            allowed = ", ".join(map(repr, get_args(GradientScope)))
            raise ConfigurationError(f"scope={self.scope!r} is not known; allowed: {allowed}")
