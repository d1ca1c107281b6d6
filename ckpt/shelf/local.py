"""The checkpoints of a run as folders: which are complete, and the renames by which one appears whole or not at all.

Under `<run>/checkpoints`: `step_00000100` is complete; `step_00000100.<token>.partial` is being written;
`….replaced` is the older save of a step while a newer one takes its place; `….removed` is on its way out.
Only `step_00000100` and, where that is missing, its `.replaced` are ever read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.files.local import LocalFiles
from ckpt.manifest import MANIFEST, file_faults, read_manifest
from ckpt.shelf.protocol import Complete, Survey
from core.errors import CheckpointError

FOLDER = re.compile(r"step_(\d{8,})(?:\.[0-9a-f]+\.(partial|replaced|removed))?")
LATEST = "latest"


class LocalShelf:
    """The checkpoints of the run in a folder."""

    def __init__(self, run: Path) -> None:
        self.run = run

    @property
    def address(self) -> str:
        """The run's folder."""
        return str(self.run)

    @contextmanager
    def only_saver(self) -> Iterator[None]:
        """Hold the run's checkpoint folder for one saver. Raises CheckpointError if another process saves into it now.

        The lock goes with the process, so that a killed saver blocks nobody.
        """
        checkpoints = self.run / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        with open(checkpoints / ".lock", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # A file system without locks: nothing can be said about other savers.
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise CheckpointError(
                        f"{checkpoints}: another process is saving into this run; stop one of them"
                    ) from None
            yield

    def begin(self, step: int) -> str:
        """Tidy up after interrupted saves and make a new partial folder for `step`. Only for the holder of `only_saver`."""
        for folder, old_step, kind in _folders(self.run):
            if kind == "replaced" and not _final(self.run, old_step).is_dir():
                folder.rename(_final(self.run, old_step))
            elif kind:
                shutil.rmtree(folder)
        partial = _beside(self.run, step, "partial")
        partial.mkdir()
        return str(partial)

    def publish(self, step: int, partial: str, manifest: bytes) -> str:
        """Write the manifest, give the partial folder its final name, instead of an older save of that step, and point `latest` to it."""
        LocalFiles(Path(partial)).write(MANIFEST, [manifest])
        for folder, _, _ in os.walk(partial):
            _sync(Path(folder))
        final = _final(self.run, step)
        # Before the renames: whatever needs room on the disk can fail, and after them the checkpoint is there.
        LocalFiles(final.parent).write(f"{LATEST}.new", [f"{final.name}\n".encode()])
        replaced = None
        if final.exists():
            replaced = final.rename(_beside(self.run, step, "replaced"))
        Path(partial).rename(final)
        _sync(final.parent)
        (final.parent / f"{LATEST}.new").replace(final.parent / LATEST)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)  # what is left of it, the next save removes or tells of
        return str(final)

    def discard(self, partial: str) -> None:
        """Remove what is left of a save that failed; nothing, where it has its final name."""
        shutil.rmtree(partial, ignore_errors=True)

    def next_sequence(self) -> int:
        """The number that makes a save the newest of its run."""
        return max((found.sequence for found in self.survey().complete), default=0) + 1

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest complete checkpoints. What is not complete is left alone: it may be evidence."""
        complete = self.survey().complete
        for old in complete[: max(len(complete) - keep, 0)]:
            # Renamed first: a half-removed folder must never look like a checkpoint.
            removed = Path(old.address).rename(_beside(self.run, old.step, "removed"))
            shutil.rmtree(removed, ignore_errors=True)  # what is left of it, the next save removes or tells of

    def survey(self) -> Survey:
        """Look at every checkpoint of a run; nothing is changed. A run without checkpoints has an empty survey."""
        complete, incomplete = [], []
        for folder, step, kind in _folders(self.run):
            if kind == "removed" or (kind == "replaced" and _final(self.run, step).is_dir()):
                continue
            if kind == "partial":
                incomplete.append(f"{folder}: half-written, its save was interrupted")
                continue
            try:
                manifest = read_manifest(LocalFiles(folder))
                faults = file_faults(LocalFiles(folder), manifest)
            except CheckpointError as error:
                incomplete.append(str(error))
                continue
            if faults:
                incomplete.append(f"{folder}: damaged, {next(iter(faults.values()))}")
            else:
                complete.append(Complete(address=str(folder), step=step, sequence=manifest.sequence))
        return Survey(complete=tuple(sorted(complete, key=lambda c: c.sequence)), incomplete=tuple(incomplete))


def _folders(run: Path) -> list[tuple[Path, int, str | None]]:
    """(folder, step, kind) of everything under `checkpoints` that bears a checkpoint's name, by name."""
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        return []
    matches = [(path, FOLDER.fullmatch(path.name)) for path in sorted(checkpoints.iterdir()) if path.is_dir()]
    return [(path, int(match[1]), match[2]) for path, match in matches if match]


def _final(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def _beside(run: Path, step: int, kind: str) -> Path:
    """A name that no other saver, not even one left over from a killed job, is using."""
    return run / "checkpoints" / f"step_{step:08d}.{secrets.token_hex(4)}.{kind}"


def _sync(folder: Path) -> None:
    """Push a folder's own entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
