"""What a recipe's rounding has lost: a picture by layer and kind of operand, and the numbers of the last step that measured it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from launch.report_figures import PHASES, STYLE, Picture, Steps, draw_line, new_figure, whole_steps

OPERANDS = ("input", "weight", "gradient")
# What is told of an operand: name in the metrics, heading, how it is written.
COLUMNS = (
    ("relative_error", "relative error", "{:.2%}"),
    ("amax", "largest", "{:.3g}"),
    ("saturated", "saturated", "{:.3%}"),
    ("flushed", "flushed", "{:.3%}"),
)
CAPTION = (
    "The error of what a recipe rounds, root mean square over that of the numbers themselves: by layer in the last step that measured it, and the "
    "mean of all layers over the steps. To the right of that, which powers of two the scales lie at: what piles up at an end is out of range."
)

Layers = Mapping[str, Mapping[str, Mapping[str, Any]]]


def draw_precision(steps: Steps, folder: Path) -> tuple[Picture, ...]:
    """The picture of a run that measured it, in `folder`; none of another one."""
    told = [step for step in steps if step.get("precision")]
    if not told:
        return ()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "precision.png"
    with matplotlib.rc_context(STYLE), new_figure(path, 8.6, 6.0) as figure:
        panels = figure.subplot_mosaic([["layers", "layers"], ["steps", "scales"]])
        _by_layer(panels["layers"], told[-1]["precision"])
        _over_steps(panels["steps"], told)
        _scales(panels["scales"], told[-1]["precision"])
        for axes in (panels["layers"], panels["steps"]):
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
            # above the data, which may be a flat line
            highest = max((float(np.nanmax(line.get_ydata(), initial=0.0)) for line in axes.lines), default=0.0)
            axes.set_ylim(0, 1.25 * highest or None)
        panels["layers"].legend(ncols=len(OPERANDS))
    return (Picture(path=path, title="Precision", caption=CAPTION),)


def precision_table(steps: Steps) -> str:
    """The numbers of the last step that measured them, a row a layer, as HTML; empty where none did."""
    last = next((step for step in reversed(steps) if step.get("precision")), None)
    if last is None:
        return ""
    layers: Layers = last["precision"]
    head = "".join(f'<td colspan="{len(COLUMNS)}">{operand}</td>' for operand in OPERANDS)
    names = "".join(f"<td>{heading}</td>" for _ in OPERANDS for _, heading, _ in COLUMNS)
    rows = "".join(
        f"<tr><td>{html.escape(layer)}</td>{''.join(_cells(of_layer.get(operand)) for operand in OPERANDS)}</tr>"
        for layer, of_layer in layers.items()
    )
    return (
        f"<h2>Precision, step {last['step']}</h2><p>Of the elements that are not zero: the error of rounding, the largest size, the share beyond "
        "the largest number that their scale allows, and the share that became zero.</p>"
        f'<div class="facts"><table><tr><td></td>{head}</tr><tr><td>layer</td>{names}</tr>{rows}</table></div>'
    )


def _cells(told: Mapping[str, Any] | None) -> str:
    values = [None if told is None else told[name] for name, _, _ in COLUMNS]
    texts = ["-" if value is None else form.format(value) for value, (_, _, form) in zip(values, COLUMNS, strict=True)]
    return "".join(f"<td>{text}</td>" for text in texts)


def _by_layer(axes: Axes, layers: Layers) -> None:
    names = list(layers)
    for operand, color in zip(OPERANDS, PHASES, strict=False):
        errors = [_number(layers[name].get(operand), "relative_error") for name in names]
        axes.plot(range(len(names)), errors, color=color, marker="o", markersize=4, linewidth=1.2, label=operand)
    shown = sorted({round(i) for i in np.linspace(0, len(names) - 1, min(10, len(names)))})
    axes.set_xticks(shown, [names[i] for i in shown])
    axes.set_title("Relative error by layer, last measured")


def _over_steps(axes: Axes, told: Steps) -> None:
    numbers = np.array([step["step"] for step in told])
    for operand, color in zip(OPERANDS, PHASES, strict=False):
        errors = [
            [_number(of_layer.get(operand), "relative_error") for of_layer in step["precision"].values()]
            for step in told
        ]
        draw_line(axes, numbers, np.array([_mean(row) for row in errors]), color=color, linewidth=1.6)
    axes.set(xlabel="step", title="Mean of all layers")
    whole_steps(axes, numbers)


def _scales(axes: Axes, layers: Layers) -> None:
    ends = [np.inf, -np.inf]
    for operand, color in zip(OPERANDS, PHASES, strict=False):
        found = [of_layer[operand] for of_layer in layers.values() if operand in of_layer]
        if not found:
            continue
        counts = np.sum([told["scales"] for told in found], axis=0)
        first = found[0]["smallest_exponent"]
        axes.stairs(counts / max(1, counts.sum()), np.arange(len(counts) + 1) + first, color=color, linewidth=1.6)
        used = np.flatnonzero(counts) + first
        if len(used):
            ends = [min(ends[0], used[0] - 1), max(ends[1], used[-1] + 2)]
    if ends[0] < ends[1]:
        axes.set_xlim(*ends)
    axes.set(xlabel="power of two of the scale", title="Scales (share of the elements)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _number(told: Mapping[str, Any] | None, name: str) -> float:
    """NaN where it was not measured, or was not finite."""
    return np.nan if told is None or told[name] is None else float(told[name])


def _mean(values: list[float]) -> float:
    known = [value for value in values if np.isfinite(value)]
    return sum(known) / len(known) if known else np.nan
