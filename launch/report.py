"""The report of a run: one self-contained page, and its pictures as PNGs beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.errors import RequestError
from core.training.metrics import SaveMetrics, read_metrics, read_saves
from launch.describe import forced_words, mapping_facts, short
from launch.folder import SAMPLES_FILE, SUMMARY_FILE, RunFile, read_json, read_run
from launch.progress import duration
from launch.report_figures import Picture, draw_all
from launch.report_precision import draw_precision, precision_table

REPORT_FILE = "report.html"
PICTURES_FOLDER = "report"
SHOWN_SAVES = 3
ENDED = {
    "finished": "finished",
    "stopped": "stopped by a signal, can be resumed",
    "failed": "failed",
    "running": "not ended yet, or killed",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; --ink: #222; --soft: #666; --line: #e2e2e2; --accent: #2f6db5; }}
body {{ margin: 0; background: #f6f6f4; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }}
main {{ max-width: 62rem; margin: 0 auto; padding: 2rem 1.2rem 4rem; }}
h1 {{ margin: 0; font-size: 1.9rem; }}
h2 {{ margin: 2.4rem 0 .8rem; font-size: 1.25rem; }}
.lead {{ margin: .2rem 0 1.6rem; color: var(--soft); }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }}
.card, figure, .sample, .facts {{ background: #fff; border: 1px solid var(--line); border-radius: 10px; }}
.card {{ padding: .8rem 1rem; }}
.card b {{ display: block; font-size: 1.5rem; font-weight: 600; color: var(--accent); }}
.card span {{ color: var(--soft); font-size: .9rem; }}
figure {{ margin: 0 0 1.2rem; padding: 1rem; }}
figure img {{ display: block; width: 100%; height: auto; }}
figcaption {{ margin-top: .6rem; color: var(--soft); font-size: .95rem; }}
table {{ width: 100%; border-collapse: collapse; }}
.facts {{ padding: .3rem 1rem; overflow-x: auto; }}
td {{ padding: .35rem .4rem; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: anywhere;
  white-space: pre-line; }}
tr:last-child td {{ border-bottom: 0; }}
td:first-child {{ width: 13rem; color: var(--soft); }}
.samples {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: .8rem; }}
.sample {{ padding: .8rem 1rem; min-width: 0; }}
.sample h3 {{ margin: 0 0 .5rem; font-size: 1rem; color: var(--soft); }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .88rem/1.5 ui-monospace, monospace; }}
pre .prompt {{ color: var(--accent); font-weight: 600; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">{lead}</p>
<div class="cards">{cards}</div>
{body}
</main>
</body>
</html>
"""


def write_report(run: Path) -> Path:
    """Draw report.html and report/*.png of the run in folder `run`, from what has been measured so far.

    Raises RequestError where the folder holds no run, or a file in it is damaged.
    """
    file = read_run(run)
    try:
        steps, saves = read_metrics(run), read_saves(run)
    except ValueError as error:
        raise RequestError(str(error)) from error
    summary = read_json(run / SUMMARY_FILE) if (run / SUMMARY_FILE).exists() else {}
    samples = read_json(run / SAMPLES_FILE) if (run / SAMPLES_FILE).exists() else {}
    folder = run / PICTURES_FOLDER
    pictures = (*draw_all(steps, summary.get("unigram_entropy"), folder), *draw_precision(steps, folder))
    path = run / REPORT_FILE
    path.write_text(_page(file, steps, saves, summary, samples, pictures), encoding="utf-8")
    return path


def _page(
    file: RunFile,
    steps: list[dict[str, Any]],
    saves: list[SaveMetrics],
    summary: Mapping[str, Any],
    samples: Mapping[str, Any],
    pictures: tuple[Picture, ...],
) -> str:
    config = file.run
    done = steps[-1]["step"] if steps else 0
    ended = ENDED.get(str(summary.get("ended")), "unknown")
    forced = "".join(f" Routing was {text}." for text in forced_words(config))
    lead = f"{done} of {config.train.steps} steps on {config.hardware}, {config.ranks} ranks; {ended}.{forced}"
    cards = "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in _cards(steps, summary)
    )
    figures = "".join(map(figure_html, pictures)) or "<p>No step was finished, so there is nothing to draw.</p>"
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in (*_facts(file, steps, summary), *_checkpoints(saves))
    )
    body = f"<h2>What was measured</h2>{figures}{precision_table(steps)}{_samples(samples)}<h2>The run</h2>"
    body += f'<div class="facts"><table>{rows}</table></div>'
    title = f"{config.family} {config.size}"
    return PAGE.format(title=html.escape(title), lead=html.escape(lead), cards=cards, body=body)


def _cards(steps: list[dict[str, Any]], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The numbers that a reader looks for first."""
    validation = _last(steps, "validation_loss")
    yield "validation loss, last", _number(validation)
    if "unigram_entropy" in summary:
        yield "unigram entropy of the validation text", _number(summary["unigram_entropy"])
    yield "training loss, last step", _number(_last(steps, "loss"))
    speeds = sorted(step["tokens_per_second"] for step in steps if step.get("tokens_per_second"))
    yield "tokens a second, median", f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "-"
    mfu = sorted(step["mfu"] for step in steps if step.get("mfu"))
    if mfu:
        yield "model FLOP utilisation, median", f"{mfu[len(mfu) // 2]:.1%}"


def _facts(file: RunFile, steps: list[dict[str, Any]], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    config = file.run
    yield "model", f"{config.family}, size {config.size}"
    if "parameters" in summary:
        yield "parameters", f"{short(summary['parameters'])}, {short(summary['active_parameters'])} active a token"
    if file.init is not None:
        yield "first weights", f"{file.init.address}, {file.init.what}"
    for name, *lines in mapping_facts(config):
        yield name, "\n".join(lines)
    for text in forced_words(config):
        yield "routing", text
    recipe = config.precision.recipe
    yield "precision", config.precision.compute + (f", products of layers by {recipe.name}" if recipe else "")
    train = config.train
    yield "batch", f"{train.global_batch} sequences of {train.sequence_tokens} tokens a step"
    yield "tokens trained on", f"{steps[-1]['tokens']:,}" if steps else "0"
    if "seconds" in summary:
        yield "wall time of the workers", duration(summary["seconds"])
    best = min((loss for step in steps if (loss := step.get("validation_loss")) is not None), default=None)
    yield "validation loss, last and best", f"{_number(_last(steps, 'validation_loss'))} and {_number(best)}"
    if "unigram_entropy" in summary:
        yield "unigram entropy", f"{summary['unigram_entropy']:.4f} nats a token"
    if "source" in summary:
        yield "data", str(summary["source"])
        yield (
            "tokens in it",
            f"{summary['train_tokens']:,} to train on, {summary['validation_tokens']:,} to validate on",
        )
    yield "seed", str(train.seed)
    yield "command", " ".join(file.command)
    yield "versions", ", ".join(f"{name} {text}" for name, text in file.versions.items())


def _checkpoints(saves: list[SaveMetrics]) -> Iterator[tuple[str, str]]:
    """What the checkpoints cost, the dearest of them first."""
    if saves:
        count = f"{len(saves)} of {max(save.bytes for save in saves) / 2**20:,.1f} MiB"
        shown = sorted(saves, key=lambda save: save.stalled_seconds, reverse=True)[:SHOWN_SAVES]
        yield "checkpoints", "\n".join([count, *(save.sentence for save in shown)])


def figure_html(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    caption = html.escape(picture.caption)
    image = f'<img alt="{html.escape(picture.title)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption><b>{html.escape(picture.title)}.</b> {caption}</figcaption></figure>"


def _samples(samples: Mapping[str, Any]) -> str:
    """The generated text before and after, where there is any; whatever it holds, it is text."""
    prompt = html.escape(str(samples.get("prompt", "")))
    boxes = "".join(
        f'<div class="sample"><h3>{title}</h3><pre><span class="prompt">{prompt}</span>'
        f"{html.escape(str(samples[key]))}</pre></div>"
        for key, title in (("before", "Before training"), ("after", "After training"))
        if samples.get(key) is not None
    )
    note = "<p>What the model writes after the prompt in blue, drawn with the same random numbers both times.</p>"
    return f'<h2>Generated text</h2>{note}<div class="samples">{boxes}</div>' if boxes else ""


def _last(steps: list[dict[str, Any]], name: str) -> float | None:
    """The last value that was measured (None where there is none, or where it was not finite)."""
    return next((step[name] for step in reversed(steps) if name in step), None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
