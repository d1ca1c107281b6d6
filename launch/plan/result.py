"""What a plan says, as data: a terminal prints it, `--json` writes it, a page draws it, a search compares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at its fullest moment.

    parameters, gradients (summed over microbatches), optimizer (masters and moments, and buckets that collectives travel in).
    activations: what forwards have saved that still wait for their backwards. logits: of the loss and its gradient. working: what the
    largest layer needs while it is computed, recomputed activations among it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(astuple(self))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of the fullest rank at one place of the pipeline.

    rank: its number. balanced: when every expert gets equally many rows. worst: when all tokens that can go to this rank's experts do.
    in_flight: forwards that wait for their backward at the fullest moment, by virtual stage. on_host: bytes in host memory.
    """

    pp_rank: int
    rank: int
    balanced: MemoryParts
    worst: MemoryParts
    in_flight: tuple[int, ...]
    on_host: int = 0


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline rank: its parts in the language of layouts, seconds of one microbatch's forward and backward, and its bubble."""

    pp_rank: int
    parts: tuple[str, ...]
    forward_seconds: float
    backward_seconds: float
    bubble: float


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """What the rank that sends most over one axis sends in a step, in bytes; inside: whether the axis stays in an NVLink domain.

    seconds: of all of it; exposed_seconds: of what no computation hides.
    """

    axis: str
    sent_bytes: int
    inside: bool
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step of the whole job. walls: seconds of a step of the slowest rank by what they go to (products, attention, streaming,
    launches, communication by axis, bubble, optimizer): they add up to `seconds`.

    tokens_per_second and tflops: of one GPU; TFLOPS as published figures count them (core/config/flops.py).
    """

    seconds: float
    bubble: float
    walls: Mapping[str, float]
    tokens_per_second: float
    tflops: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a run before it is started. time, communication and stages are None and empty where nothing is known of the
    hardware. memory: by place in the pipeline. capacity: bytes of memory of one device, None where unknown."""

    memory: tuple[RankMemory, ...]
    capacity: int | None
    stages: tuple[StagePlan, ...]
    communication: tuple[AxisTraffic, ...]
    time: StepTime | None

    @property
    def worst_rank(self) -> RankMemory:
        """The rank that needs most, by balanced routing."""
        return max(self.memory, key=lambda each: each.balanced.total)

    @property
    def headroom(self) -> int | None:
        """Bytes that the worst rank leaves free; negative where it does not fit."""
        return None if self.capacity is None else self.capacity - self.worst_rank.balanced.total
