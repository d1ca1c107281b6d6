"""What a search has found, as data and for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan.candidates import Setup
from launch.plan.text import GIB


@dataclass(frozen=True, kw_only=True)
class Found:
    """A set-up that fits. memory, headroom: bytes of its fullest rank, and what that leaves free.

    settings: what `--set` takes to get there from the run that was searched. steps: what was done to its mapping and why, in order.
    cannot_start: what of it the engine cannot do yet.
    """

    setup: Setup
    tokens_per_second: float
    tflops: float
    seconds: float
    memory: int
    headroom: int
    settings: tuple[str, ...]
    steps: tuple[str, ...]
    cannot_start: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Loser:
    """A mapping that lost, in which phase, and the reason."""

    mapping: str
    phase: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """found: set-ups that fit, the fastest first. losers: every other mapping that was looked at. begun: the set-up searched from, priced
    as it is, whether it fits or not; None where it cannot run on so many GPUs."""

    gpus: int
    hardware: str
    capacity: int
    begun: Found | None
    found: tuple[Found, ...]
    losers: tuple[Loser, ...]

    def lines(self) -> list[str]:
        """For a terminal: the found ones, how to get the first, and the commonest reasons of the losers."""
        return list(_lines(self))


def gib(number: float) -> str:
    """Bytes in GiB."""
    return f"{number / GIB:.1f} GiB"


def _lines(result: SearchResult) -> Iterator[str]:
    yield f"{len(result.found)} set-ups on {result.gpus} {result.hardware}, of {gib(result.capacity)} each; predicted, the fastest first"
    for place, each in enumerate(result.found, 1):
        late = f"  cannot start yet: {', '.join(each.cannot_start)}" if each.cannot_start else ""
        numbers = f"{each.tokens_per_second:>8,.0f} tokens/s/GPU  {each.tflops:>6,.0f} TFLOPS  "
        numbers += f"{gib(each.memory):>9}, {gib(each.headroom)} free"
        yield f"{place:>3}  {numbers}  {each.setup.mapping}{late}"
    if result.begun is not None:
        fits = "" if result.begun.headroom >= 0 else f", which does not fit: {gib(-result.begun.headroom)} too many"
        yield f"     {result.begun.tokens_per_second:>8,.0f} tokens/s/GPU as it was asked for{fits}"
    if result.found:
        yield ""
        yield "the first, and why"
        yield from (f"  {step}" for step in result.found[0].steps)
        yield "  " + (" ".join(f"--set '{each}'" for each in result.found[0].settings) or "it is what was asked for")
    yield ""
    yield f"{len(result.losers)} mappings lost; the commonest reasons"
    kinds = Counter((loser.phase, loser.reason.split(":")[0].split(" by ")[0]) for loser in result.losers)
    for (phase, kind), count in sorted(kinds.items()):
        example = next(each for each in result.losers if each.phase == phase and each.reason.startswith(kind))
        yield f"  phase {phase}: {count} {kind}, as {example.mapping}: {example.reason}"
