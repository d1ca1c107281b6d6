"""What the tests of schedules share: every kind of schedule by name, and short spellings of actions."""

from dataclasses import replace

from core.pipeline.action import Action, Kind, Schedule
from core.pipeline.schedule import FORWARD_ONLY, forward_only, make_schedule

TRAINING = ("gpipe", "1f1b", "zero_bubble", "combined")
NAMES = (*TRAINING, FORWARD_ONLY)
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}


def made(name: str, stages: int, virtual: int, microbatches: int) -> Schedule:
    """The schedule called `name`."""
    if name == FORWARD_ONLY:
        return forward_only(stages=stages, virtual=virtual, microbatches=microbatches)
    return make_schedule(name, stages=stages, virtual=virtual, microbatches=microbatches)  # type: ignore[arg-type]


def computed(schedule: Schedule, rank: int) -> str:
    """What a rank computes: `F0.3` is the forward of microbatch 3 in chunk 0; combined halves are joined by `+`."""
    words = []
    for action in schedule.ranks[rank]:
        if action.kind == "combined":
            back = f"B{action.backward_chunk}.{action.backward_microbatch}"
            words.append(f"F{action.chunk}.{action.microbatch}+{back}")
        elif action.kind in LETTERS:
            words.append(f"{LETTERS[action.kind]}{action.chunk}.{action.microbatch}")
    return " ".join(words)


def with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    """The schedule with another list for one rank."""
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))
