"""The picture of several runs' losses, and the self-contained page around it."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launch.comparison import COLUMNS, Comparison, Measured, rows, summary
from launch.report import PAGE, figure_html
from launch.report_figures import DPI, INK, PHASES, REFERENCE, STYLE, Picture, draw_line, smoothed

CAPTION = (
    "Above: the training loss of each step (pale), its running mean, and the validation loss where it was measured (dots). Below: how much "
    "higher the running mean of each run is than the first's."
)


def write_page(runs: Sequence[Measured], comparison: Comparison, path: Path) -> None:
    """The picture, how the runs ended, and what differs in their settings, in one file. Raises OSError where it cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Picture(path=Path(folder) / "loss.png", title="Losses", caption=CAPTION)
        draw_comparison(runs, comparison, picture.path)
        path.write_text(_page(comparison, picture), encoding="utf-8")


def draw_comparison(runs: Sequence[Measured], comparison: Comparison, path: Path) -> None:
    """Losses of all runs over steps or tokens, and below them the differences to the first. Raises OSError where it cannot be written."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 6.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for number, run in enumerate(runs):
            _draw_run(above, run, PHASES[number % len(PHASES)])
        below.axhline(0.0, color=REFERENCE, linewidth=1.0)
        for number, run in enumerate(runs[1:], start=1):
            places, difference = _differences(run, runs[0], comparison)
            draw_line(below, places, difference, color=PHASES[number % len(PHASES)], linewidth=1.6)
        above.set(ylabel="loss (nats a token)", title="Loss")
        above.legend()
        unit = "step" if comparison.by == "step" else "tokens trained on"
        below.set(xlabel=unit, ylabel=f"over {runs[0].name}", title="Difference of the running means")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        metadata = {"Software": None} if path.suffix.lower() == ".png" else None
        figure.savefig(path, dpi=DPI, metadata=metadata)


def _draw_run(axes: Axes, run: Measured, color: str) -> None:
    places, losses = np.array(run.places), np.array(run.losses)
    draw_line(axes, places, losses, color=color, alpha=0.2, linewidth=0.7)
    draw_line(axes, places, smoothed(losses), color=color, linewidth=1.8, label=run.name)
    if run.validation:
        at, tested = zip(*run.validation, strict=True)
        axes.plot(at, tested, color=color, marker="o", markersize=4, markeredgecolor=INK, linestyle="none")


def _differences(run: Measured, first: Measured, comparison: Comparison) -> tuple[np.ndarray, np.ndarray]:
    """The places that both cover, those of `first`, and the difference of the running means there; between two places of a run, on the
    straight line."""
    places = np.array([place for place in first.places if comparison.first <= place <= comparison.last])
    own = np.interp(places, run.places, smoothed(np.array(run.losses)))
    return places, own - np.interp(places, first.places, smoothed(np.array(first.losses)))


def _page(comparison: Comparison, picture: Picture) -> str:
    names = [run.name for run in comparison.outcomes]
    body = figure_html(picture)
    body += "<h2>How they ended</h2>" + _table([COLUMNS, *rows(comparison)])
    if comparison.settings:
        settings = [("setting", *names), *((key, *values) for key, values in comparison.settings)]
        body += "<h2>What differs in their settings</h2>" + _table(settings)
    else:
        body += "<p>All settings are the same.</p>"
    title, lead = f"Comparison of {len(names)} runs", html.escape(summary(comparison))
    return PAGE.format(title=title, lead=lead, cards="", body=body)


def _table(lines: Sequence[Sequence[str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="facts"><table>{cells}</table></div>'
