"""Progress of a command that moves bytes: a bar on a terminal, nothing where the output is read by a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the bytes done and in all. The bar goes to stderr; a context that puts the terminal right again."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def size(count: float) -> str:
    """Bytes for people: 512 B, 1.50 GiB."""
    unit = 0
    while count >= 1024 and unit + 1 < len(UNITS):
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 else f"{count:.2f} {UNITS[unit]}"
