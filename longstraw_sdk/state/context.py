"""Context parallelism: the ranks that share one prompt, and which of its tokens each of them runs.

Every forward of T new tokens is split over the ranks by position, in capture, replay and sweep alike, and a rank keeps
the rows that it computed. So each chunk of the prompt lies evenly on all ranks: attention to the prefix costs every
rank the same from the first chunk to the last, where one long span per rank would leave all but the first idle early
on and give the last most of the causal work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ..errors import ConfigurationError, NumericsError

_SAME_LOSS = 1e-3
"""Relative difference that rounding explains between losses computed alike on all ranks, in bfloat16 at worst."""


class TokenSlice(NamedTuple):
    """The tokens of one forward that this rank runs: `n_real` from `start` on, padded to `width` as on every rank."""

    start: int
    n_real: int
    width: int

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, width]; padding repeats the first token, whatever it is: causality hides it."""
        own = tokens[:, self.start : self.start + self.n_real]
        return torch.cat([own, tokens[:, :1].expand(-1, self.width - self.n_real)], 1)


class ContextGroup:
    """The ranks of one prompt. Blocking collectives over stacked tensors; `received_bytes` counts what comes in.

    Every method must be called by all ranks of the group in the same order, with equal shapes.
    """

    def __init__(self, group: dist.ProcessGroup, name: str = "context"):
        self.group = group
        self.name = name
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.received_bytes = 0

    def check_device(self, device: torch.device) -> None:
        """Raise `ConfigurationError` if the group's backend cannot carry tensors on `device`."""
        backend = dist.get_backend(self.group)
        carried = {"nccl": "cuda", "gloo": "cpu"}.get(backend, device.type)
        if carried != device.type:
            raise ConfigurationError(
                f"the ranks are connected by {backend}, which carries tensors on {carried} here, but the model is on "
                f"{device}; move the model to {carried}, or initialise torch.distributed with "
                f"{'nccl' if device.type == 'cuda' else 'gloo'}"
            )

    def slice_of(self, n_tokens: int, min_width: int = 1, rank: int | None = None) -> TokenSlice:
        """The part of `n_tokens` of `rank` (this one if None); a rank behind the last token has none."""
        width = max(min_width, -(-n_tokens // self.size))
        start = min((self.rank if rank is None else rank) * width, n_tokens)
        return TokenSlice(start, min(width, n_tokens - start), width)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[W, *x.shape], one entry per rank."""
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        self._count(x, self.size - 1)
        dist.all_gather(list(out.unbind(0)), x, group=self.group)
        return out

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] per rank -> [B, W * T, ...], the tokens of all ranks in their order."""
        return self.gather(x).transpose(0, 1).flatten(1, 2)

    def by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """[B, W * T, ...] as `gather_tokens` gives it -> [W, B, T, ...], a view."""
        return x.unflatten(1, (self.size, -1)).transpose(0, 1)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Entry s of `x` [W, ...] goes to rank s; returns what every rank had for this one, [W, ...]."""
        return self.start_exchange(x)()

    def start_exchange(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`exchange`, begun: what is returned waits for it, so that something else can be computed meanwhile."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._count(x[0], self.size - 1)
        work = dist.all_to_all_single(out, x, group=self.group, async_op=True)

        def finish() -> torch.Tensor:
            work.wait()
            return out

        return finish

    def exchange_uneven(self, x: torch.Tensor, n_sent: list[int], n_received: list[int]) -> torch.Tensor:
        """The first `n_sent[0]` rows of `x` [N, ...] go to rank 0, and so on; returns what came, in rank order."""
        x = x.contiguous()
        out = x.new_empty(sum(n_received), *x.shape[1:])
        self.received_bytes += out[:1].nbytes * (sum(n_received) - n_received[self.rank]) if len(out) else 0
        dist.all_to_all_single(out, x, n_received, n_sent, group=self.group)
        return out

    def sum_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's entry of the sum of all ranks' `x` [W, ...]. Summed in rank order, so that it is reproducible."""
        return self.exchange(x).sum(0)

    def agree(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank."""
        own = torch.tensor([flag], dtype=torch.uint8, device=self._device)
        return bool(self.gather(own).all())

    def agree_on(self, flag: bool, value: int) -> tuple[bool, bool]:
        """Whether `flag` is true on every rank, and whether `value`, which fits in 63 bits, is equal on every rank."""
        found = self.gather(torch.tensor([flag, value], dtype=torch.int64, device=self._device))
        return bool(found[:, 0].all()), bool((found[:, 1] == value).all())

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, by pickle between the ranks of one run; for checks, not for the hot path."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x`."""
        return self.gather(x.to(self._device))[0].to(x.device)

    @property
    def _device(self) -> torch.device:
        backend = dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def _count(self, x: torch.Tensor, n: int) -> None:
        self.received_bytes += n * x.nbytes


class RowMap:
    """Where the row of a prefix token is: each rank keeps its slices of all chunks, one behind the other."""

    def __init__(self, context: ContextGroup, min_width: int):
        self.context = context
        self.min_width = min_width
        self._bounds = [0]
        self._widths: list[int] = []
        self._firsts = [[0] * context.size]  # per chunk and rank, the row that the chunk's slice begins with
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._own = torch.arange(0)

    def append(self, n_tokens: int) -> None:
        """A chunk of `n_tokens` was stored."""
        slices = [self.context.slice_of(n_tokens, self.min_width, rank) for rank in range(self.context.size)]
        self._bounds.append(self._bounds[-1] + n_tokens)
        self._widths.append(slices[0].width)
        self._firsts.append([first + s.n_real for first, s in zip(self._firsts[-1], slices, strict=True)])
        self._tensors = ()
        own = slices[self.context.rank]
        first = self._bounds[-2] + own.start
        self._own = torch.cat([self._own, torch.arange(first, first + own.n_real, device=self._own.device)])

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, row) of each position, LongTensors of its shape; all positions must be stored."""
        if not self._tensors or self._tensors[0].device != positions.device:
            parts = (self._bounds, self._widths, self._firsts)
            self._tensors = tuple(torch.tensor(p, dtype=torch.int64, device=positions.device) for p in parts)
        bounds, widths, firsts = self._tensors
        chunk = torch.searchsorted(bounds, positions, right=True) - 1
        offset = positions - bounds[chunk]
        rank = offset // widths[chunk]
        return rank, firsts[chunk, rank] + offset % widths[chunk]

    def own_positions(self, n_rows: int, device: torch.device) -> torch.Tensor:
        """Position of each of the first `n_rows` rows of this rank, ascending."""
        self._own = self._own.to(device)  # every layer of every forward asks
        return self._own[:n_rows]


class GatherReplicated(torch.autograd.Function):
    """[...] per rank -> [W, ...] for consumers that compute the same on every rank, so that no gradient is summed.

    Backward raises `NumericsError` on every rank if what arrives there is not the same on all.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        ctx.group = group
        return group.gather(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        gradient = grad_outputs[0]
        flat = gradient.flatten().double()
        # Two numbers tell gradients apart that differ by more than rounding; comparing all would double the traffic.
        probe = torch.stack([flat.norm(), (flat * torch.arange(len(flat), device=flat.device).cos()).sum()])
        found = ctx.group.gather(probe)
        allowed = _SAME_LOSS * float(found[:, 0].nan_to_num(0.0, 0.0).max())
        if not torch.allclose(found, found[:1].expand_as(found), rtol=0.0, atol=allowed, equal_nan=True):
            raise NumericsError(
                f"the {ctx.group.size} ranks of a context computed different losses of one response (gradient norms "
                f"{', '.join(f'{norm:.6g}' for norm in found[:, 0].tolist())}); give all of them the same rewards, "
                "advantages and old log-probs. Nothing was added to the LoRA gradients by this backward pass"
            )
        return gradient[ctx.group.rank], None
