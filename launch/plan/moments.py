"""The moments of a pipeline rank's step: what waits and what runs while its schedule is executed, and what the fullest one holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from core.config.mapping import ParallelConfig
from core.pipeline.action import Action
from launch.plan.load import Moment, PartLoad

# A schedule has met its fullest moment after so many microbatches for each pipeline rank; only GPipe keeps all of a step.
_ENOUGH = 4


@dataclass(frozen=True, kw_only=True)
class State:
    """What waits on a rank at some moment: forwards and put-off weight gradients by chunk; and what runs: chunk and whether backward."""

    waiting: tuple[int, ...]
    late: tuple[int, ...]
    running: tuple[tuple[int, bool], ...]

    def within(self, other: State) -> bool:
        """Whether `other` holds at least as much of everything."""
        pairs = zip((*self.waiting, *self.late), (*other.waiting, *other.late), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


@dataclass(frozen=True, kw_only=True)
class Fullest:
    """The fullest moment of a rank's step, in bytes, and how many forwards then waited, by virtual stage."""

    activations: int
    logits: int
    working: int
    in_flight: tuple[int, ...]
    on_host: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.activations + self.logits + self.working


def enough(parallel: ParallelConfig, microbatches: int) -> int:
    """Of the microbatches of a step as many as its fullest moment needs."""
    return microbatches if parallel.schedule == "gpipe" else min(microbatches, _ENOUGH * parallel.pp)


def takes_turns(parallel: ParallelConfig) -> bool:
    """Whether the halves of a combined action run in turn, as they do wherever a layer communicates: each gives way to the other there.

    Then one has freed, layer by layer, what the other has come to keep. Otherwise the forward is over before the backward begins.
    """
    return parallel.schedule == "combined" and max(parallel.tp, parallel.cp, parallel.ep, parallel.etp) > 1


def states(actions: Iterable[Action], virtual: int) -> Iterator[State]:
    """Every moment at which a rank of so many virtual stages computes activations or their gradients, in order."""
    waiting, late = [0] * virtual, [0] * virtual

    def now(*running: tuple[int, bool]) -> State:
        return State(waiting=tuple(waiting), late=tuple(late), running=running)

    for action in actions:
        chunk = action.chunk
        if action.kind == "forward":
            yield now((chunk, False))
            waiting[chunk] += 1
        elif action.kind == "combined":
            assert action.backward_chunk is not None, "it has two halves"
            waiting[action.backward_chunk] -= 1
            yield now((chunk, False), (action.backward_chunk, True))
            waiting[chunk] += 1
        elif action.kind in ("backward", "input_gradient"):
            waiting[chunk] -= 1
            yield now((chunk, True))
            late[chunk] += action.kind == "input_gradient"
        elif action.kind == "weight_gradient":
            late[chunk] -= 1


def fullest_of(moments: Iterable[State], loads: Sequence[PartLoad], *, turns: bool = False) -> Fullest:
    """The fullest of a rank's moments, whose parts have these loads. turns: whether the halves of combined actions take turns."""
    return max((_held(state, loads, turns) for state in moments), key=lambda held: held.total)


def _held(state: State, loads: Sequence[PartLoad], turns: bool) -> Fullest:
    """What is held at one moment: all that waits, and what runs at its own fullest moment; of halves that take turns the fuller one."""
    running = [
        (chunk, loads[chunk].backward if backward else loads[chunk].forward) for chunk, backward in state.running
    ]
    if turns:
        running = [max(running, key=lambda each: each[1].total)]
    moments: list[Moment] = [moment for _, moment in running]
    counted = list(zip(state.waiting, state.late, loads, strict=True))
    in_flight = [n + late for n, late, _ in counted]
    for chunk, _ in running:
        in_flight[chunk] += 1
    return Fullest(
        activations=sum(n * load.activations + late * load.late for n, late, load in counted)
        + sum(moment.activations for moment in moments),
        logits=sum(n * load.logits for n, _, load in counted) + sum(moment.logits for moment in moments),
        working=sum(moment.total - moment.activations - moment.logits for moment in moments),
        in_flight=tuple(in_flight),
        on_host=sum(n * load.on_host for n, load in zip(in_flight, loads, strict=True)),
    )
