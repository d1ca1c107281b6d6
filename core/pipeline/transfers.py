"""Between compute actions: where each result goes, and the sends and receives that carry it to another rank.

A transfer takes its place beside the action that makes or needs what it carries: sends right after, receives right before.
Where two neighbouring parts lie on one rank nothing is sent; the runtime hands the tensor over.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.pipeline.action import Action, Schedule


def next_part(rank: int, chunk: int, *, stages: int, virtual: int) -> tuple[int, int] | None:
    """Rank and chunk of the part after (rank, chunk), which takes its activations; None after the last part."""
    if rank < stages - 1:
        return rank + 1, chunk
    return (0, chunk + 1) if chunk < virtual - 1 else None


def previous_part(rank: int, chunk: int, *, stages: int) -> tuple[int, int] | None:
    """Rank and chunk of the part before (rank, chunk), which takes its gradients; None before the first part."""
    if rank > 0:
        return rank - 1, chunk
    return (stages - 1, chunk - 1) if chunk > 0 else None


def peer(action: Action, rank: int, schedule: Schedule) -> int:
    """The rank at the other end of a transfer of `rank`. Raises ValueError for other actions and past the ends."""
    if action.kind in ("send_activation", "receive_gradient"):
        part = next_part(rank, action.chunk, stages=schedule.stages, virtual=schedule.virtual)
    elif action.kind in ("receive_activation", "send_gradient"):
        part = previous_part(rank, action.chunk, stages=schedule.stages)
    else:
        raise ValueError(f"rank {rank}: {action.kind} is no transfer")
    if part is None:
        raise ValueError(f"rank {rank}: {action.kind} of chunk {action.chunk} leads past the end of the pipeline")
    return part[0]


def with_transfers(name: str, *, virtual: int, microbatches: int, compute: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule of `compute`, which holds what each rank computes, in order, and no transfers."""
    stages = len(compute)
    ranks = tuple(
        tuple(actions)
        if stages == 1
        else tuple([step for action in actions for step in _surrounded(action, rank, stages, virtual)])
        for rank, actions in enumerate(compute)
    )
    return Schedule(name=name, stages=stages, virtual=virtual, microbatches=microbatches, ranks=ranks)


def _surrounded(action: Action, rank: int, stages: int, virtual: int) -> list[Action]:
    """The action between the receives that it needs and the sends that it causes."""
    before, after = [], []
    kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
    if kind in ("forward", "combined"):
        if chunk > 0 or rank > 0:
            before.append(Action(kind="receive_activation", chunk=chunk, microbatch=microbatch))
        if chunk < virtual - 1 or rank < stages - 1:
            after.append(Action(kind="send_activation", chunk=chunk, microbatch=microbatch))
    if kind == "combined":
        assert action.backward_chunk is not None and action.backward_microbatch is not None, "it has two halves"
        chunk, microbatch = action.backward_chunk, action.backward_microbatch
    if kind in ("backward", "input_gradient", "combined"):
        if chunk < virtual - 1 or rank < stages - 1:
            before.append(Action(kind="receive_gradient", chunk=chunk, microbatch=microbatch))
        if chunk > 0 or rank > 0:
            after.append(Action(kind="send_gradient", chunk=chunk, microbatch=microbatch))
    return [*before, action, *after]
