"""The checkpoints of the run at an address, and which of them is the newest."""

from __future__ import annotations

import logging
from pathlib import Path

from ckpt.files.protocol import Address
from ckpt.files.url import is_remote
from ckpt.shelf.local import LocalShelf
from ckpt.shelf.protocol import Shelf


def open_shelf(run: Address) -> Shelf:
    """Where the run at `run`, a folder or a URL, keeps its checkpoints."""
    if is_remote(run):
        from ckpt.shelf.remote import RemoteShelf

        return RemoteShelf(str(run))
    return LocalShelf(Path(run))


def latest(run: Address) -> str | None:
    """The newest complete checkpoint of a run, or None. Half-written and damaged ones are skipped with a logged warning."""
    found = open_shelf(run).survey()
    for line in found.incomplete:
        logging.getLogger(__name__).warning("skipped %s", line)
    return found.complete[-1].address if found.complete else None


def steps(run: Address) -> tuple[int, ...]:
    """The steps of the complete checkpoints of a run, ascending."""
    return tuple(sorted(found.step for found in open_shelf(run).survey().complete))
