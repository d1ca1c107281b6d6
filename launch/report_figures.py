"""The figures of a report, drawn by matplotlib without a display; each is left out where nothing of it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Steps = Sequence[Mapping[str, Any]]

TRAIN, VALIDATION, REFERENCE, INK, GRID = "#2f6db5", "#d9622b", "#7a7a7a", "#333333", "#e4e4e4"
PHASES = ("#2f6db5", "#d9622b", "#3a9270", "#8b5fb0", "#c9a227", "#5aa9c4", "#b5566f", "#8c8c8c")
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.edgecolor": "#b5b5b5",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
    "legend.frameon": False,
}
DPI = 130
# Longer runs are averaged into so many columns; a panel cannot show more.
COLUMNS = 200
# A model of many layers shows so many of them, evenly spread.
SHOWN_LAYERS = 8
SMOOTHED_REACH = 25
# The last so many of the steps show how a run has ended.
LAST_SHARE = 0.1
# What is told of every MoE layer: name in the metrics, title, lower and upper end of the axis (None: of the data).
INSIGHTS: tuple[tuple[str, str, float | None, float | None], ...] = (
    ("entropy", "Entropy of the load (1: even)", None, 1.0),
    ("dropped", "Dropped share of the choices", 0.0, None),
    ("rank_load", "Busiest rank over the mean", 1.0, None),
    ("logit_max", "Largest router logit", 0.0, None),
    ("logit_rms", "Router logits, root mean square", 0.0, None),
)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure on disk, with the sentence that says what it shows."""

    path: Path
    title: str
    caption: str


def draw_all(steps: Steps, unigram_entropy: float | None, folder: Path) -> tuple[Picture, ...]:
    """Draw every figure that the steps have something for into `folder`, as PNGs."""
    if not steps:
        return ()
    folder.mkdir(parents=True, exist_ok=True)
    drawers: tuple[Callable[[], Picture | None], ...] = (
        lambda: _draw_loss(steps, unigram_entropy, folder / "loss.png"),
        lambda: _draw_optimizer(steps, folder / "learning_rate.png"),
        lambda: _draw_load(steps, folder / "expert_load.png"),
        lambda: _draw_last_load(steps, folder / "layer_load.png"),
        lambda: _draw_insight(steps, folder / "routing.png"),
        lambda: _draw_time(steps, folder / "time.png"),
    )
    with matplotlib.rc_context(STYLE):
        return tuple(picture for drawer in drawers if (picture := drawer()) is not None)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean over a window around each step, narrower at both ends so that it never lags; NaN is passed over."""
    reach = min(len(values) // 25, SMOOTHED_REACH)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    around = np.minimum(reach, np.minimum(places, len(values) - 1 - places))
    first, last = places - around, places + around + 1
    inside = counts[last] - counts[first]
    return np.where(inside > 0, (sums[last] - sums[first]) / np.maximum(inside, 1), np.nan)


def column(steps: Steps, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which `name` was measured, and its values; null (not finite) is NaN."""
    found = [(step["step"], step[name]) for step in steps if name in step]
    values = [np.nan if value is None else value for _, value in found]
    return np.array([number for number, _ in found], dtype=int), np.array(values, dtype=float)


def _draw_loss(steps: Steps, unigram_entropy: float | None, path: Path) -> Picture:
    with new_figure(path, 8.6, 4.2) as figure:
        axes = figure.subplots()
        numbers, losses = column(steps, "loss")
        draw_line(axes, numbers, losses, color=TRAIN, alpha=0.3, linewidth=0.8)
        draw_line(axes, numbers, smoothed(losses), color=TRAIN, linewidth=2, label="train (smoothed)")
        if unigram_entropy is not None:
            label = f"unigram entropy {unigram_entropy:.2f}"
            axes.axhline(unigram_entropy, color=REFERENCE, linestyle="--", linewidth=1.2, label=label)
        measured, validation = column(steps, "validation_loss")
        if len(measured):
            axes.plot(measured, validation, color=VALIDATION, marker="o", markersize=4, linewidth=2, label="validation")
        axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
        whole_steps(axes, numbers)
        axes.legend()
    caption = (
        "Mean next-token loss of each step (pale), its running mean (blue) and the loss on text that is never trained "
        "on (orange); below the dashed line the model uses context, not just how frequent each token is."
    )
    return Picture(path=path, title="Loss", caption=caption)


def _draw_optimizer(steps: Steps, path: Path) -> Picture:
    with new_figure(path, 8.6, 3.0) as figure:
        left, right = figure.subplots(1, 2)
        numbers, rates = column(steps, "learning_rate")
        draw_line(left, numbers, rates, color=TRAIN, linewidth=2)
        left.set(xlabel="step", title="Learning rate", ylim=(0, None))
        left.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        numbers, norms = column(steps, "grad_norm")
        draw_line(right, numbers, norms, color=VALIDATION, linewidth=1.2)
        right.set(xlabel="step", title="Gradient norm (before clipping)")
        right.set_ylim(0, None)
        for axes in (left, right):
            whole_steps(axes, numbers)
    caption = "The learning rate that the schedule gave each step, and the global norm of the gradient that it scaled."
    return Picture(path=path, title="Learning rate", caption=caption)


def _draw_load(steps: Steps, path: Path) -> Picture | None:
    """One panel a layer: experts up, steps along, colour the load over the mean load."""
    with_load = [step for step in steps if step.get("expert_load")]
    if not with_load:
        return None
    names = list(dict.fromkeys(name for step in with_load for name in step["expert_load"]))
    shown = [
        names[i] for i in sorted({round(i) for i in np.linspace(0, len(names) - 1, min(SHOWN_LAYERS, len(names)))})
    ]
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    with new_figure(path, 8.6, 0.6 + 2.1 * down) as figure:
        panels = figure.subplots(down, across, squeeze=False, sharex=True).ravel()
        for axes, name in zip(panels, shown, strict=False):
            image = _load_panel(axes, with_load, name)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(shown) - across) : len(shown)]:
            axes.set_xlabel("step")
            axes.tick_params(labelbottom=True)
        bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.9, pad=0.02, ticks=[0, 0.5, 1, 1.5, 2, 3, 4])
        bar.set_label("load / mean load")
        bar.outline.set_visible(False)  # type: ignore[operator]
    some = "" if len(shown) == len(names) else f" ({len(shown)} of {len(names)} layers)"
    caption = (
        f"How many tokens each expert of each layer got, over the mean{some}: white is its fair share, red is too busy, "
        "blue is idle; a layer whose rows stay dark blue or red is not balanced."
    )
    return Picture(path=path, title="Expert load", caption=caption)


def _load_panel(axes: Axes, steps: Steps, name: str) -> Any:
    mine = [step for step in steps if name in step["expert_load"]]
    loads = np.stack([_finite(step["expert_load"][name]) for step in mine], axis=1)
    loads = loads / np.maximum(loads.mean(axis=0, keepdims=True), 1e-12)
    binned = np.stack(
        [part.mean(axis=1) for part in np.array_split(loads, min(COLUMNS, loads.shape[1]), axis=1)], axis=1
    )
    first, last = mine[0]["step"], mine[-1]["step"]
    extent = (first - 0.5, last + 0.5, -0.5, len(loads) - 0.5)
    norm = TwoSlopeNorm(vcenter=1, vmin=0, vmax=4)
    image = axes.imshow(
        binned, aspect="auto", origin="lower", cmap="RdBu_r", norm=norm, extent=extent, interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set(title=name, ylabel="expert")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def _draw_last_load(steps: Steps, path: Path) -> Picture | None:
    """All layers at once, as they were at the end: layers up, experts along, colour the load over the mean load."""
    with_load = [step["expert_load"] for step in steps if step.get("expert_load")]
    last = with_load[-max(1, round(LAST_SHARE * len(with_load))) :]
    if not last:
        return None
    names = list(dict.fromkeys(name for load in last for name in load))
    rows = [np.mean([_finite(load[name]) for load in last if name in load], axis=0) for name in names]
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, shares in zip(table, rows, strict=True):
        row[: len(shares)] = shares / max(float(shares.mean()), 1e-12)
    with new_figure(path, 8.6, 1.6 + min(6.0, 0.25 * len(rows))) as figure:
        axes = figure.subplots()
        norm = TwoSlopeNorm(vcenter=1, vmin=0, vmax=4)
        image = axes.imshow(table, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
        axes.grid(visible=False)
        shown = sorted({round(i) for i in np.linspace(0, len(names) - 1, min(20, len(names)))})
        axes.set_yticks(shown, [names[i] for i in shown])
        axes.set(xlabel="expert", title="Expert load at the end")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        bar = figure.colorbar(image, ax=axes, pad=0.02, ticks=[0, 1, 2, 3, 4])
        bar.set_label("load / mean load")
        bar.outline.set_visible(False)  # type: ignore[operator]
    counted = "last step" if len(last) == 1 else f"last {len(last)} steps"
    caption = f"How many tokens each expert of every layer got in the {counted}, over the mean of its layer."
    return Picture(path=path, title="Expert load by layer", caption=caption)


def _draw_insight(steps: Steps, path: Path) -> Picture | None:
    """A panel for each number that is told of every layer, a line a layer."""
    told = [step for step in steps if step.get("insight")]
    if not told:
        return None
    names = list(dict.fromkeys(name for step in told for name in step["insight"]))
    colors = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, len(names)))
    with new_figure(path, 8.6, 6.6) as figure:
        panels = figure.subplots(3, 2, sharex=True).ravel()
        for axes, (key, title, low, high) in zip(panels, INSIGHTS, strict=False):
            for number, (name, color) in enumerate(zip(names, colors, strict=True)):
                mine = [step for step in told if name in step["insight"]]
                numbers = np.array([step["step"] for step in mine])
                values = _finite([step["insight"][name].get(key) for step in mine], missing=np.nan)
                label = name if number in (0, len(names) - 1) else None
                draw_line(axes, numbers, values, color=color, linewidth=1.1, label=label)
            axes.set_title(title)
            axes.set_ylim(low, high)
            whole_steps(axes, np.array([step["step"] for step in told]))
        panels[-1].set_axis_off()
        panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", title="layers, first (dark) to last")
        for axes in panels[3:5]:
            axes.set_xlabel("step")
            axes.tick_params(labelbottom=True)
    caption = (
        "Of every layer with experts: how even its load is, how many choices found no room, how much more than the mean the "
        "busiest rank of expert parallelism got, and how large its router's logits are, which should not grow without end."
    )
    return Picture(path=path, title="Routing", caption=caption)


def _finite(values: Sequence[float | None], missing: float = 0.0) -> np.ndarray:
    """The numbers, null (not finite when it was measured) replaced."""
    return np.array([missing if value is None else value for value in values], dtype=float)


def _draw_time(steps: Steps, path: Path) -> Picture | None:
    timed = [step for step in steps if step.get("seconds")]
    if not timed:
        return None
    phases = list(dict.fromkeys(phase for step in timed for phase in step["seconds"]))
    table = np.array([[step["seconds"].get(phase) or 0.0 for phase in phases] for step in timed]).T
    totals = table.sum(axis=1)
    numbers = np.array([step["step"] for step in timed])
    order = np.argsort(-totals)
    with new_figure(path, 8.6, 3.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        colors = [PHASES[i % len(PHASES)] for i in range(len(phases))]
        edges = _step_edges(numbers)
        below = np.zeros(len(numbers))
        for rank, i in enumerate(order):
            above = below + table[i]
            left.stairs(above, edges, baseline=below, fill=True, color=colors[rank], linewidth=0)
            below = above
        left.set(xlabel="step", ylabel="seconds a step", title="Time of each step")
        # a slow first step, or one with an evaluation, must not flatten the rest
        left.set_ylim(0, float(np.percentile(below, 98)) * 1.15 or None)
        whole_steps(left, numbers)
        _phase_bars(right, [phases[i] for i in order], totals[order], colors)
    caption = "Where the wall time went: seconds of each step by phase, and each phase's share of the whole run."
    return Picture(path=path, title="Time per phase", caption=caption)


def _phase_bars(axes: Axes, phases: Sequence[str], totals: np.ndarray, colors: Sequence[str]) -> None:
    places = np.arange(len(phases))
    axes.barh(places, totals, color=colors[: len(phases)], height=0.7)
    axes.set_yticks(places, [phase.replace("_", " ") for phase in phases])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(title="Whole run", xlabel="seconds", xlim=(0, max(float(totals.max()), 1e-9) * 1.25))
    for place, total in zip(places, totals, strict=True):
        axes.text(float(total), float(place), f" {total / max(totals.sum(), 1e-9):.0%}", va="center", color=INK)


def _step_edges(numbers: np.ndarray) -> np.ndarray:
    """One edge more than steps: each step fills the room up to the next one."""
    return np.append(numbers - 0.5, numbers[-1] + 0.5)


def draw_line(axes: Axes, numbers: np.ndarray, values: np.ndarray, **more: Any) -> None:
    """A line, and a marker where there is but one point, which a line would not show."""
    axes.plot(numbers, values, marker="o" if len(numbers) == 1 else None, **more)


def whole_steps(axes: Axes, numbers: np.ndarray) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(numbers) == 1:
        axes.set_xlim(numbers[0] - 1, numbers[0] + 1)


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is written when it is left; it belongs to no window and to no global list of figures."""
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
