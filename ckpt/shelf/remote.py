"""The checkpoints of a run in an object store, which knows neither renames nor locks.

A checkpoint is `<run>/checkpoints/step_00000100.<token>/…`, and is one exactly when its manifest is there, which is written last; a prefix
without a manifest is a save that is under way or was killed. Of several saves of one step the newest counts. `checkpoints/latest`
names the newest for people and other programs; we do not read it.

Who saves keeps an object `checkpoints/savers/<token>` and writes another number into it every few seconds. A saver that finds such
an object of another watches it for a while: where it changes, another process saves into this run; where it does not, that one was killed.
No clocks are compared. Two that begin in the same moment may both step back. One that was stopped for longer than it was
watched is taken for dead and its objects are removed; its save then fails, and nothing else is hurt.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpt.files.remote import Place, RemoteFiles, place_of
from ckpt.manifest import MANIFEST, file_faults, read_manifest
from ckpt.shelf.local import LATEST
from ckpt.shelf.protocol import Complete, Survey
from core.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8,})\.[0-9a-f]+")
_SAVERS = "savers"
# A saver says that it lives every so often; who has not for as long as it was watched is dead.
BEAT_SECONDS = 2.0
WATCH_SECONDS = 10.0


class RemoteShelf:
    """The checkpoints of the run at a URL."""

    def __init__(self, url: str) -> None:
        """Raises RequestError for a URL that cannot be opened."""
        self._run = place_of(url)
        self._files = RemoteFiles(self._run.below("checkpoints").url)

    @property
    def address(self) -> str:
        """The run's URL."""
        return self._run.url

    @contextmanager
    def only_saver(self) -> Iterator[None]:
        """Hold the run for one saver. Raises CheckpointError if another process saves into it now.

        Where a saver was killed, this takes WATCH_SECONDS once.
        """
        mine = f"{_SAVERS}/{secrets.token_hex(4)}"
        ended = threading.Event()
        self._files.write(mine, [b"0"])
        beating = threading.Thread(target=_beat, args=(self._files, mine, ended), daemon=True)
        beating.start()
        try:
            self._watch(mine)
            yield
        finally:
            ended.set()
            beating.join()
            with suppress(OSError):  # it is not written any more, so that the next saver takes it for what it is
                self._files.remove(mine)

    def begin(self, step: int) -> str:
        """Remove what interrupted saves have left, and name a new prefix for `step`. Only for the holder of `only_saver`."""
        names = self._names()
        for name in names:
            if not names[name]:
                self._files.remove(name)
        self._remove_replaced()
        return self._place(f"step_{step:08d}.{secrets.token_hex(4)}").url

    def publish(self, step: int, partial: str, manifest: bytes) -> str:
        """Write the manifest, by which the checkpoint is one, point `latest` to it, and remove an older save of that step."""
        RemoteFiles(partial).write(MANIFEST, [manifest])
        name = place_of(partial).prefix.rpartition("/")[2]
        with suppress(OSError):  # the checkpoint is there; what is left of others the next save removes or tells of
            self._files.write(LATEST, [f"{name}\n".encode()])
            self._remove_replaced()
        return partial

    def discard(self, partial: str) -> None:
        """Remove what is left of a save that failed; nothing, where it has its manifest."""
        name = place_of(partial).prefix.rpartition("/")[2]
        with suppress(OSError):  # what cannot be removed now is by the next save
            if not self._names().get(name, True):
                self._files.remove(name)

    def next_sequence(self) -> int:
        """The number that makes a save the newest of its run."""
        return max((found.sequence for found in self.survey().complete), default=0) + 1

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest complete checkpoints. What is not complete is left alone: it may be evidence."""
        complete = self.survey().complete
        with suppress(OSError):  # what is left of them, the next save removes or tells of
            for old in complete[: max(len(complete) - keep, 0)]:
                self._remove(old)

    def survey(self) -> Survey:
        """Look at every checkpoint; nothing is changed. Of two complete saves of a step the newer one alone is told."""
        complete, incomplete = self._survey()
        newest = {found.step: found for found in complete}
        return Survey(complete=tuple(f for f in complete if newest[f.step] is f), incomplete=tuple(incomplete))

    def _survey(self) -> tuple[list[Complete], list[str]]:
        """All complete saves, oldest first, and what is wrong with the others."""
        complete, incomplete = [], []
        for name, has_manifest in self._names().items():
            place = self._place(name)
            if not has_manifest:
                incomplete.append(f"{place.url}: half-written, its save is under way or was interrupted")
                continue
            files = RemoteFiles(place.url)
            try:
                manifest = read_manifest(files)
            except CheckpointError as error:
                incomplete.append(str(error))
                continue
            faults = file_faults(files, manifest)
            if faults:
                incomplete.append(f"{place.url}: damaged, {next(iter(faults.values()))}")
            else:
                complete.append(Complete(address=place.url, step=_step(name), sequence=manifest.sequence))
        return sorted(complete, key=lambda found: found.sequence), incomplete

    def _names(self) -> dict[str, bool]:
        """Every prefix that bears a checkpoint's name, and whether its manifest is there."""
        found: dict[str, bool] = {}
        for path in self._files.sizes():
            name, _, inside = path.partition("/")
            if inside and _NAME.fullmatch(name):
                found[name] = found.get(name, False) or inside == MANIFEST
        return found

    def _place(self, name: str) -> Place:
        return self._files.place.below(name)

    def _remove_replaced(self) -> None:
        """Remove the complete saves of which there is a newer one of the same step."""
        saved = [_step(name) for name, has_manifest in self._names().items() if has_manifest]
        if len(saved) == len(set(saved)):
            return  # which is known without reading any manifest
        complete, _ = self._survey()
        newest = {found.step: found for found in complete}
        for found in complete:
            if newest[found.step] is not found:
                self._remove(found)

    def _remove(self, found: Complete) -> None:
        """Remove a checkpoint, its manifest first: what is half-removed must never look like one."""
        files = RemoteFiles(found.address)
        files.remove(MANIFEST)
        files.remove("")

    def _watch(self, mine: str) -> None:
        """Find out whether another saver lives, and remove the signs of those that do not."""
        before = self._signs(mine)
        if not before:
            return
        time.sleep(WATCH_SECONDS)
        after = self._signs(mine)
        living = [sign for sign in after if after[sign] != before.get(sign)]
        if living:
            raise CheckpointError(
                f"{self._files.address}: another process is saving into this run; stop one of them (it keeps {', '.join(living)})"
            )
        for sign in after:
            self._files.remove(sign)

    def _signs(self, mine: str) -> dict[str, bytes]:
        """The objects of all savers but this one, with what they hold now."""
        found = {}
        for path in self._files.sizes():
            if path.startswith(f"{_SAVERS}/") and path != mine:
                with suppress(FileNotFoundError):  # its saver is done
                    found[path] = self._files.read(path)
        return found


def _beat(files: RemoteFiles, mine: str, ended: threading.Event) -> None:
    """Say that this saver lives, until it ends."""
    count = 0
    while not ended.wait(BEAT_SECONDS):
        count += 1
        with suppress(OSError):  # said again soon; who cannot say it for long is rightly taken for dead
            files.write(mine, [str(count).encode()])


def _step(name: str) -> int:
    return int(name.removeprefix("step_").partition(".")[0])
