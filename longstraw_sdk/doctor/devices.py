"""GPUs, their memory and links, and the host's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import distributed as dist

from .check import Check
from .subject import Subject

GIB = 2**30
LEAST_FREE = 0.9
"""Share of a GPU's memory that must be free: what another process holds is missing in the middle of a step."""


def examine(subject: Subject) -> Iterator[Check]:
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield _gpus(subject.gpus, n_gpus)
    for index in range(n_gpus):
        yield _memory(index)
    if n_gpus > 1:
        yield _links(n_gpus)
        yield _nccl()
    yield _host()


def _gpus(wanted: int | None, n_gpus: int) -> Check:
    names = sorted({torch.cuda.get_device_name(i) for i in range(n_gpus)})
    found = f"{n_gpus} GPUs ({', '.join(names)}), CUDA {torch.version.cuda}" if n_gpus else "no GPU: runs on the CPU"
    if wanted is not None and n_gpus < wanted:
        remedy = (
            f"{wanted} are asked for; look at nvidia-smi and CUDA_VISIBLE_DEVICES, and install a PyTorch for CUDA "
            f"if `python -c 'import torch; print(torch.version.cuda)'` prints None (here {torch.version.cuda})"
        )
        return Check("gpus", False, found, remedy)
    if len(names) > 1:
        return Check("gpus", True, found, "ranks of a context wait for the slowest: use GPUs of one kind")
    return Check("gpus", True, found)


def _memory(index: int) -> Check:
    free, total = torch.cuda.mem_get_info(index)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    remedy = None if free >= LEAST_FREE * total else "end the process that holds the rest (nvidia-smi names it)"
    return Check(f"memory of GPU {index}", remedy is None, found, remedy)


def _links(n_gpus: int) -> Check:
    pairs = [(a, b) for a in range(n_gpus) for b in range(n_gpus) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return Check("gpu links", True, f"all {n_gpus} GPUs reach each other's memory")
    return Check(
        "gpu links",
        True,
        f"{len(apart)} of {len(pairs)} pairs of GPUs do not reach each other's memory: traffic goes through the host",
        "keep the ranks of a context on GPUs that are linked (nvidia-smi topo -m)",
    )


def _nccl() -> Check:
    if dist.is_available() and dist.is_nccl_available():
        return Check("nccl", True, "NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return Check("nccl", False, "this PyTorch has no NCCL", "install the Linux build of PyTorch for CUDA")


def _host() -> Check:
    from ..planner.devices import memory_of

    return Check("host", True, f"{os.cpu_count()} cores, {memory_of(torch.device('cpu')) / GIB:.0f} GiB of memory")
