"""The pipeline schedules: what every rank does in which order, as data, for any numbers of ranks, chunks and microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import zip_longest

from core.config.mapping import ScheduleName
from core.pipeline.action import Action, Kind, Schedule
from core.pipeline.interleave import Pair, backward_order, forward_order, padded, warm_up
from core.pipeline.transfers import with_transfers

# The name of the schedule that only goes forward, as in validation; it is complete without any backward.
FORWARD_ONLY = "forward_only"


# A pure function of a few numbers, asked for anew in every step: the last ones are kept.
@lru_cache(maxsize=8)
def make_schedule(name: ScheduleName, *, stages: int, virtual: int, microbatches: int) -> Schedule:
    """The training schedule called `name`. Raises ValueError unless all three numbers are positive."""
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble, "combined": combined}
    if min(stages, virtual, microbatches) < 1:
        raise ValueError(
            f"{name} of {stages} ranks, {virtual} chunks, {microbatches} microbatches: all must be positive"
        )
    return makers[name](stages=stages, virtual=virtual, microbatches=microbatches)


def gpipe(*, stages: int, virtual: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965); chunk after chunk, each over all microbatches.

    Simple, and keeps the activations of every microbatch.
    """
    rank = [
        *(_one("forward", (chunk, j)) for chunk in range(virtual) for j in range(microbatches)),
        *(_one("backward", (chunk, j)) for chunk in reversed(range(virtual)) for j in range(microbatches)),
    ]
    return with_transfers("gpipe", virtual=virtual, microbatches=microbatches, compute=[rank] * stages)


def one_f_one_b(*, stages: int, virtual: int, microbatches: int) -> Schedule:
    """One forward, one backward (arXiv 2104.04473): warm-up, alternation, flush; interleaved with several chunks a rank."""
    compute = []
    for rank in range(stages):
        pairs = _aligned(stages, virtual, microbatches, warm_up(rank, stages, virtual))
        compute.append([action for pair in pairs for action in _in_turn(*pair)])
    return with_transfers("1f1b", virtual=virtual, microbatches=microbatches, compute=compute)


def combined(*, stages: int, virtual: int, microbatches: int) -> Schedule:
    """1F1B with each forward and backward of the alternation as one action, whose communication hides in the other's work.

    With warm-ups of 2 * (ranks behind) + (virtual - 1) * stages the last rank would pair the two of one microbatch. One more on
    every rank makes them independent (report section 4.2.3). The step of two between neighbours, which plain 1F1B does not
    need, leaves what an action waits for one action back on either side, so that neighbours never wait for what the other does
    at the same time.
    """
    compute = []
    for rank in range(stages):
        ahead = 2 * (stages - 1 - rank) + (virtual - 1) * stages + 1
        pairs = _aligned(stages, virtual, microbatches, ahead)
        compute.append([action for pair in pairs for action in _together(*pair)])
    return with_transfers("combined", virtual=virtual, microbatches=microbatches, compute=compute)


def zero_bubble(*, stages: int, virtual: int, microbatches: int) -> Schedule:
    """1F1B with the backward in its two halves (ZB-H1, arXiv 2401.10241 section 2.3).

    Only the input gradient is waited for. Weight gradients follow it at once on the first rank and r pairs later on rank r,
    which fills the flush, and keeps no more activations anywhere than the first rank of 1F1B does. With forward, input gradient
    and weight gradient of one length, a rank waits stages - 1 of them in all; in 1F1B three times as long.
    """
    compute = []
    for rank in range(stages):
        pairs = _aligned(stages, virtual, microbatches, warm_up(rank, stages, virtual))
        compute.append(_halved(pairs, lag=rank))
    return with_transfers("zero_bubble", virtual=virtual, microbatches=microbatches, compute=compute)


@lru_cache(maxsize=8)
def forward_only(*, stages: int, virtual: int, microbatches: int) -> Schedule:
    """Every forward and nothing else: validation."""
    order = forward_order(stages, virtual, padded(stages, virtual, microbatches))
    rank = [_one("forward", pair) for pair in order if pair[1] < microbatches]
    return with_transfers(FORWARD_ONLY, virtual=virtual, microbatches=microbatches, compute=[rank] * stages)


def _aligned(stages: int, virtual: int, microbatches: int, ahead: int) -> Iterable[tuple[Pair | None, Pair | None]]:
    """Forward and backward of every step of a rank whose forwards are `ahead` steps early; None where there is none."""
    whole = padded(stages, virtual, microbatches)
    forwards = [pair if pair[1] < microbatches else None for pair in forward_order(stages, virtual, whole)]
    backwards = [pair if pair[1] < microbatches else None for pair in backward_order(stages, virtual, whole)]
    return zip_longest(forwards, [*[None] * min(ahead, len(forwards)), *backwards])


def _in_turn(forward: Pair | None, backward: Pair | None) -> list[Action]:
    return [*([_one("forward", forward)] if forward else []), *([_one("backward", backward)] if backward else [])]


def _together(forward: Pair | None, backward: Pair | None) -> list[Action]:
    if forward is None or backward is None:
        return _in_turn(forward, backward)
    chunk, microbatch = forward
    return [
        Action(
            kind="combined",
            chunk=chunk,
            microbatch=microbatch,
            backward_chunk=backward[0],
            backward_microbatch=backward[1],
        )
    ]


def _halved(pairs: Iterable[tuple[Pair | None, Pair | None]], lag: int) -> list[Action]:
    """The actions of the pairs with each backward in two halves, the second `lag` pairs after the first."""
    actions = []
    late: deque[Pair | None] = deque([None] * lag)
    for forward, backward in (*pairs, *[(None, None)] * lag):
        late.append(backward)
        now: tuple[tuple[Kind, Pair | None], ...] = (
            ("forward", forward),
            ("input_gradient", backward),
            ("weight_gradient", late.popleft()),
        )
        actions += [_one(kind, pair) for kind, pair in now if pair]
    return actions


def _one(kind: Kind, pair: Pair) -> Action:
    return Action(kind=kind, chunk=pair[0], microbatch=pair[1])
