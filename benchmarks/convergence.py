"""Whether training in few bits learns what bfloat16 learns: the tiny Mixtral on real text under every recipe, same seed and same data.

    python -m benchmarks.convergence                              300 steps each; what is complete in --out is not done again
    python -m benchmarks.convergence --recipes mxfp8,nvfp4        some of them, beside bfloat16
    python -m benchmarks.convergence --docs docs                  writes table and picture into docs/convergence.md

Every run is one call of `launch`. Losses are compared as `launch compare` does it: the mean of the last tenth of the steps, and the last validation
loss. Ends with code 1 where a recipe is further from bfloat16 than LIMIT, or did not run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config.recipe import RECIPES
from core.errors import RequestError, ZooError
from core.training.metrics import read_metrics
from launch.compare_page import draw_comparison
from launch.comparison import Comparison, Measured, compare, disagreements, read_measured
from launch.folder import SUMMARY_FILE, holds_run, read_json, read_run

BASELINE = "bfloat16"
# The same training without any recipe, in another dtype: how far two runs come apart that differ in rounding alone, whatever is rounded.
CONTROL = "float32"
LIMIT = 0.02
STEPS = 300
# The tiny model's own widths are whole blocks of every recipe. Half its layers and half its tokens a step let six runs fit into 15 minutes on two
# cores, where a product of quantised operands is emulated; all sequences of a rank go through the model at once, since weights are rounded
# anew for every microbatch. The validation loss is over four times as many sequences as usual: it has to tell 0.02 apart. So does the
# learning rate: at the tiny model's own 3e-3 float32 ends 0.042 from bfloat16 (0.035 in validation), at this one 0.0016 (0.0024).
SETTINGS = (
    "model.num_layers=2",
    "train.sequence_tokens=128",
    "train.global_batch=8",
    "train.microbatch=4",
    "train.eval_interval=100",
    "train.eval_sequences=128",
    "train.sample_tokens=0",
    "checkpoint.interval=1000",
    "optimizer.learning_rate=1e-3",
    "optimizer.min_learning_rate=1e-4",
    "optimizer.warmup_steps=40",
)
REPOSITORY = Path(__file__).parents[1]
PAGE, PICTURE = "convergence.md", "convergence.png"
BEGIN, END = "<!-- table of benchmarks/convergence.py -->", "<!-- end of table -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one recipe ended: losses in nats a token, differences to bfloat16's; all None where it did not run. seconds: of the workers."""

    name: str
    loss: float | None = None
    difference: float | None = None
    validation: float | None = None
    validation_difference: float | None = None
    seconds: float | None = None
    within: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, print the table, draw the picture."""
    options = _options(arguments)
    folders = {name: options.out.resolve() / name for name in (BASELINE, CONTROL, *options.recipes)}
    ran = [name for name, folder in folders.items() if train(name, folder, options.steps)]
    if BASELINE not in ran:
        print(f"{BASELINE} did not run, so there is nothing to compare with.", file=sys.stderr)
        return 1
    runs, comparison = compared([folders[name] for name in ran])
    rows = table_rows(comparison, folders)
    text = markdown(rows, options.steps)
    print(text)
    if len(runs) > 1:
        draw_comparison(runs, comparison, options.out / PICTURE)
    if options.docs is not None:
        write_docs(options.docs, text, options.out / PICTURE)
    return 0 if all(row.within for row in rows) else 1


def command(name: str, folder: Path, steps: int) -> list[str]:
    """What is typed to train under recipe `name`, or without one in the dtype of BASELINE or CONTROL."""
    plain = name in (BASELINE, CONTROL)
    settings = [*SETTINGS, f"precision.recipe={'none' if plain else name}"]
    dtype = name if plain else BASELINE
    chosen = [text for setting in settings for text in ("--set", setting)]
    return ["mixtral", "--hw", "cpu", "--steps", str(steps), "--dtype", dtype, "--out", str(folder), *chosen]


def train(name: str, folder: Path, steps: int) -> bool:
    """Train under a recipe unless that is complete in `folder`; False where the run fails, having said why."""
    if is_complete(name, folder, steps):
        print(f"{name}: complete in {folder}", file=sys.stderr)
        return True
    if holds_run(folder):
        shutil.rmtree(folder)
    print(f"{name}: {steps} steps …", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *command(name, folder, steps)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"{name}: ended with code {done.returncode}\n{done.stdout[-2000:]}", file=sys.stderr)
    return done.returncode == 0


def is_complete(name: str, folder: Path, steps: int) -> bool:
    """Whether `folder` has the run of that very command, finished."""
    if not holds_run(folder) or not (folder / SUMMARY_FILE).exists():
        return False
    typed = read_run(folder).command
    wanted = command(name, folder, steps)
    if list(typed[-len(wanted) :]) != wanted:
        return False
    measured = read_metrics(folder)
    return bool(measured) and measured[-1]["step"] == steps and read_json(folder / SUMMARY_FILE)["ended"] == "finished"


def compared(folders: Sequence[Path]) -> tuple[tuple[Measured, ...], Comparison]:
    """The runs beside the first; a run alone is beside itself."""
    runs = read_measured(folders if len(folders) > 1 else [*folders, *folders], "step")
    return (runs if len(folders) > 1 else runs[:1]), compare(runs, "step")


def table_rows(comparison: Comparison, folders: dict[str, Path]) -> list[Row]:
    """A row for the baseline and every recipe, also for those that did not run."""
    apart = disagreements(comparison, LIMIT)
    found = {run.folder: run for run in comparison.outcomes}
    rows = []
    for name, folder in folders.items():
        run = found.get(folder)
        if run is None:
            rows.append(Row(name=name))
            continue
        rows.append(
            Row(
                name=name,
                loss=run.loss,
                difference=run.difference,
                validation=run.validation,
                validation_difference=run.validation_difference,
                seconds=read_json(folder / SUMMARY_FILE).get("seconds"),
                within=name in (BASELINE, CONTROL)
                or not any(sentence.startswith(f"{run.name}: ") for sentence in apart),
            )
        )
    return rows


def markdown(rows: Sequence[Row], steps: int) -> str:
    """The table as it stands in the docs."""
    lines = [
        f"| recipe | loss after {steps} steps | to {BASELINE} | validation loss | to {BASELINE} | within {LIMIT} | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.loss is None:
            lines.append(f"| {row.name} | did not run | | | | no | |")
            continue
        base = row.name == BASELINE
        cells = (
            row.name,
            f"{row.loss:.4f}",
            "" if base else f"{row.difference:+.4f}",
            "-" if row.validation is None else f"{row.validation:.4f}",
            "" if base or row.validation_difference is None else f"{row.validation_difference:+.4f}",
            "" if row.name in (BASELINE, CONTROL) else "yes" if row.within else "no",
            "-" if row.seconds is None else f"{row.seconds:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_docs(docs: Path, table: str, picture: Path) -> None:
    """Put the table between the markers of docs/convergence.md, and the picture beside the page. Raises RequestError without both markers."""
    page = docs / PAGE
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    image = ""
    if picture.exists():
        shutil.copyfile(picture, docs / PICTURE)
        image = f"\n\n![Losses of all runs, and their differences to {BASELINE}]({PICTURE})"
    # by a function, since a backslash of the text would mean something in a pattern
    replaced, count = between.subn(lambda _: f"{BEGIN}\n{table}{image}\n{END}", text)
    if count != 1:
        raise RequestError(f"{page}: has to have {BEGIN} and {END} once, between which the table belongs.")
    page.write_text(replaced, encoding="utf-8")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--recipes", type=_recipes, default=tuple(RECIPES), help=f"{','.join(RECIPES)}, or none")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), help="folder of the runs")
    parser.add_argument("--docs", type=Path, help="folder of the page to write into; without it, none")
    return parser.parse_args(arguments)


def _recipes(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no recipe; there are {', '.join(RECIPES)}")
    return names


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ZooError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
