"""The pipeline's timeline as SVG inside a page: a lane for each rank, a box for each action, its beginning and its end where it is long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.pipeline.simulate import Timed, Timeline, computes
from launch.schedule_picture import FAMILIES, SHADES

WIDTH, LEFT, GAP = 1180.0, 44.0, 3.0
LANE, FOOT = 20.0, 22.0
# More boxes than these are cut to the beginning and the end.
MOST_BOXES, SHOWN_BOXES = 1400, 700
# A microbatch's number needs so many units of width for each of its digits.
DIGIT = 7.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of the timeline, in seconds, and what it is called."""

    name: str
    begin: float
    end: float


def windows(timeline: Timeline) -> tuple[Window, ...]:
    """The whole timeline, or where it is long its beginning and its end, of equally many boxes."""
    times = sorted(timed.begin for row in timeline.ranks for timed in row if computes(timed.action))
    if len(times) <= MOST_BOXES:
        return (Window(name="the whole step", begin=0.0, end=timeline.total),)
    ends = sorted(timed.end for row in timeline.ranks for timed in row if computes(timed.action))
    first, last = times[SHOWN_BOXES], ends[-SHOWN_BOXES]
    return (
        Window(name="how it begins", begin=0.0, end=first),
        Window(name="how it ends", begin=last, end=timeline.total),
    )


def draw(timeline: Timeline, window: Window, seconds_known: bool) -> str:
    """One stretch as an SVG element. seconds_known: whether the times are seconds, or forwards that all cost the same."""
    height = len(timeline.ranks) * (LANE + GAP) + FOOT
    words = f"Pipeline timeline, {window.name}: {len(timeline.ranks)} ranks, schedule {timeline.schedule.name}"
    scale = (WIDTH - LEFT) / max(window.end - window.begin, 1e-12)
    parts = [f'<svg class="timeline" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{words}">']
    for rank, row in enumerate(timeline.ranks):
        top = rank * (LANE + GAP)
        parts.append(f'<text class="mark" x="0" y="{top + 14:.0f}">rank {rank}</text>')
        parts.append(
            f'<rect class="lane" x="{LEFT:.0f}" y="{top:.1f}" width="{WIDTH - LEFT:.0f}" height="{LANE:.0f}"/>'
        )
        for timed in _inside(row, window):
            parts += _boxes(timed, window, scale, top)
    parts += _marks(window, scale, height, seconds_known)
    return "".join([*parts, "</svg>"])


def _inside(row: Sequence[Timed], window: Window) -> Iterator[Timed]:
    """The actions of a rank that compute within the window."""
    first = bisect_left(row, window.begin, key=lambda timed: timed.end)
    for timed in row[first:]:
        if timed.begin >= window.end:
            return
        if computes(timed.action) and timed.end > window.begin:
            yield timed


def _boxes(timed: Timed, window: Window, scale: float, top: float) -> Iterator[str]:
    """One box, or the two halves of a combined action."""
    action = timed.action
    if action.kind != "combined":
        yield _box(timed, (window, scale, top, LANE), SHADES[action.kind], (action.chunk, action.microbatch))
        return
    assert action.backward_chunk is not None and action.backward_microbatch is not None, "it has two halves"
    half = LANE / 2
    yield _box(timed, (window, scale, top, half), SHADES["forward"], (action.chunk, action.microbatch))
    backward = (action.backward_chunk, action.backward_microbatch)
    yield _box(timed, (window, scale, top + half, half), SHADES["backward"], backward)


def _box(timed: Timed, place: tuple[Window, float, float, float], shade: int, what: tuple[int, int]) -> str:
    window, scale, top, height = place
    left = LEFT + (max(timed.begin, window.begin) - window.begin) * scale
    width = (min(timed.end, window.end) - max(timed.begin, window.begin)) * scale
    chunk, microbatch = what
    color = FAMILIES[chunk % len(FAMILIES)][shade]
    box = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(width - 0.6, 0.4):.1f}" height="{height:.1f}" fill="{color}"/>'
    )
    if width < DIGIT * len(str(microbatch)) or height < LANE:
        return box
    ink = "pale" if shade == 0 else "on"
    return f'{box}<text class="{ink}" text-anchor="middle" x="{left + width / 2:.1f}" y="{top + 14:.1f}">{microbatch}</text>'


def _marks(window: Window, scale: float, height: float, seconds_known: bool) -> Iterator[str]:
    """Five times below the lanes."""
    length = window.end - window.begin
    for fifth in range(6):
        time = window.begin + length * fifth / 5
        anchor = "end" if fifth == 5 else "start" if fifth == 0 else "middle"
        text = (f"{time * 1e3:,.0f} ms" if time < 10 else f"{time:,.1f} s") if seconds_known else f"{time:,.0f}"
        x = LEFT + (time - window.begin) * scale
        yield f'<text class="mark" text-anchor="{anchor}" x="{x:.1f}" y="{height - 6:.0f}">{text}</text>'
