"""Received bytes by phase: of a rank that a `RankPool` runs, and of the simulation of one."""

import os

import torch

from longstraw_sdk import LongStrawSession
from longstraw_sdk.backends import AccelerateBackend
from longstraw_sdk.evidence.tiny import tiny_model

CHUNK_TOKENS = 32
VOCAB = 97


def tokens(n, seed):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def received_by_real_rank(architecture, n_prefix, n_response):
    return received(AccelerateBackend(int(os.environ["WORLD_SIZE"])), architecture, n_prefix, n_response)


def received(backend, architecture, n_prefix, n_response):
    """Phase -> (bytes received in all but uneven exchanges, bytes received in those) of one training step."""
    context = backend.context
    exchange, in_exchanges = context.exchange_uneven, [0]

    def watched(*args):
        before = context.received_bytes
        out = exchange(*args)
        in_exchanges[0] += context.received_bytes - before
        return out

    context.exchange_uneven = watched
    found = {}

    def note(phase):
        evenly = context.received_bytes - in_exchanges[0]
        found[phase] = tuple(now - sum(before) for now, before in zip((evenly, in_exchanges[0]), sums(), strict=True))

    def sums():
        return [[counts[i] for counts in found.values()] for i in range(2)]

    options = {"chunk_tokens": CHUNK_TOKENS, "page_tokens": 8, "poison": True, "probe": False}
    with LongStrawSession(tiny_model(architecture), backend=backend, **options) as session:
        note("start")
        with session.capture(tokens(n_prefix + 1, 1)) as prefix:
            note("capture")
            prefix.replay(tokens(n_response, 2)).logps.sum().backward()
            note("replay")
        note("sweep")
        session.finalize()
        note("finalize")
    return found
