"""When every action of a schedule begins and ends, given what each costs; and the share of the time that ranks wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from core.pipeline.action import Action, Schedule
from core.pipeline.transfers import peer

Seconds = float | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one microbatch in a part: one number for all parts, or one for each, in the order in which it passes them.

    overlap: the share of its two halves' time that a combined action saves, 0 to 1. transfer: from the end of the action that
    makes a result until it is there on another rank; neither rank is busy meanwhile. exchanged: how much of forward and of backward
    is the exchange of rows with experts elsewhere; hidden: the share of it that a combined action hides, 0 to 1, as far as the rest
    of both halves takes as long.
    """

    forward: Seconds = 1.0
    backward: Seconds = 2.0
    input_gradient: Seconds = 1.0
    weight_gradient: Seconds = 1.0
    overlap: float = 0.0
    transfer: float = 0.0
    exchanged_forward: Seconds = 0.0
    exchanged_backward: Seconds = 0.0
    hidden: float = 0.0

    def combined(self, forward_part: int, backward_part: int) -> float:
        """Seconds of the forward of one part together with the backward of another."""
        both = _of_part(self.forward, forward_part) + _of_part(self.backward, backward_part)
        exchanged = _of_part(self.exchanged_forward, forward_part) + _of_part(self.exchanged_backward, backward_part)
        return (1 - self.overlap) * both - self.hidden * min(exchanged, both - exchanged)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An action with its begin and end in seconds. A receive begins when its rank waits for it, a send takes no time."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """ranks[r]: what rank r does, in order, from second 0 to second `total`."""

    schedule: Schedule
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def total(self) -> float:
        """Seconds until the last rank ends."""
        return max(timed[-1].end for timed in self.ranks)

    def busy(self, rank: int) -> float:
        """Seconds in which `rank` computes."""
        return sum(timed.end - timed.begin for timed in self.ranks[rank] if computes(timed.action))

    @property
    def bubble(self) -> float:
        """Waiting time over computing time, of all ranks together: (p - 1) / m for 1F1B on equal costs. 0 where nothing costs."""
        return self._bubble(range(len(self.ranks)))

    def bubble_of(self, rank: int) -> float:
        """The same of one rank; infinite where it only waits."""
        return self._bubble([rank])

    def _bubble(self, ranks: Sequence[int]) -> float:
        busy = sum(self.busy(rank) for rank in ranks)
        idle = self.total * len(ranks) - busy
        return idle / busy if busy else inf if idle else 0.0


def computes(action: Action) -> bool:
    """Whether the action is no transfer."""
    return not action.kind.startswith(("send", "receive"))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a proved schedule. Raises ValueError if it deadlocks, or if there are not as many costs as parts."""
    exchanged = (costs.exchanged_forward, costs.exchanged_backward)
    for given in (costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient, *exchanged):
        if isinstance(given, tuple) and len(given) != schedule.stages * schedule.virtual:
            raise ValueError(f"{len(given)} costs for {schedule.stages * schedule.virtual} parts")
    clock = _Clock(schedule, costs)
    while any([clock.advance(rank) for rank in range(schedule.stages)]):
        pass
    stuck = [r for r in range(schedule.stages) if len(clock.timed[r]) < len(schedule.ranks[r])]
    if stuck:
        raise ValueError(f"{schedule.name}: rank {stuck[0]} waits for ever")
    return Timeline(schedule=schedule, ranks=tuple(map(tuple, clock.timed)))


class _Clock:
    """All ranks with the time that each has reached, and what is on its way between them."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.timed: list[list[Timed]] = [[] for _ in schedule.ranks]
        self.now = [0.0] * schedule.stages
        # arrival times by source, destination and kind, in the order of sending
        self.arrivals: dict[tuple[int, int, str], deque[float]] = defaultdict(deque)

    def advance(self, rank: int) -> bool:
        """Do what `rank` can do until it waits for something that is not sent yet; whether it could do anything."""
        timed, actions = self.timed[rank], self.schedule.ranks[rank]
        begun = len(timed)
        # by place, not of a slice: a rank waits about once for every microbatch, and has thousands of actions left
        for place in range(begun, len(actions)):
            action = actions[place]
            end = self._end(action, rank)
            if end is None:
                break
            timed.append(Timed(action=action, begin=self.now[rank], end=end))
            self.now[rank] = end
        return len(timed) > begun

    def _end(self, action: Action, rank: int) -> float | None:
        """When the action ends if it begins now; None for a receive of what is not sent yet."""
        now = self.now[rank]
        if computes(action):
            return now + _cost(action, rank, self.schedule.stages, self.costs)
        other, what = peer(action, rank, self.schedule), action.kind.partition("_")[2]
        if action.kind.startswith("send"):
            self.arrivals[(rank, other, what)].append(now + self.costs.transfer)
            return now
        channel = self.arrivals[(other, rank, what)]
        return max(now, channel.popleft()) if channel else None


def _cost(action: Action, rank: int, stages: int, costs: Costs) -> float:
    part = action.chunk * stages + rank
    if action.kind == "combined":
        assert action.backward_chunk is not None, "a combined action has two halves"
        return costs.combined(part, action.backward_chunk * stages + rank)
    if action.kind == "forward":
        return _of_part(costs.forward, part)
    if action.kind == "backward":
        return _of_part(costs.backward, part)
    return _of_part(costs.input_gradient if action.kind == "input_gradient" else costs.weight_gradient, part)


def _of_part(given: Seconds, part: int) -> float:
    return given[part] if isinstance(given, tuple) else given
