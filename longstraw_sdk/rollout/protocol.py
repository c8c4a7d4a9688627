"""What a trainer asks of a sampler, and what it accepts as an answer."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import SamplerError
from .adapter_export import ExportedAdapter


@dataclass(frozen=True)
class Completion:
    """One response: token ids [R] and the log-probs [R] that they were drawn with. Text never takes part."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Responses of several prompts under one adapter.

    Args:
        request_id: names the request in files and logs; letters, digits and "-".
        adapter: the policy, as an exported folder.
        prompts: token ids of each prompt.
        n_completions: how many of each prompt are wanted (G).
        vocab_size: ids at or above it are no tokens of the model.
        stop_token_ids: a response ends behind the first of these, which belongs to it.
    """

    request_id: str
    adapter: ExportedAdapter
    prompts: tuple[tuple[int, ...], ...]
    n_completions: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int

    @property
    def n_tokens_bound(self) -> int:
        """The most tokens that an answer holds."""
        return len(self.prompts) * self.n_completions * self.max_new_tokens

    def describe(self) -> dict[str, Any]:
        """All but the prompts' ids, as JSON."""
        return {
            "request_id": self.request_id,
            "adapter": {"name": self.adapter.name, "sha256": self.adapter.sha256},
            "prompts": [{"sha256": prompt_identity(ids), "n_tokens": len(ids)} for ids in self.prompts],
            "n_completions": self.n_completions,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop_token_ids": list(self.stop_token_ids),
        }


class Sampler(Protocol):
    """Draws responses outside of the trainer's process."""

    name: str
    max_logprob_difference: float
    """Mean absolute difference, in nats, between the sampler's log-probs and the trainer's over one generation batch,
    above which the two cannot be the same policy."""

    exclusive: bool
    """Whether sampler and trainer must never hold their devices at once; the trainer then moves its model off before
    `acquire` and back after `release`."""

    def acquire(self) -> None:
        """Take the devices. Called before `sample`, after the trainer has released its own if `exclusive`."""

    def sample(self, request: RolloutRequest) -> list[list[Completion]]:
        """`n_completions` of each prompt, in the order of the prompts. Raises `SamplerError`."""

    def release(self) -> None:
        """Give the devices back. Called after `sample`, whether or not it raised."""

    def describe(self) -> dict[str, Any]:
        """What a receipt says of the sampler, as JSON; no secret."""


def prompt_identity(token_ids: Sequence[int]) -> str:
    """sha256 over the ids as little-endian 64-bit integers."""
    ids = array("q", token_ids)
    if ids.itemsize != 8 or array("H", [1]).tobytes() != b"\1\0":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


def prompt_identities(prompts: Sequence[Sequence[int]]) -> list[str]:
    """`prompt_identity` of each; equal prompts in a row, as of a group, are hashed once."""
    found: list[str] = []
    for i, ids in enumerate(prompts):
        found.append(found[-1] if i and ids == prompts[i - 1] else prompt_identity(ids))
    return found


def checked(request: RolloutRequest, answer: Sequence[Sequence[Completion]], sampler: str) -> list[list[Completion]]:
    """The answer, if it is one to the request. Raises `SamplerError` with everything that is wrong first of it."""
    if len(answer) != len(request.prompts):
        raise SamplerError(f"{sampler} answered for {len(answer)} prompts of {len(request.prompts)}")
    for i, completions in enumerate(answer):
        if len(completions) != request.n_completions:
            raise SamplerError(
                f"{sampler} returned {len(completions)} responses to prompt {i}; {request.n_completions} were asked for"
            )
        for j, completion in enumerate(completions):
            if problem := _problem(request, completion):
                raise SamplerError(f"{sampler}, response {j} to prompt {i}: {problem}")
    return [list(completions) for completions in answer]


def _problem(request: RolloutRequest, completion: Completion) -> str | None:
    ids, logprobs = completion.token_ids, completion.logprobs
    if not 1 <= len(ids) <= request.max_new_tokens:
        return f"it has {len(ids)} tokens; allowed: 1 to {request.max_new_tokens}"
    if len(logprobs) != len(ids):
        return f"it has {len(ids)} tokens and {len(logprobs)} log-probs"
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < request.vocab_size:
            return f"token {place} is {token!r}; allowed: integers from 0 below {request.vocab_size}"
        if not isinstance(logprob, int | float) or not -1e6 < logprob <= 1e-3:
            return f"the log-prob of token {place} is {logprob!r:.40}; allowed: finite numbers that are not positive"
        if token in request.stop_token_ids and place + 1 < len(ids):
            return f"it goes on behind the stop token {token} at place {place}"
    if len(ids) < request.max_new_tokens and ids[-1] not in request.stop_token_ids:
        return (
            f"it ends after {len(ids)} of {request.max_new_tokens} tokens without a stop token "
            f"({', '.join(map(str, request.stop_token_ids))}), which must be among its ids"
        )
    return None
