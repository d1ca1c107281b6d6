"""A checkpoint of its own, outside any run, that is written in the open and appears at its address whole or not at all.

What was finished before a kill is kept: every file that is complete leaves a note in `journal/`, and the next writer of the very same
checkpoint goes on from there. In a folder the unfinished one lies beside its place as `.NAME.partial`; in an object store it lies in its
place, and is no checkpoint before its manifest is there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckpt.files.address import is_remote, open_files
from ckpt.files.protocol import Address
from ckpt.manifest import MANIFEST, PARTIAL, Manifest, manifest_bytes
from ckpt.store.protocol import Written, written_from_json, written_to_json
from core.errors import RequestError

JOURNAL = "journal"
PLAN = f"{JOURNAL}/plan.json"


class Target:
    """Where a checkpoint is made; `files` are those of the unfinished one.

    fingerprint: what it is made of; what lies there of another one is removed.
    """

    def __init__(self, address: Address, fingerprint: str, *, overwrite: bool = False) -> None:
        """Raises RequestError where the address holds something already."""
        self.address, self.remote = address, is_remote(address)
        if not self.remote:
            self.address = Path(address).absolute()
        taken = open_files(self.address).sizes()
        if self.remote and MANIFEST not in taken:
            taken = {}
        if taken and not overwrite:
            raise RequestError(f"{address}: holds something already. Give an address that is new, or add --overwrite.")
        self.files = open_files(self.address if self.remote else _partial(Path(self.address)))
        if self._plan() != fingerprint:
            self.files.remove("")
            self.files.write(PLAN, [json.dumps(fingerprint).encode()])

    def done(self) -> list[Written]:
        """The files that a writer before has finished."""
        sizes = self.files.sizes()
        notes = [path for path in sizes if path.startswith(f"{JOURNAL}/") and path != PLAN]
        found = [_read_note(self.files.read(path)) for path in sorted(notes)]
        return [written for written in found if written and sizes.get(written.path) == written.file.size]

    def note(self, number: int, written: Written) -> None:
        """Keep that file `number` is finished."""
        self.files.write(f"{JOURNAL}/{number:06d}.json", [json.dumps(written_to_json(written)).encode()])

    def commit(self, manifest: Manifest) -> None:
        """Make it a checkpoint."""
        self.files.remove(JOURNAL)
        self.files.write(MANIFEST, [manifest_bytes(manifest)])
        if not self.remote:
            place = Path(self.address)
            old = None
            if place.exists():
                old = place.rename(place.with_name(f".{place.name}.{os.getpid()}.replaced"))
            _partial(place).rename(place)
            if old is not None:
                open_files(old).remove("")

    def _plan(self) -> str | None:
        try:
            said = json.loads(self.files.read(PLAN))
        except (OSError, ValueError):
            return None
        return said if isinstance(said, str) else None


def _partial(place: Path) -> Path:
    return place.with_name(f".{place.name}{PARTIAL}")


def _read_note(content: bytes) -> Written | None:
    """A note, or None for one that the kill has cut short."""
    try:
        return written_from_json(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return None
