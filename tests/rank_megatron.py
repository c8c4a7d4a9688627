"""What the ranks of a `RankPool` run on Megatron's backend. They return plain values."""

from contextlib import contextmanager

import pytest
import rank_cases
import rank_experts
from torch import distributed as dist

from longstraw_sdk.backends import MegatronBackend

GROUPS = ("cp", "ep", "dp", "dp_cp", "expt_dp")


@contextmanager
def megatron(context_size, expert_size=1, **options):
    """A backend; while it is there, sessions that are given none take Megatron too."""
    backend = MegatronBackend(context_size, expert_size, **options)
    from megatron.core import parallel_state

    try:
        yield backend
    finally:
        parallel_state.destroy_model_parallel()


def group_table(context_size, expert_size):
    """Global ranks of each of this rank's groups."""
    with megatron(context_size, expert_size) as backend:
        ranks = [dist.get_process_group_ranks(getattr(backend.groups, name)) for name in GROUPS]
        sizes = [None if g is None else g.size for g in (backend.context, backend.experts, backend.world)]
    return ranks, sizes


class Counted:
    """Calls of `finalize_model_grads` while it is entered, and its results changed on the way."""

    def __init__(self, patch):
        from megatron.core import distributed

        self.n = 0
        finalize = distributed.finalize_model_grads

        def counted(*args, **kwargs):
            self.n += 1
            return finalize(*args, **kwargs)

        patch.setattr(distributed, "finalize_model_grads", counted)


def parity(architecture, context_size, case):
    """ParityResult of the small model, and how often gradients were finalized."""
    with megatron(context_size), pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        result = rank_cases.parity(architecture, None if case.dtype == "float32" else 3, case)
    return result, counted.n


def expert_parity(context_size, expert_size, case, fault=None, other_prompts=False, function="parity", **options):
    with megatron(context_size, expert_size), pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            FAULTS[fault](patch)
            fault = None
        counted, dispatched = Counted(patch), Dispatched(patch)
        if function == "routed_to_few":
            result = rank_experts.routed_to_few(context_size, expert_size, case)
        else:
            result = rank_experts.parity(context_size, expert_size, case, fault, other_prompts, **options)
    return result, counted.n, dispatched.n


class Dispatched:
    """Calls of Megatron's token dispatcher."""

    def __init__(self, patch):
        from longstraw_sdk.backends import megatron_experts

        self.n = 0
        dispatch = megatron_experts.MegatronDispatch.__call__

        def counted(*args):
            self.n += 1
            return dispatch(*args)

        patch.setattr(megatron_experts.MegatronDispatch, "__call__", counted)


FAULTS = {}
