"""In which order a rank's (chunk, microbatch) pairs go forward and backward, and how many go forward before the first backward.

With one chunk a rank, microbatches go in order. With several, groups of as many microbatches as there are ranks pass one chunk
before the next (Megatron's interleaved order, arXiv 2104.04473 section 2.2), which needs whole groups: a last group that is
smaller can deadlock. So an order is made for whole groups, and what belongs to microbatches that are not there is left out.
What is left waits for nothing that was left out, since a microbatch waits for itself alone.
"""

from __future__ import annotations

Pair = tuple[int, int]


def padded(stages: int, virtual: int, microbatches: int) -> int:
    """The microbatches of whole groups."""
    return microbatches if virtual == 1 else -(-microbatches // stages) * stages


def forward_order(stages: int, virtual: int, microbatches: int) -> list[Pair]:
    """(chunk, microbatch) of every forward of a rank, whole groups of microbatches."""
    if virtual == 1:
        return [(0, j) for j in range(microbatches)]
    groups = range(0, microbatches, stages)
    return [(chunk, first + j) for first in groups for chunk in range(virtual) for j in range(stages)]


def backward_order(stages: int, virtual: int, microbatches: int) -> list[Pair]:
    """(chunk, microbatch) of every backward of a rank: the order of the forwards, from the last chunk to the first."""
    return [(virtual - 1 - chunk, j) for chunk, j in forward_order(stages, virtual, microbatches)]


def warm_up(rank: int, stages: int, virtual: int) -> int:
    """How many forwards go before the first pair of a forward and a backward.

    With one chunk, as many as the rank has ranks behind it. With several, twice as many, and the groups that pass the earlier
    chunks.
    """
    behind = stages - 1 - rank
    return behind if virtual == 1 else 2 * behind + (virtual - 1) * stages
