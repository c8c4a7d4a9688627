"""Whether the longest prompt and its group fit, by the planner."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import LongStrawError
from .check import Check
from .subject import Subject

GIB = 2**30
HOST_SHARE = 0.5
"""Of the host's memory that pages may take; the rest is for the processes and the model while it loads."""


def examine(subject: Subject) -> Iterator[Check]:
    """Nothing without a GPU, or where the model or a length is not known."""
    if not torch.cuda.is_available() or None in (subject.model, subject.prompt_tokens, subject.response_tokens):
        return
    from ..planner import PlanRequest, plan
    from ..planner.devices import memory_of

    assert subject.model and subject.prompt_tokens and subject.response_tokens
    n_gpus = torch.cuda.device_count()
    host = memory_of(torch.device("cpu"))
    try:
        found = plan(
            PlanRequest(
                model=subject.model,
                gpus=n_gpus if subject.gpus is None else max(1, subject.gpus),
                gpu_bytes=min(memory_of(torch.device("cuda", i)) for i in range(n_gpus)),
                host_bytes=int(HOST_SHARE * host / n_gpus),
                prompt_tokens=subject.prompt_tokens,
                response_tokens=subject.response_tokens,
                group=subject.group,
                scope=subject.scope,
            )
        )
    except LongStrawError as error:
        yield Check("memory plan", True, f"not planned: {error}", "see longstraw plan")
        return
    peak = f"{found.peak_bytes / GIB:.1f} GiB per GPU at {subject.prompt_tokens:,} prompt tokens, G={subject.group}"
    instead = "take a shorter prompt, more GPUs or gradient_scope='response'"
    remedy = None if found.fits else " ".join(found.advice) or instead
    yield Check("memory plan", found.fits, f"{'fits' if found.fits else 'does not fit'}: {peak}", remedy)
