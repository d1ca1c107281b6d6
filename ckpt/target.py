"""A checkpoint of its own, outside any run, that is written in the open and appears at its address whole or not at all.

What was finished before a kill is kept: every file that is complete leaves a note in `journal/`, and the next writer of the very same
checkpoint goes on from there. In a folder the unfinished one lies beside its place as `.NAME.partial`; in an object store it lies in its
place, and is no checkpoint before its manifest is there.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.files.url import is_remote
from ckpt.manifest import MANIFEST, PARTIAL, Manifest, manifest_bytes
from ckpt.store.protocol import Written, written_from_json, written_to_json
from core.errors import CheckpointError, RequestError

JOURNAL = "journal"
PLAN = f"{JOURNAL}/plan.json"


class Target:
    """Where a checkpoint is made; `files` are those of the unfinished one.

    fingerprint: what it is made of; what lies there of another one is removed. Nobody else writes into a folder until `close`.
    """

    def __init__(self, address: Address, fingerprint: str, *, overwrite: bool = False) -> None:
        """Raises RequestError where the address holds something already, or another process is writing it."""
        self.address, self.remote = address, is_remote(address)
        if not self.remote:
            self.address = Path(address).absolute()
        check_target(self.address, overwrite=overwrite)
        partial = self.address if self.remote else _partial(Path(self.address))
        self._lock = None if isinstance(partial, str) else _lock(partial)
        self.files = open_files(partial)
        if self._plan() != fingerprint:
            for top in {path.partition("/")[0] for path in self.files.sizes()}:
                self.files.remove(top)
            self.files.write(PLAN, [json.dumps(fingerprint).encode()])

    def close(self) -> None:
        """Let others write it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def done(self) -> list[Written]:
        """The files that a writer before has finished."""
        sizes = self.files.sizes()
        notes = [path for path in sizes if path.startswith(f"{JOURNAL}/") and path != PLAN]
        found = [_read_note(self.files.read(path)) for path in sorted(notes)]
        # An object store tells no sizes (None); an object is whole or missing.
        return [written for written in found if written and sizes.get(written.path, -1) in (written.file.size, None)]

    def note(self, number: int, written: Written) -> None:
        """Keep that file `number`, which is on the disk, is finished. A note that is lost with the power costs writing it again."""
        self.files.write(f"{JOURNAL}/{number:06d}.json", [json.dumps(written_to_json(written)).encode()], push=False)

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


def check_target(address: Address, *, overwrite: bool) -> None:
    """Raises RequestError where something stands at the address that must stay. In an object store, leftovers may go."""
    if not is_remote(address) and Path(address).is_file():
        raise RequestError(f"{address}: is a file. Give the name of a folder that does not exist yet.")
    taken = open_files(address).sizes()
    if is_remote(address) and MANIFEST not in taken and (not taken or any(p.startswith(JOURNAL) for p in taken)):
        return
    if taken and not overwrite:
        raise RequestError(f"{address}: holds something already. Give an address that is new, or add --overwrite.")


def _partial(place: Path) -> Path:
    return place.with_name(f".{place.name}{PARTIAL}")


def _lock(folder: Path) -> int:
    """Hold a folder, which is made if need be, as long as this process lives or until the handle is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RequestError(f"{folder}: another process is writing it. Wait for it, or give another address.") from None
    except OSError:
        # A file system without locks: nothing can be said about other writers.
        pass
    return handle


def _read_note(content: bytes) -> Written | None:
    """A note, or None for one that the kill has cut short."""
    try:
        return written_from_json(json.loads(content))
    except (ValueError, KeyError, TypeError):
        return None
