"""Checkpoints that something happens to: each kind of harm to a file, what has to be said of it, and what must still load."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import MANIFEST, Manifest, read_manifest
from ckpt.save import Saving
from ckpt.shelf.address import latest
from ckpt.verify import verify
from core.errors import CheckpointError
from core.parallel.groups import one_rank
from core.state.box import Box, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import Rank, bits, cut, joined, make_small, piece, poisoned, random_bits, save_as_ranks

ALONE = one_rank().world
NOBODY: set[tuple[str | None, int | None]] = {(None, None)}
Harm = Callable[[Path, random.Random], int | None]


@dataclass(frozen=True, kw_only=True)
class Two:
    """Two checkpoints of a run, by two ranks: the older one is never touched."""

    run: Path
    older: str
    newer: str
    truth: Mapping[str, Mapping[str, Tensor]]
    manifest: Manifest

    @property
    def files(self) -> list[str]:
        """Every file of the newer one, the manifest too."""
        return [*sorted(self.manifest.files), MANIFEST]


def truth_of(step: int) -> dict[str, Tensor]:
    """Tensors in files of their own, tensors behind others in one file, a scalar and one without elements."""
    return {
        "model.experts": random_bits("experts", (4, 2, 3, 8), torch.float32, step),
        "model.norm": random_bits("norm", (6,), torch.bfloat16, step),
        "model.bias": random_bits("bias", (4,), torch.float32, step),
        "optimizer.exp_avg.experts": random_bits("moment", (4, 2, 3, 8), torch.float32, step),
        "optimizer.count": torch.tensor(step),
        "model.none": torch.zeros(0, 3),
    }


def ranks_of(truth: Mapping[str, Tensor]) -> list[Rank]:
    """Experts on two ranks each, a moment in flat halves that no grid fits, the rest whole on both."""
    experts = cut("model.experts", truth["model.experts"], (2, 1, 1, 1))
    moment = truth["optimizer.exp_avg.experts"]
    boxes = (Box(offset=(0, 0, 0, 0), shape=(1, 2, 3, 8)), Box(offset=(1, 0, 0, 0), shape=(3, 2, 3, 8)))
    flat = [[piece("optimizer.exp_avg.experts", moment, box)] for box in boxes]
    others = [n for n in truth if n not in ("model.experts", "optimizer.exp_avg.experts")]
    both = [[piece(n, truth[n], whole(tuple(truth[n].shape)), rank, 2) for n in others] for rank in (0, 1)]
    return joined(experts, flat, both)


def two_checkpoints(run: Path, saving: Saving) -> Two:
    """Steps 1 and 2, laid out as large states are."""
    truth = {step: truth_of(step) for step in (1, 2)}
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, block_bytes=128, own_file_bytes=256, share_bytes=1 << 20)
        older, newer = (save_as_ranks(run, step, ranks_of(truth[step]), {"step": step}, saving) for step in (1, 2))
    manifest = read_manifest(LocalFiles(Path(newer)))
    return Two(run=run, older=older, newer=newer, truth={older: truth[1], newer: truth[2]}, manifest=manifest)


def targets_for(truth: Mapping[str, Tensor]) -> list[ShardedTensor]:
    """All of every tensor, poisoned."""
    return [
        ShardedTensor(
            name=name, shape=tuple(t.shape), box=whole(tuple(t.shape)), data=poisoned(tuple(t.shape), t.dtype)
        )
        for name, t in truth.items()
    ]


def assert_loads_whole(checkpoint: str, truth: Mapping[str, Tensor]) -> None:
    """Bit for bit, into poisoned memory."""
    targets = targets_for(truth)
    load(checkpoint, targets, ALONE)
    for target in targets:
        assert bits(target.data) == bits(truth[target.name]), target.name


def flip(path: Path, chance: random.Random) -> int:
    """One bit; the byte that it is in."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return at


def truncate(path: Path, chance: random.Random) -> None:
    """Any length below the true one."""
    os.truncate(path, chance.randrange(path.stat().st_size))


def lengthen(path: Path, chance: random.Random) -> None:
    """Some bytes more."""
    with path.open("ab") as file:
        file.write(bytes(chance.randrange(1, 9)))


def remove(path: Path, chance: random.Random) -> None:
    """The file is gone."""
    path.unlink()


def put_folder(path: Path, chance: random.Random) -> None:
    """A folder in its place."""
    path.unlink()
    path.mkdir()


def put_pipe(path: Path, chance: random.Random) -> None:
    """A pipe that nobody writes to in its place."""
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path, chance: random.Random) -> None:
    """A link to nothing in its place."""
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES: dict[str, Harm] = {
    "a bit flipped": flip,
    "cut short": truncate,
    "lengthened": lengthen,
    "removed": remove,
}
READ_ERRORS: dict[str, Harm] = {
    "a folder in its place": put_folder,
    "a pipe in its place": put_pipe,
    "a dangling link in its place": put_link,
}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt the main thread where it takes longer, be it in a system call, and fail, whatever becomes of the interruption."""
    late = []

    def give_up(*_: object) -> None:
        late.append(seconds)
        raise AssertionError(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not late, f"not done within {seconds:g} s"


@contextmanager
def harmed(two: Two, path: str, harm: Harm, chance: random.Random) -> Iterator[int | None]:
    """Do harm to a file of the newer checkpoint, and put the true one back; the byte that was changed, if one was."""
    file = Path(two.newer) / path
    intact = file.read_bytes()
    try:
        with at_most(60):
            yield harm(file, chance)
    finally:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(intact)


def hit_by(two: Two, path: str, at: int | None) -> set[tuple[str, int]]:
    """(tensor, rank that wrote it) of the blocks in a file, or of the one that holds its byte `at`."""
    return {
        (entry.name, piece.rank)
        for entry in two.manifest.entries
        for piece in entry.pieces
        for block in piece.blocks
        if block.file == path and (at is None or block.offset <= at < block.offset + block.size)
    }


def check_said(two: Two, path: str, at: int | None) -> None:
    """`verify` names file, tensors and ranks; `load` does where a tensor is hit, and is right where none is."""
    if path == MANIFEST:
        _check_manifest(two, at)
        return
    hit = hit_by(two, path, at)
    damages = verify(two.newer)
    assert {damage.file for damage in damages} == {path}
    assert {(damage.tensor, damage.rank) for damage in damages} == (hit or NOBODY)
    newest = latest(two.run)
    assert newest == (two.older if at is None else two.newer)
    if not hit:
        assert_loads_whole(two.newer, two.truth[two.newer])
        return
    said = refusal(two)
    assert path in said
    assert any(tensor in said and f"rank {rank}" in said for tensor, rank in hit), said


def refusal(two: Two) -> str:
    """What is said when the newer one is loaded."""
    with pytest.raises(CheckpointError) as caught:
        load(two.newer, targets_for(two.truth[two.newer]), ALONE)
    return str(caught.value)


def _check_manifest(two: Two, at: int | None) -> None:
    """A manifest is itself or it is refused: load and verify say so, and the run has another newest."""
    try:
        if read_manifest(LocalFiles(Path(two.newer))) == two.manifest:
            assert at is not None or Path(two.newer, MANIFEST).stat().st_size, "an empty manifest is none"
            assert_loads_whole(two.newer, two.truth[two.newer])
            return
    except CheckpointError:
        pass
    assert latest(two.run) == two.older
    with pytest.raises(CheckpointError) as caught:
        verify(two.newer)
    for said in (str(caught.value), refusal(two)):
        assert two.newer in said
        assert "manifest" in said or "version" in said
