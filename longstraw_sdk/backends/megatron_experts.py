"""Tokens to experts on other ranks and back, by Megatron's dispatcher."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..ops.expert_exchange import Run
from ..state import ContextGroup
from .megatron_cpu import dispatcher_class, dispatching
from .megatron_import import transformer_config


class MegatronDispatch:
    """`ops.through_experts` by `MoEAlltoAllTokenDispatcher`: each row goes to one expert, with probability one.

    The dispatcher knows routes as masks: [N, experts] in a byte each and again in the dtype of the rows.
    """

    def __init__(self, groups: Any):
        """`groups` is a `ProcessGroupCollection`."""
        self._groups = groups

    def __call__(
        self, rows: torch.Tensor, experts: torch.Tensor, n_experts: int, group: ContextGroup, run: Run
    ) -> torch.Tensor:
        n_own = n_experts // group.size
        own = list(range(group.rank * n_own, (group.rank + 1) * n_own))
        dispatcher = dispatcher_class()(n_own, own, _config(n_experts, group.size), self._groups)  # one call's state
        routes = torch.zeros(len(rows), n_experts, dtype=torch.bool, device=rows.device)
        routes.scatter_(1, experts[:, None], True)
        # Ones that need no gradient: on a rank without tokens nothing would tie theirs to the result, and where only
        # some ranks exchange them in backward, all hang. What ties the rows is `run`.
        with dispatching():
            sent = dispatcher.dispatch_preprocess(rows, routes, routes.to(rows.dtype))
            received, counts, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
        results = run(received, counts.tolist())
        with dispatching():
            # Rows came sorted by expert, so the permutation that `combine_postprocess` would undo is none.
            returned: torch.Tensor = dispatcher.token_combine(dispatcher.combine_preprocess(results))
        return returned


@cache
def _config(n_experts: int, size: int) -> Any:
    return transformer_config(
        num_moe_experts=n_experts,
        moe_ffn_hidden_size=1,
        moe_router_topk=1,
        moe_router_pre_softmax=True,  # asked for with top-1, and used by the router alone
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=size,
        add_bias_linear=False,
    )
