"""What the ranks of a `RankPool` run."""

import dataclasses

from longstraw_sdk.evidence.parity import check_parity
from longstraw_sdk.evidence.tiny import tiny_model


def slow_decay(model):
    """States that remember for hundreds of tokens: what one rank fails to hand to the next then shows."""
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.data.fill_(-5.0)
    return model


def parity(architecture, n_layers, case):
    model = slow_decay(tiny_model(architecture, n_layers=n_layers))
    result = check_parity(model, dataclasses.replace(case, context_parallel_size=dist_size()))
    return result.passed, str(result)


def dist_size():
    import os

    return int(os.environ["WORLD_SIZE"])
