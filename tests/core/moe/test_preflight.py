"""The small exchange before training: every dispatcher passes it, and a rank that does not take part is named with its tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from core.config.architecture import MoE, Router
from core.config.mapping import DispatcherName, ParallelConfig
from core.errors import ParallelError
from core.moe.dispatch.alltoall import AllToAllDispatcher
from core.moe.dispatch.preflight import preflight
from core.parallel.groups import groups_for, one_rank
from tests.core.shares import place_on
from tests.ranks import Ranks, RanksFailedError

NAMES: tuple[DispatcherName, ...] = ("allgather", "alltoall", "flex")
MODEL = MoE(experts=12, top_k=3, expert_ffn=7, router=Router(score="softmax", normalise=True))
WIDTH = 5


def pass_all(rank: int, world: int, mappings: Sequence[ParallelConfig]) -> float:
    """All dispatchers under all mappings, in float64 and bfloat16; the seconds that the last one took."""
    start = 0.0
    for parallel in mappings:
        groups = groups_for(parallel)
        for name in NAMES:
            place = place_on(groups, replace(parallel, dispatcher=name))
            for dtype in (torch.float64, torch.bfloat16):
                start = time.monotonic()
                preflight(MODEL, WIDTH, replace(place, dtype=dtype), timeout_seconds=20.0)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("world", "mappings"),
    [
        (2, [ParallelConfig(ep=2), ParallelConfig(pp=2)]),
        (4, [ParallelConfig(ep=4, ep_per_node=2), ParallelConfig(ep=2, etp=2), ParallelConfig(ep=2, pp=2)]),
    ],
)
def test_c7_every_dispatcher_brings_its_tokens_back(ranks: Ranks, world: int, mappings: list[ParallelConfig]) -> None:
    assert all(seconds < 5.0 for seconds in ranks.run(pass_all, world, mappings, timeout_seconds=60.0))


def test_without_ep_there_is_nothing_to_try() -> None:
    preflight(MODEL, WIDTH, place_on(one_rank()))


def pass_with(rank: int, world: int, how: str) -> None:
    """Rank 1 stays away, waits in its dispatch, fails there, or sends other numbers."""
    place = place_on(groups_for(ParallelConfig(ep=world)), ParallelConfig(ep=world))
    if rank != 1:
        preflight(MODEL, WIDTH, place, timeout_seconds=1.0)
    elif how != "away":
        with patch.object(AllToAllDispatcher, "dispatch", FAULTS[how]):
            preflight(MODEL, WIDTH, place, timeout_seconds=1.0)
    else:
        time.sleep(8.0)


def wait(self: Any, rows: Any, plan: Any) -> Any:
    time.sleep(4.0)


def fail(self: Any, rows: Any, plan: Any) -> Any:
    raise RuntimeError("no route to host")


def mangle(self: Any, rows: Any, plan: Any) -> Any:
    return DISPATCH(self, replace(rows, hidden=-rows.hidden), plan)


DISPATCH = AllToAllDispatcher.dispatch
FAULTS = {"waits": wait, "fails": fail, "mangles": mangle}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "away",
            r"rank 0 with 1 tokens waits in dispatch_preprocess, and not all ranks answer within 1 seconds:.*[Rr]anks? 1 ",
        ),
        ("waits", r"rank 1 with 2 tokens waits in dispatch"),
        ("fails", r"rank 1 with 2 tokens fails in dispatch: RuntimeError: no route to host"),
        ("mangles", r"rank 1 with 2 tokens has other numbers back than it sent"),
    ],
)
def test_c7_a_rank_that_is_away_or_waits_or_fails_or_changes_tokens_is_named_with_its_tokens(
    ranks: Ranks, how: str, said: str
) -> None:
    with pytest.raises(RanksFailedError) as e:
        ranks.run(pass_with, 2, how, timeout_seconds=20.0)
    assert ParallelError.__name__ in str(e.value)
    assert re.search(said, str(e.value).replace("\n", " ")), str(e.value)
