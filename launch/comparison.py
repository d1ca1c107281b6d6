"""What several runs have measured side by side: how they ended, how far apart, and what differs in their settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.config.override import settings
from core.config.run import RunConfig
from core.errors import RequestError
from core.training.metrics import read_metrics
from launch.describe import setting_text
from launch.folder import RunFile, read_run

By = Literal["step", "tokens"]
# A loss is the mean over so much of the way to the last place that all runs have reached: single steps are too noisy.
LAST_SHARE = 0.1
# What no loss depends on: where checkpoints lie differs between any two runs that name it.
_OF_NO_MATTER = ("checkpoint.address",)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run has measured: `places` are its steps, or the tokens trained on until then, ascending; NaN stands for what was not finite.

    validation: (place, loss) where it was measured.
    """

    name: str
    folder: Path
    file: RunFile
    places: tuple[int, ...]
    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]
    tokens_per_second: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended beside the first: nats a token; None where it was not measured at the same place as in all others.

    loss: mean over the last tenth of what all runs have in common, NaN where one of those losses is not finite. The differences are to the first
    run, whose own are zero.
    """

    name: str
    folder: Path
    steps: int
    loss: float
    difference: float
    validation: float | None
    validation_difference: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs over the places that they share, from `first` to `last`; losses are means of those after `after`.

    common: how many places that is; by tokens, where runs of other batches share few, those of the first run. averaged: how many of them the
    first run's loss is the mean of. validation_at: the last place where all runs measured it. settings: what differs, a value for each run.
    """

    by: By
    first: int
    last: int
    after: float
    common: int
    averaged: int
    validation_at: int | None
    outcomes: tuple[Outcome, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        """As values; a number that is not finite is null."""
        return {
            "by": self.by,
            "first": self.first,
            "last": self.last,
            "common": self.common,
            "averaged": self.averaged,
            "validation_at": self.validation_at,
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "steps": run.steps,
                    "loss": _finite(run.loss),
                    "difference": _finite(run.difference),
                    "validation_loss": _finite(run.validation),
                    "validation_difference": _finite(run.validation_difference),
                    "tokens_per_second": run.tokens_per_second,
                }
                for run in self.outcomes
            ],
            "settings": {key: list(values) for key, values in self.settings},
        }


def read_measured(folders: Sequence[Path], by: By) -> tuple[Measured, ...]:
    """What the runs in `folders` have measured.

    Raises RequestError, naming every such folder, where one holds no run, has measured nothing yet, or has a damaged file.
    """
    if len(folders) < 2:
        raise RequestError("compares two runs or more; give the folder of each.")
    found, faults = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            found.append(_read(folder, name, by))
        except RequestError as error:
            faults.append(str(error))
    if faults:
        raise RequestError("\n".join(faults))
    return tuple(found)


def compare(runs: Sequence[Measured], by: By) -> Comparison:
    """The runs beside the first of them. Raises RequestError where they have no place in common."""
    shared = sorted(set[int].intersection(*(set(run.places) for run in runs))) if by == "step" else []
    first, last = max(run.places[0] for run in runs), min(run.places[-1] for run in runs)
    if by == "step" and shared:
        first, last = shared[0], shared[-1]
    # Exactly the shared steps, or every place of a run in the range that all cover.
    held = [_inside(run, shared if by == "step" else range(first, last + 1)) for run in runs]
    if not all(held):
        stretches = "\n".join(f"  {run.name}: {by} {run.places[0]:,} to {run.places[-1]:,}" for run in runs)
        raise RequestError(f"the runs have no {by} in common:\n{stretches}")
    after = last - LAST_SHARE * last
    losses = [_ending(points, after) for points in held]
    tested = set.intersection(*({place for place, _ in run.validation} for run in runs))
    at = max(tested, default=None)
    validation = [None if at is None else dict(run.validation)[at] for run in runs]
    outcomes = tuple(
        Outcome(
            name=run.name,
            folder=run.folder,
            steps=len(run.places),
            loss=loss,
            difference=loss - losses[0],
            validation=tested_loss,
            validation_difference=_less(tested_loss, validation[0]),
            tokens_per_second=statistics.median(run.tokens_per_second) if run.tokens_per_second else None,
        )
        for run, loss, tested_loss in zip(runs, losses, validation, strict=True)
    )
    return Comparison(
        by=by,
        first=first,
        last=last,
        after=after,
        common=len(held[0]),
        averaged=max(1, sum(place > after for place, _ in held[0])),
        validation_at=at,
        outcomes=outcomes,
        settings=tuple(_differing([run.file for run in runs])),
    )


def disagreements(comparison: Comparison, within: float) -> tuple[str, ...]:
    """A sentence for each run whose loss, or last validation loss, is further than `within` from the first's, or is not finite."""
    first, *others = comparison.outcomes
    found = []
    for run in others:
        for what, own, difference in (
            ("loss", run.loss, run.difference),
            ("validation loss", run.validation, run.validation_difference),
        ):
            # also where it is NaN, which is further away than anything
            if difference is not None and not abs(difference) <= within:
                found.append(
                    f"{run.name}: {what} {_number(own)} is {_signed(difference)} from {first.name}'s, more than {within:g}"
                )
    return tuple(found)


def summary(comparison: Comparison) -> str:
    """What the table's numbers are of."""
    unit = "step" if comparison.by == "step" else "measurement"
    plural = "" if comparison.common == 1 else "s"
    mean = "the last one's" if comparison.averaged == 1 else f"means of the last {comparison.averaged}"
    text = f"{comparison.common:,} {unit}{plural} in common, {comparison.by} {comparison.first:,} to {comparison.last:,}; losses are {mean}."
    if comparison.validation_at is None:
        return f"{text} No validation loss was measured at the same {comparison.by} of all."
    return f"{text} Validation losses are those of {comparison.by} {comparison.validation_at:,}."


COLUMNS = ("run", "steps", "loss", "difference", "validation", "difference", "tokens/s")


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each run under COLUMNS."""
    return [
        (
            run.name,
            f"{run.steps:,}",
            _number(run.loss),
            _signed(run.difference) if place else "",
            _number(run.validation),
            _signed(run.validation_difference) if place else "",
            "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        )
        for place, run in enumerate(comparison.outcomes)
    ]


def _names(folders: Sequence[Path]) -> tuple[str, ...]:
    """The folders' own names, or the paths as they were given where two share one."""
    names = tuple(folder.resolve().name for folder in folders)
    return names if len(set(names)) == len(names) else tuple(map(str, folders))


def _read(folder: Path, name: str, by: By) -> Measured:
    file = read_run(folder)
    try:
        steps = read_metrics(folder)
        places = tuple(int(step["step" if by == "step" else "tokens"]) for step in steps)
        losses = tuple(map(_measured, (step["loss"] for step in steps)))
    except KeyError as error:
        raise RequestError(f"{folder}: a step in its metrics has no {error}; the file is damaged.") from error
    except ValueError as error:
        raise RequestError(str(error)) from error
    if not steps:
        raise RequestError(f"{folder}: has measured no step yet.")
    tested = [(place, step) for place, step in zip(places, steps, strict=True) if "validation_loss" in step]
    return Measured(
        name=name,
        folder=folder,
        file=file,
        places=places,
        losses=losses,
        validation=tuple((place, _measured(step["validation_loss"])) for place, step in tested),
        tokens_per_second=tuple(float(speed) for step in steps if (speed := step.get("tokens_per_second"))),
    )


def _measured(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _inside(run: Measured, places: Sequence[int]) -> list[tuple[int, float]]:
    wanted = places if isinstance(places, range) else set(places)
    return [(place, loss) for place, loss in zip(run.places, run.losses, strict=True) if place in wanted]


def _ending(points: Sequence[tuple[int, float]], after: float) -> float:
    """The mean of the losses after a place, or the last loss where there is none."""
    ending = [loss for place, loss in points if place > after] or [points[-1][1]]
    return math.fsum(ending) / len(ending)


def _differing(files: Sequence[RunFile]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The settings whose values differ, in words; those of a part that some runs have not, are the part's own one line."""
    held = [_settings(file) for file in files]
    said: list[str] = []
    for key in dict.fromkeys(key for found in held for key in found):
        values = tuple(found.get(key, "-") for found in held)
        if len(set(values)) > 1 and not any(key.startswith(f"{whole}.") for whole in said):
            said.append(key)
            yield key, values


def _settings(file: RunFile) -> dict[str, str]:
    run: RunConfig = file.run
    of_run = {"model": f"{run.family} {run.size}", "hardware": run.hardware, "ranks": run.ranks, **settings(run)}
    found = {key: setting_text(value) for key, value in of_run.items() if key not in _OF_NO_MATTER}
    # "model" is no whole whose parts were said with it
    found = {"family and size": found.pop("model"), **found}
    found["first weights"] = "random" if file.init is None else file.init.address
    found["prepared tokens"] = file.identity[:12]
    return found


def _less(value: float | None, first: float | None) -> float | None:
    return None if value is None or first is None else value - first


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"
