"""What one pipeline rank does, as data (contract 6): the words of which schedules are made.

A model on `stages` pipeline ranks with `virtual` stages each is cut into stages * virtual parts; part s lies on rank
s % stages as its chunk s // stages. A microbatch passes the parts in order, its gradient in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# forward; backward; its two halves, input gradient and weight gradient; and what travels: activations to the next part,
# gradients to the previous one. "combined" is a forward and a backward whose communication hides behind each other's work.
Kind = Literal[
    "forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "combined",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
]


@dataclass(frozen=True, kw_only=True)
class Action:
    """One entry of a rank's list: what is done to `microbatch` at the rank's `chunk`.

    A send belongs to the part whose output it sends, a receive to the part whose input it fills. A combined action is the
    forward of (chunk, microbatch) together with the backward of (backward_chunk, backward_microbatch).
    """

    kind: Kind
    chunk: int
    microbatch: int
    backward_chunk: int | None = None
    backward_microbatch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every pipeline rank, in order: ranks[r] is what rank r does."""

    name: str
    stages: int
    virtual: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
