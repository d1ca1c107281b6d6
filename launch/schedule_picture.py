"""A timeline as a picture: a row for each pipeline rank, a family of colours for each chunk, microbatch numbers in the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import RequestError
from core.pipeline.prove import peak_live
from core.pipeline.simulate import Timed, Timeline, computes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
INK, QUIET, IDLE = "#2b2f36", "#7c828d", "#eef0f3"
# One family for each chunk: pale for forwards, full for backwards, dark for weight gradients. More chunks begin again.
FAMILIES = (
    ("#bcd6f3", "#3d7cc4", "#1d4577"),
    ("#f9d3ac", "#dd7f2a", "#8a4a10"),
    ("#bfe3c6", "#3f9b5b", "#1f5a34"),
    ("#dccbf0", "#8560b8", "#4a3172"),
    ("#f5c6cf", "#c9546d", "#7a2638"),
    ("#b9e4e6", "#2f979d", "#155a5e"),
    ("#ece0a4", "#b8992a", "#6b5810"),
    ("#d7d2cc", "#857a6d", "#4b443c"),
)
SHADES = {"forward": 0, "backward": 1, "input_gradient": 1, "weight_gradient": 2}
TEXT_COLORS = (INK, "white", "white")
BOX_HEIGHT = 0.84
WIDTHS, HEIGHTS = (9.0, 26.0), (2.3, 32.0)
INCHES_PER_BOX, INCHES_PER_ROW = 0.27, 0.42
DPI = 140


@dataclass(frozen=True, kw_only=True)
class _Box:
    """A rectangle with a number: `low` and `high` are its edges within the row, 0 at the bottom and 1 at the top."""

    rank: int
    begin: float
    end: float
    low: float
    high: float
    shade: int
    chunk: int
    microbatch: int

    @property
    def color(self) -> str:
        return FAMILIES[self.chunk % len(FAMILIES)][self.shade]


def bubble_text(bubble: float) -> str:
    """A bubble as a per cent of the computing time, of which there may be none."""
    return f"{bubble:.1%}" if isfinite(bubble) else "∞"


def draw_schedule(timeline: Timeline, path: Path, title: str, unit: str = "seconds") -> None:
    """Write the picture to `path`, whose suffix is one of SUFFIXES. unit: what one second of the timeline is called.

    Raises RequestError where it cannot be written.
    """
    from matplotlib.figure import Figure

    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"--out {path}: is no kind of picture. Works: a name that ends in {', '.join(SUFFIXES)}.")
    boxes = [box for rank, row in enumerate(timeline.ranks) for timed in row for box in _boxes(timed, rank)]
    figure = Figure(figsize=_size(timeline, boxes), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    _draw_rows(axes, timeline)
    _draw_boxes(axes, boxes)
    _draw_numbers(figure, axes, boxes)
    _label(axes, timeline, title, unit)
    _legend(figure, timeline)
    try:
        figure.savefig(path, dpi=DPI, metadata={"Software": None} if path.suffix.lower() == ".png" else None)
    except OSError as error:
        raise RequestError(f"--out {path}: cannot be written: {error.strerror}.") from None


def _boxes(timed: Timed, rank: int) -> list[_Box]:
    """The boxes of an action: none for a transfer or for what takes no time, two for a combined one, the forward above."""
    action = timed.action
    if not computes(action) or timed.end <= timed.begin:
        return []
    place: dict[str, Any] = {"rank": rank, "begin": timed.begin, "end": timed.end}
    if action.kind != "combined":
        chunk, microbatch = action.chunk, action.microbatch
        return [_Box(**place, low=0, high=1, shade=SHADES[action.kind], chunk=chunk, microbatch=microbatch)]
    assert action.backward_chunk is not None and action.backward_microbatch is not None, "it has two halves"
    return [
        _Box(**place, low=0.5, high=1, shade=0, chunk=action.chunk, microbatch=action.microbatch),
        _Box(**place, low=0, high=0.5, shade=1, chunk=action.backward_chunk, microbatch=action.backward_microbatch),
    ]


def _size(timeline: Timeline, boxes: Sequence[_Box]) -> tuple[float, float]:
    """Inches: the median box wide enough for its number, within what a page can show."""
    lengths = sorted(box.end - box.begin for box in boxes)
    median = lengths[len(lengths) // 2] if lengths else 1.0
    width = 2.4 + INCHES_PER_BOX * timeline.total / median
    height = 1.9 + INCHES_PER_ROW * len(timeline.ranks)
    return _within(width, WIDTHS), _within(height, HEIGHTS)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _draw_rows(axes: Axes, timeline: Timeline) -> None:
    """A pale bar behind each rank, which shows wherever it waits."""
    ranks = range(len(timeline.ranks))
    axes.barh(ranks, [timeline.total] * len(ranks), height=BOX_HEIGHT, color=IDLE, zorder=0)


def _draw_boxes(axes: Axes, boxes: Sequence[_Box]) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [
        Rectangle(
            (box.begin, box.rank + BOX_HEIGHT * (0.5 - box.high)),
            box.end - box.begin,
            BOX_HEIGHT * (box.high - box.low),
        )
        for box in boxes
    ]
    colors = [box.color for box in boxes]
    axes.add_collection(PatchCollection(patches, facecolors=colors, edgecolors="white", linewidths=0.6, zorder=2))


def _draw_numbers(figure: Figure, axes: Axes, boxes: Sequence[_Box]) -> None:
    """The microbatch in every box that has room for it."""
    last = max((box.end for box in boxes), default=1.0) or 1.0
    ranks = 1 + max((box.rank for box in boxes), default=0)
    points_per_second = 72 * (figure.get_figwidth() - 2.2) / last
    points_per_row = 72 * (figure.get_figheight() - 1.6) / ranks
    # one size for all numbers of boxes of one length
    digits = max((len(str(box.microbatch)) for box in boxes), default=1)
    for box in boxes:
        room = (box.end - box.begin) * points_per_second / (0.62 * digits + 0.25)
        size = min(9.0, room, 0.62 * points_per_row * BOX_HEIGHT * (box.high - box.low))
        if size >= 4:
            middle = box.rank + BOX_HEIGHT * (0.5 - (box.high + box.low) / 2)
            axes.text(
                (box.begin + box.end) / 2,
                middle,
                str(box.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=TEXT_COLORS[box.shade],
                zorder=3,
            )


def _label(axes: Axes, timeline: Timeline, title: str, unit: str) -> None:
    """Title and axes; at the right edge of each row, how long its rank waits and how many activations it keeps."""
    ranks = range(len(timeline.ranks))
    live = peak_live(timeline.schedule)
    axes.set_title(title, loc="left", fontsize=11.5, color=INK, pad=10)
    axes.set_xlim(0, timeline.total or 1.0)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=9, color=INK)
    axes.set_xlabel(unit, fontsize=9, color=QUIET)
    axes.tick_params(length=0, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=8, labelcolor=QUIET)
    for side in axes.spines.values():
        side.set_visible(False)
    right = axes.secondary_yaxis("right")
    right.set_yticks(ranks, [f"bubble {bubble_text(timeline.bubble_of(r))}, {live[r]} live" for r in ranks])
    right.tick_params(length=0, labelsize=8, labelcolor=QUIET)
    right.spines["right"].set_visible(False)


def _legend(figure: Figure, timeline: Timeline) -> None:
    """One column for each chunk, one row for each kind of action in the schedule."""
    from matplotlib.patches import Patch

    kinds = {action.kind for row in timeline.schedule.ranks for action in row if computes(action)}
    names = [("forward", 0)]
    if kinds & {"backward", "combined"}:
        names.append(("backward", 1))
    if "input_gradient" in kinds:
        names += [("input gradient", 1), ("weight gradient", 2)]
    virtual = timeline.schedule.virtual
    handles = []
    for chunk in range(min(virtual, len(FAMILIES))):
        where = f", chunk {chunk}" if virtual > 1 else ""
        handles += [Patch(facecolor=FAMILIES[chunk][shade], label=f"{name}{where}") for name, shade in names]
    handles.append(Patch(facecolor=IDLE, label="waiting"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=min(len(handles), max(1, int(figure.get_figwidth() / 1.75))),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.4,
    )
