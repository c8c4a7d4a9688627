"""Shared by every test: no network, one seed, threads that do not fight, reproducible Hypothesis runs."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import pytest
import torch
from hypothesis import settings
from rank_pool import RankPool

settings.register_profile("longstraw", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("longstraw")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # an xdist worker: the workers are the parallelism
        torch.set_num_threads(1)


@pytest.fixture
def seed() -> int:
    """The seed of this test; ask for it where further generators must follow it."""
    return 0


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    """Every test starts from the same random state, whatever ran before it or beside it."""
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def rank_pools():
    """Pools of 2 and 4 ranks by size. Their processes start with the first test that runs something there."""
    pools = {size: RankPool(size) for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()
