"""What every test shares: one pool of ranks, one thread per process, and reproducible random cases."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import Ranks

# Before anything imports torch or numpy, here and in every process that a test starts: two cores are shared by up to four
# ranks, and a sum must not depend on how many threads happened to take part in it.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Before anything imports triton: without a GPU its kernels run in its interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton warns where nobody says whether it may fuse products and sums, and warnings are errors here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

settings.register_profile("zoo", derandomize=True, deadline=None)
settings.load_profile("zoo")


@pytest.fixture(scope="session")
def _pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool: Ranks) -> Ranks:
    """`ranks.run(function, world, *args)`: the results of `function(rank, world, *args)` on `world` gloo ranks."""
    return _pool
