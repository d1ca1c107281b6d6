"""What happens to checkpoints when processes are killed, disks fill, files cannot be read or are not what was written, savers meet.

Every kind many times, each with another instant, byte or file. After each, the checkpoint before has to load bit for bit, what went
wrong has to be named (file, and tensor and rank where one is hit), and nothing may take longer than 60 s. Prints a row per kind;
ends with 1 if anything was missed.

    python -m benchmarks.faults [--count 500] [--seed 0] [--only kill]
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.files.local import LocalFiles
from ckpt.save import Saving, save
from core.errors import CheckpointError
from core.state.box import whole
from tests.ckpt.harm import (
    ALONE,
    DAMAGES,
    READ_ERRORS,
    Harm,
    Two,
    assert_loads_whole,
    check_said,
    harmed,
    hit_by,
    refusal,
    truth_of,
    two_checkpoints,
)
from tests.ckpt.pieces import piece, random_bits

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 60.0
SAVINGS = (Saving(), Saving(codec="zstd"), Saving(store="torch_dist"))


@dataclass
class Row:
    """What came of one kind. `named` counts where there is something to name."""

    kind: str
    times: int = 0
    loads: int = 0
    named: int | None = None
    longest: float = 0.0
    misses: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.misses and self.loads == self.times and self.named in (None, self.times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="faults of all kinds together (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable()
    chosen = {kind: found for kind, found in KINDS.items() if asked.only in kind}
    shares = sum(share for _, share in chosen.values())
    print(f"{'kind':<36}{'times':>6}  {'before loads':>12}  {'named':>9}  {'longest':>8}", flush=True)
    rows = []
    for kind, (run, share) in chosen.items():
        times = -(-asked.count * share // shares)
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            row = Row(kind=kind, named=None if kind in NOTHING_TO_NAME else 0)
            run(row, times, random.Random(f"{asked.seed} {kind}"), Path(folder))
        named = "-" if row.named is None else f"{row.named} of {row.times}"
        loads = f"{row.loads} of {row.times}"
        print(f"{row.kind:<36}{row.times:>6}  {loads:>12}  {named:>9}  {row.longest:>6.2f} s", flush=True)
        rows.append(row)
    missed = [row for row in rows if not row.passed]
    for row in missed:
        print(f"\nMISSED: {row.kind}\n" + "\n".join(row.misses[:3]), file=sys.stderr)
    total = sum(row.times for row in rows)
    print(f"\n{total} faults; " + ("nothing lost, nothing unnamed." if not missed else f"{len(missed)} kinds failed."))
    return 1 if missed else 0


@contextlib.contextmanager
def one(row: Row) -> Iterator[None]:
    """One fault: counted, timed, and a miss where it raises."""
    row.times += 1
    started = time.monotonic()
    try:
        yield
    except Exception:
        row.misses.append(traceback.format_exc(limit=-4))
    seconds = time.monotonic() - started
    row.longest = max(row.longest, seconds)
    if seconds > MOST_SECONDS:
        row.misses.append(f"took {seconds:.0f} s")


def in_a_program(row: Row, times: int, chance: random.Random, folder: Path, *how: str) -> None:
    """Savers that are killed or meet; the program looks after each that the newest is whole and as new as can be."""
    seeds = [str(chance.randrange(2**31))] if how[0] == "random" else []
    command = [sys.executable, "-m", "tests.ckpt.interrupted", str(folder), how[0], str(times), *seeds, *how[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = [float(line.split()[2]) for line in done.stdout.splitlines()]
    row.times, row.loads, row.longest = times, len(seconds), max(seconds, default=0.0)
    if done.returncode or row.longest > MOST_SECONDS:
        row.misses.append(done.stderr)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of 512 KiB at `folder`; False where this machine does not let us have one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    there = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True, check=False).returncode
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", str(folder)], check=True)


def full_disk(row: Row, times: int, chance: random.Random, folder: Path) -> None:
    """Saves for which there is anything from no room at all to almost enough."""
    with small_disk(folder) as there:
        if not there:
            row.kind += " (limited file size)"
        for _ in range(times):
            saving, run = chance.choice(SAVINGS), folder / "run"
            two = two_checkpoints(run, saving)
            with one(row):
                said = _fill_and_save(folder, run, saving, chance, on_small_disk=there)
                assert str(run) in said, said
                assert any(s in said for s in ("No space left on device", "are free. Make room", "File too large")), (
                    said
                )
                row.named = (row.named or 0) + 1
                for checkpoint in (two.older, two.newer):
                    assert_loads_whole(checkpoint, two.truth[checkpoint])
                row.loads += 1
            shutil.rmtree(run)


def _fill_and_save(folder: Path, run: Path, saving: Saving, chance: random.Random, *, on_small_disk: bool) -> str:
    """What a save says that has not enough room, whether or not it was told so beforehand."""
    truth = truth_of(3) | {"model.more": random_bits("more", (10_000,), torch.float32)}
    state = [piece(name, tensor, whole(tuple(tensor.shape))) for name, tensor in truth.items()]
    ballast, old = folder / "ballast", resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if chance.random() < 0.7:  # as if someone else takes the room after it was looked at
            patch.setattr(LocalFiles, "free_bytes", lambda files: 1 << 40)
        try:
            if on_small_disk:
                free = shutil.disk_usage(folder).free
                ballast.write_bytes(bytes(free - chance.randrange(0, 40_000)))
            else:
                patch.setattr(LocalFiles, "free_bytes", lambda files: 1 << 40)
                resource.setrlimit(resource.RLIMIT_FSIZE, (chance.randrange(40_000), old[1]))
            save(run, 3, state, {}, ALONE, saving)
        except CheckpointError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            ballast.unlink(missing_ok=True)
    raise AssertionError("the save found room")


def harm_files(row: Row, times: int, chance: random.Random, folder: Path, harm: Harm) -> None:
    """Every file in turn."""
    all_of_them = [two_checkpoints(folder / str(i), saving) for i, saving in enumerate(SAVINGS)]
    places = [(two, path) for two in all_of_them for path in two.files]
    chance.shuffle(places)
    for number in range(times):
        two, path = places[number % len(places)]
        with one(row):
            with harmed(two, path, harm, chance) as at:
                check_said(two, path, at)
                row.named = (row.named or 0) + 1
                assert_loads_whole(two.older, two.truth[two.older])
            row.loads += 1


def disk_error(row: Row, times: int, chance: random.Random, folder: Path) -> None:
    """The disk gives an error for one file, or the file is cut short while it is read."""
    all_of_them = [two_checkpoints(folder / str(i), saving) for i, saving in enumerate(SAVINGS)]
    places = [(two, path) for two in all_of_them for path in two.manifest.files if hit_by(two, path, None)]
    chance.shuffle(places)
    for number in range(times):
        two, path = places[number % len(places)]
        with one(row):
            said = _read_badly(two, path, cut=bool(number % 2))
            assert path in said, said
            assert any(f"{tensor} (written by rank {rank})" in said for tensor, rank in hit_by(two, path, None)), said
            row.named = (row.named or 0) + 1
            assert_loads_whole(two.older, two.truth[two.older])
            row.loads += 1


def _read_badly(two: Two, path: str, *, cut: bool) -> str:
    """What a load says."""
    real = LocalFiles.read_into

    def read_into(files: LocalFiles, which: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        if which == path and not cut:
            raise OSError(errno.EIO, "Input/output error", str(files.root / path))
        if which == path:
            (files.root / path).write_bytes(b"")
        real(files, which, offset, buffers)

    intact = (Path(two.newer) / path).read_bytes()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalFiles, "read_into", read_into)
            return refusal(two)
    finally:
        (Path(two.newer) / path).write_bytes(intact)


def _program(*how: str) -> Kind:
    return lambda row, times, chance, folder: in_a_program(row, times, chance, folder, *how)


def _harm(harm: Harm) -> Kind:
    return lambda row, times, chance, folder: harm_files(row, times, chance, folder, harm)


Kind = Callable[[Row, int, random.Random, Path], None]
# Name -> (what to do, its share of all faults).
KINDS: dict[str, tuple[Kind, int]] = {
    "kill -9 of the only rank": (_program("random", "1"), 80),
    "kill -9 of one of two ranks": (_program("random", "2"), 60),
    "kill -9 of one of four ranks": (_program("random", "4"), 40),
    "two savers on one folder": (_program("two"), 40),
    "disk full": (full_disk, 60),
    "read error, or cut short meanwhile": (disk_error, 40),
    **{f"file: {kind}": (_harm(harm), 25) for kind, harm in READ_ERRORS.items()},
    "file: a bit flipped": (_harm(DAMAGES["a bit flipped"]), 60),
    **{f"file: {kind}": (_harm(harm), 25) for kind, harm in DAMAGES.items() if kind != "a bit flipped"},
}
# After a kill there is no damage, and of two savers one is told by the other's lock.
NOTHING_TO_NAME = {kind for kind in KINDS if kind.startswith(("kill", "two"))}


if __name__ == "__main__":
    sys.exit(main())
