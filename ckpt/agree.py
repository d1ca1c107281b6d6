"""Ranks that succeed or fail together: none goes on, or waits for ever, while another has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from core.errors import CheckpointError, ZooError
from core.parallel.groups import Group

Result = TypeVar("Result")


def together(world: Group, action: Callable[[], Result]) -> list[Result]:
    """Run `action` on every rank of `world`; the results of all, by position. Collective.

    Raises CheckpointError on every rank if it failed on any, naming the ranks. Whatever an action raises is caught: a
    rank that left would let the others wait.
    """
    mine: Any = None
    cause: Exception | None = None
    failure = None
    try:
        mine = action()
    except Exception as error:
        cause = error
        failure = str(error) if isinstance(error, ZooError) else f"{type(error).__name__}: {error}"
    outcomes = _gather(world, (failure, mine))
    failed = [(rank, text) for rank, (text, _) in zip(world.ranks, outcomes, strict=True) if text is not None]
    if failed:
        raise CheckpointError(_say(failed, world.size)) from cause
    return [result for _, result in outcomes]


def each(world: Group, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank of `world`; this rank's own result. Collective; failures as in `together`."""
    kept: list[Result] = []
    together(world, lambda: kept.append(action()))
    return kept[0]


def on_first(world: Group, action: Callable[[], Result]) -> Result:
    """Run `action` on the first rank of `world` alone; its result on every rank. Collective; failures as in `together`."""
    results: list[Any] = together(world, lambda: action() if world.position == 0 else None)
    return results[0]


def _gather(world: Group, mine: tuple) -> list[tuple]:
    if world.handle is None:
        return [mine]
    gathered: list = [None] * world.size
    dist.all_gather_object(gathered, mine, group=world.handle)
    return gathered


def _say(failed: list[tuple[int, str]], ranks: int) -> str:
    """One message for all ranks; what several of them say alike is said once."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failed:
        by_text.setdefault(text, []).append(rank)
    if ranks == 1 or (len(by_text) == 1 and len(failed) == ranks):
        return failed[0][1]
    return "\n".join(f"rank {', '.join(map(str, said))}: {text}" for text, said in by_text.items())
