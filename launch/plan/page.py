"""`launch plan … --html`: the plan as one page that needs nothing else, with sliders that count its memory again."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.check.built import not_built
from core.config.override import settings
from core.config.run import RunConfig
from core.errors import RequestError
from core.parallel.mesh import fold
from core.pipeline.layout import layout_of
from core.pipeline.schedule import make_schedule
from core.pipeline.simulate import Costs, Timeline, simulate
from launch.describe import setting_text, short
from launch.plan.book import book
from launch.plan.drawing import draw, windows
from launch.plan.memory import MemoryPlanner
from launch.plan.options import recomputable
from launch.plan.quick import QuickMemory
from launch.plan.result import Plan
from launch.plan.text import GIB, MIB
from launch.plan.time import plan_time
from launch.profiles import find_profile

FOLDER = Path(__file__).parent
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "working")
SLIDERS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "vpp": "virtual stages of a pipeline rank",
    "ep": "expert parallel",
    "microbatch": "sequences of a microbatch",
    "batch": "sequences of a global batch",
}
SHORT = {"microbatch": "microbatch", "batch": "global batch"}
# Colours of the walls of a step, in the order of their size.
WALLS = ("#2f6db5", "#dd7f2a", "#3f9b5b", "#8560b8", "#c9546d", "#2f979d", "#b8992a", "#857a6d", "#9aa1ab")


def write_page(
    run: RunConfig, origins: Mapping[str, str], plan: Plan, path: Path, planner: MemoryPlanner | None = None
) -> None:
    """Write the page of a plan to `path`. origins: where every setting comes from. planner: one that knows the run's layers already.

    Raises RequestError where it cannot be written.
    """
    memory = QuickMemory(run, (planner or MemoryPlanner()).traces)
    numbers = json.dumps(book(run, memory), allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    filled = {
        "title": html.escape(f"{run.family} {run.size} on {run.ranks} × {run.hardware}"),
        "style": _file("page.css"),
        "lead": html.escape(_lead(run)),
        "cards": "".join(_cards(run, plan)),
        "notes": "".join(_notes(run)),
        "controls": "".join(_controls(run)),
        "legend": "".join(_legend(plan)),
        "timeline": "".join(_timeline(run)),
        "time": "".join([*_walls(plan), *_communication(plan)]),
        "settings": "".join(_settings(run, origins)),
        "book": numbers,
        "script": _file("page.js"),
    }
    # In one pass: what is filled in may hold braces of its own.
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], _file("page.html"))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--html {path}: cannot be written: {error.strerror}.") from None


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8").strip()


def _lead(run: RunConfig) -> str:
    mesh, train = fold(run.parallel, run.ranks), run.train
    folds = (
        " × ".join(f"{axis} {size}" for axis, size in zip(folding.axes, folding.sizes, strict=True))
        for folding in (mesh.dense, mesh.expert)
    )
    tokens = train.global_batch * train.sequence_tokens
    batch = f"{train.global_batch:,} sequences of {train.sequence_tokens:,} tokens, {short(tokens)} tokens a step"
    return f"Attention {next(folds)}. Experts {next(folds)}, {run.parallel.dispatcher}. {batch}."


def _cards(run: RunConfig, plan: Plan) -> Iterator[str]:
    """The numbers that a reader looks for first."""
    if plan.time is not None:
        yield _card(f"{plan.time.tokens_per_second:,.0f}", "tokens a second of a GPU, predicted")
        yield _card(f"{plan.time.tflops:,.0f}", "TFLOPS of a GPU, predicted")
        yield _card(_seconds(plan.time.seconds), "a step")
        yield _card(f"{plan.time.bubble:.1%}", "bubble of the pipeline")
    worst = plan.worst_rank
    yield _card(_size(worst.balanced.total), f"memory of the fullest rank, {worst.rank}")
    if plan.headroom is not None:
        words = "free on it" if plan.headroom >= 0 else "too much: it does not fit"
        yield _card(_size(abs(plan.headroom)), words, "" if plan.headroom >= 0 else " bad")


def _card(value: str, name: str, kind: str = "") -> str:
    return f'<div class="card{kind}"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _notes(run: RunConfig) -> Iterator[str]:
    """What of it cannot be started yet."""
    late = [f"{fault.setting}={fault.value}" for fault in not_built(run)]
    if late:
        yield f'<p class="note">Planned, and cannot start yet: <code>{html.escape(", ".join(late))}</code>.</p>'


def _legend(plan: Plan) -> Iterator[str]:
    """What the colours of the memory's bars mean, and the line across them."""
    yield from (f'<li><i style="background:var(--{part})"></i>{part}</li>' for part in MEMORY_PARTS)
    if plan.capacity is not None:
        yield f'<li><i class="line"></i>{_size(plan.capacity)} of the device</li>'


def _controls(run: RunConfig) -> Iterator[str]:
    """A slider for each degree and batch, a box for each part that can be computed again. page.js says how far they go."""
    for title, names in (("Mapping", ("tp", "cp", "pp", "vpp", "ep")), ("Batch", ("microbatch", "batch"))):
        yield f"<fieldset><legend>{title}</legend>"
        for name in names:
            yield (
                f'<div class="slider"><label for="slide-{name}" title="{SLIDERS[name]}">{SHORT.get(name, name)}</label>'
                f'<input type="range" id="slide-{name}" min="0" max="0" step="1" value="0">'
                f'<output id="value-{name}" for="slide-{name}"></output></div>'
            )
        yield "</fieldset>"
    yield "<fieldset><legend>Computed again</legend>"
    for name in recomputable(run.model):
        yield f'<label class="check"><input type="checkbox" id="again-{name}">{name}</label>'
    yield "</fieldset>"


def _timeline(run: RunConfig) -> Iterator[str]:
    """The real schedule in time: in seconds where the hardware's speeds are known."""
    profile, p = find_profile(run.hardware), run.parallel
    layout = layout_of(run.model, p)
    if p.pp == 1:
        yield '<p class="note">One pipeline rank: every microbatch goes forward and backward, one after the other.</p>'
        return
    timeline: Timeline | None = None
    known = profile.speeds is not None
    if known:
        timeline = plan_time(run, profile).timeline
    if timeline is None:
        schedule = make_schedule(p.schedule, stages=p.pp, virtual=layout.virtual, microbatches=run.microbatches)
        timeline, known = simulate(schedule, Costs()), False
    unit = "" if known else " A forward takes one unit of time and a backward two: nothing is known of this hardware."
    yield (
        f'<p class="note">Schedule {p.schedule}, {timeline.schedule.microbatches:,} microbatches on {p.pp} ranks of '
        f"{layout.virtual} virtual stages. Pale boxes go forward, full ones backward; a colour is a virtual stage, a number a "
        f"microbatch, and grey is waiting.{unit}</p>"
    )
    for window in windows(timeline):
        yield f'<div class="box"><p class="axis">{window.name}</p>{draw(timeline, window, known)}</div>'


def _walls(plan: Plan) -> Iterator[str]:
    """What a step goes to."""
    if plan.time is None:
        return
    walls = sorted(((name, s) for name, s in plan.time.walls.items() if s > 0), key=lambda each: -each[1])
    colors = [WALLS[min(i, len(WALLS) - 1)] for i in range(len(walls))]
    words = ", ".join(f"{name} {seconds / plan.time.seconds:.1%}" for name, seconds in walls)
    yield "<h2>Time</h2><p class='note'>What a step of the slowest rank goes to. Predictions rank mappings; docs/throughput.md says "
    yield "how far they are from published runs.</p><div class='box'>"
    yield f'<div class="wall" role="img" aria-label="{html.escape(words)}">'
    for (name, seconds), color in zip(walls, colors, strict=True):
        share = seconds / plan.time.seconds
        yield f'<i title="{html.escape(name)}: {share:.1%}" style="width:{100 * share:.2f}%;background:{color}"></i>'
    yield '</div><ul class="legend">'
    for (name, seconds), color in zip(walls, colors, strict=True):
        words = f"{_seconds(seconds)}, {seconds / plan.time.seconds:.1%}"
        yield f'<li><i style="background:{color}"></i>{html.escape(name)} <span class="origin">{words}</span></li>'
    yield "</ul></div>"


def _communication(plan: Plan) -> Iterator[str]:
    """A row for each axis."""
    if not plan.communication:
        return
    yield "<h2>Communication</h2><p class='note'>Of the rank that sends most over an axis, in one step.</p><div class='box'><table>"
    yield "<thead><tr><th>axis</th><th>NVLink domain</th><th class='number'>sent</th><th class='number'>time</th>"
    yield "<th class='number'>not hidden</th><th style='width:34%'></th></tr></thead><tbody>"
    longest = max(each.seconds for each in plan.communication) or 1.0
    for each in plan.communication:
        hidden = 100 * (each.seconds - each.exposed_seconds) / longest
        yield (
            f"<tr><td>{each.axis}</td><td>{'inside' if each.inside else 'leaves it'}</td>"
            f'<td class="number">{_size(each.sent_bytes)}</td><td class="number">{_seconds(each.seconds)}</td>'
            f'<td class="number">{_seconds(each.exposed_seconds)}</td><td><div class="bar">'
            f'<i title="not hidden" style="width:{100 * each.exposed_seconds / longest:.2f}%;background:var(--activations)"></i>'
            f'<i title="hidden" style="width:{max(hidden, 0):.2f}%;background:var(--gradients)"></i></div></td></tr>'
        )
    yield "</tbody></table></div>"


def _settings(run: RunConfig, origins: Mapping[str, str]) -> Iterator[str]:
    for key, value in {"ranks": run.ranks, **settings(run)}.items():
        origin = origins.get(key, "")
        kind = "origin set" if origin.startswith("-") else "origin"
        cells = f"<td><code>{html.escape(key)}</code></td><td><code>{html.escape(setting_text(value))}</code></td>"
        yield f'<tr>{cells}<td class="{kind}">{html.escape(origin)}</td></tr>'


def _size(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / MIB:,.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
