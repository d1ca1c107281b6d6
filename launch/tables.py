"""A table: ruled on a terminal, tab-separated where another program reads it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `columns`; a cell of several lines has them side by side where another program reads it."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            click.echo("\t".join("; ".join(cell.splitlines()) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
