"""`launch compare`: the losses of several runs side by side, where they differ, and whether they agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from core.errors import RequestError
from launch.comparison import COLUMNS, By, Comparison, compare, disagreements, read_measured, rows, summary
from launch.tables import print_table

PAGE_SUFFIX = ".html"
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def show_comparison(
    folders: Sequence[Path], by: By, *, out: Path | None, as_json: bool, within: float | None
) -> tuple[str, ...]:
    """Print the comparison of the runs in `folders`, and write it to `out`; what is further apart than `within`, in sentences.

    Raises RequestError as `read_measured` and `compare` do, and for a file of a kind that is not written.
    """
    if out is not None and out.suffix.lower() not in (PAGE_SUFFIX, *PICTURE_SUFFIXES):
        works = ", ".join((PAGE_SUFFIX, *PICTURE_SUFFIXES))
        raise RequestError(f"--out={out}: is no kind of page or picture that can be written. Works: {works}.")
    runs = read_measured(folders, by)
    comparison = compare(runs, by)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _print(comparison)
    if out is not None:
        # matplotlib takes a second to import
        from launch.compare_page import draw_comparison, write_page

        write = write_page if out.suffix.lower() == PAGE_SUFFIX else draw_comparison
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write(runs, comparison, out)
        except OSError as error:
            raise RequestError(f"--out={out}: cannot be written ({error.strerror}).") from error
        click.echo(str(out), err=as_json)
    return disagreements(comparison, within) if within is not None else ()


def _print(comparison: Comparison) -> None:
    click.echo(summary(comparison))
    print_table(COLUMNS, rows(comparison))
    if comparison.settings:
        names = [run.name for run in comparison.outcomes]
        print_table(("setting", *names), [(key, *values) for key, values in comparison.settings])
    else:
        click.echo("All settings are the same.")
