"""Writing from any source: the same bytes however it is done, in bounded memory, and nothing twice after a kill."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt.ahead import ahead
from ckpt.blocks import block_boxes, block_shape
from ckpt.files.local import LocalFiles
from ckpt.manifest import Manifest, read_manifest
from ckpt.plan import Plan, Write
from ckpt.runs import Runs
from ckpt.source import Described, Form
from ckpt.stored import CheckpointSource
from ckpt.stream import Job, Streaming, held_whole, plan_job, write_checkpoint
from ckpt.verify import verify
from core.errors import CheckpointError, RequestError
from core.state.box import Box, whole
from tests.ckpt.pieces import assert_loads, bits, cut, joined, make_small, random_bits, save_as_ranks
from tests.ckpt.stream_child import Plain, copy_of

LARGE = {f"model.large.{n}": ((600, 500), torch.float32) for n in range(5)}
SMALL = {"model.none": ((0, 3), torch.bfloat16), "model.scalar": ((), torch.float64), "model.row": ((7,), torch.int64)}


class Memory:
    """A source of tensors in memory, which counts what is read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.reads = tensors, list[tuple[str, Box]]()
        self.forms = {n: Form(shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for n, t in tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        self.reads.append((name, box))
        return self.tensors[name][box.slices].clone()

    def describe(self) -> Described | None:
        return None


def job_of(source: Memory, target: Path, **changed: Any) -> Job:
    settings = {"identity": "x", "held": held_whole(source), "step": 3, "extra": {"a": [1]}, "streaming": Streaming()}
    return Job(opener=lambda: source, target=target, **settings | changed)


def saved(run: Path) -> tuple[str, dict[str, Tensor]]:
    """A checkpoint of 6 MB that three ranks wrote, cut across."""
    truth = {name: random_bits(name, shape, dtype) for name, (shape, dtype) in LARGE.items()}
    ranks = joined(*(cut(name, tensor, (3, 2)) for name, tensor in truth.items()))
    return save_as_ranks(run, 3, ranks), truth


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Stopped(BaseException):
    """What stops a writer in the midst as a kill would: nobody catches it."""


def stop_when_finished(job: Job, files: int) -> None:
    """Write until so many files are finished."""
    journal = Path(job.target).with_name(f".{Path(job.target).name}.partial") / "journal"

    def look(done: int, total: int) -> None:
        if len(list(journal.glob("0*.json"))) >= files:
            raise Stopped

    with pytest.raises(Stopped):
        write_checkpoint(job, look)


def child(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.ckpt.stream_child", *map(str, arguments)]
    return subprocess.run(command, check=check, capture_output=True, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("store", ["zarr", "torch_dist"])
def test_what_is_written_is_what_the_source_holds_to_the_bit(store: str, tmp_path: Path) -> None:
    truth = {name: random_bits(name, shape, dtype) for name, (shape, dtype) in (LARGE | SMALL).items()}
    streaming = Streaming(store=store)
    address = write_checkpoint(job_of(Memory(truth), tmp_path / "out", streaming=streaming, assets={"t.json": b"{}"}))
    manifest = read_manifest(LocalFiles(Path(address)))
    assert (manifest.step, manifest.extra, manifest.store) == (3, {"a": [1]}, store)
    assert {entry.name: entry.shape for entry in manifest.entries} == {n: tuple(t.shape) for n, t in truth.items()}
    assert_loads(address, joined(*(cut(n, t, (1,) * t.ndim) for n, t in truth.items())), truth)
    assert (tmp_path / "out/assets/t.json").read_bytes() == b"{}"
    assert verify(address) == ()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_processes_write_the_very_same_files_as_one(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "run")
    told: list[tuple[int, int]] = []
    one = write_checkpoint(copy_of(source, str(tmp_path / "one"), workers=1))
    two = write_checkpoint(copy_of(source, str(tmp_path / "two"), workers=2), lambda *said: told.append(said))
    assert contents(Path(one)) == contents(Path(two))
    assert told[-1] == (6_000_000, 6_000_000)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_kill_what_is_finished_is_not_written_again(workers: int, tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "run")
    killed = child("kill", source, tmp_path / "out", workers, 2, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    partial_folder = tmp_path / ".out.partial"
    assert not (tmp_path / "out").exists()
    notes = [path.name for path in (partial_folder / "journal").glob("0*.json")]
    assert 2 <= len(notes) < 5
    # Nobody writes on: what the killed process had started is gone with it.
    time.sleep(0.5)
    stamps = {path.parent.name: path.stat() for path in partial_folder.rglob("c.0.0")}
    planned = plan_job(copy_of(source, str(tmp_path / "out"), workers=1))
    finished = {planned.files[int(name[:6])].path for name in notes}
    again = Path(write_checkpoint(copy_of(source, str(tmp_path / "out"), workers=workers)))
    for path in finished:
        old, new = stamps[Path(path).parent.name], (again / path).stat()
        assert (old.st_ino, old.st_mtime_ns) == (new.st_ino, new.st_mtime_ns), path
    whole_one = Path(write_checkpoint(copy_of(source, str(tmp_path / "other"), workers=1)))
    assert contents(again) == contents(whole_one)
    assert not partial_folder.exists()


def test_another_job_for_the_same_place_keeps_nothing_of_the_first(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "run")
    stop_when_finished(copy_of(source, str(tmp_path / "out"), workers=1), 2)
    truth = {name: random_bits(name, shape, dtype, seed=1) for name, (shape, dtype) in LARGE.items()}
    memory = Memory(truth)
    address = write_checkpoint(job_of(memory, tmp_path / "out", identity="another"))
    assert {name for name, _ in memory.reads} == set(truth)
    assert_loads(address, joined(*(cut(n, t, (1, 1)) for n, t in truth.items())), truth)
    assert not (tmp_path / "out/journal").exists()


def test_a_note_that_a_kill_has_cut_short_counts_for_nothing(tmp_path: Path) -> None:
    source, truth = saved(tmp_path / "run")
    stop_when_finished(copy_of(source, str(tmp_path / "out"), workers=1), 2)
    note = sorted((tmp_path / ".out.partial/journal").glob("0*.json"))[0]
    note.write_bytes(note.read_bytes()[:-9])
    address = write_checkpoint(copy_of(source, str(tmp_path / "out"), workers=1))
    assert_loads(address, joined(*(cut(n, t, (1, 1)) for n, t in truth.items())), truth)


def test_memory_stays_below_what_was_asked_for_whatever_the_size(tmp_path: Path) -> None:
    limit = 464 << 20
    # 350 tensors of 4 MiB: three times the limit, read from compressed blocks and from a source that makes them.
    made = int(child("make", tmp_path / "a", 350, limit).stdout)
    copied = int(child("copy", tmp_path / "a", tmp_path / "b", limit).stdout)
    assert made < limit >> 10
    assert copied < limit >> 10
    last = CheckpointSource(tmp_path / "b").read("model.349", whole((1024, 1024)))
    assert torch.equal(last, torch.full((1024, 1024), 349.0))


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--memory=300MiB: 1 worker process needs 464MiB at least\. Give more\.$"):
        write_checkpoint(job_of(Memory({}), tmp_path / "out", streaming=Streaming(memory_bytes=300 << 20)))
    with pytest.raises(RequestError, match=r"3 worker processes need 1776MiB at least\. Give more, or fewer --workers"):
        write_checkpoint(job_of(Memory({}), tmp_path / "out", streaming=Streaming(memory_bytes=1 << 30, workers=3)))
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    truth = {"model.a": torch.ones(3)}
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RequestError, match="holds something already"):
        write_checkpoint(job_of(Memory(truth), tmp_path / "full"))
    with pytest.raises(RequestError, match="is a file"):
        write_checkpoint(job_of(Memory(truth), tmp_path / "file", streaming=Streaming(overwrite=True)))
    assert (tmp_path / "full/notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    write_checkpoint(job_of(Memory(truth), tmp_path / "full", streaming=Streaming(overwrite=True)))
    assert verify(tmp_path / "full") == () and not (tmp_path / "full/notes.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_two_writers_never_share_a_place(tmp_path: Path) -> None:
    folder = tmp_path / ".out.partial"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(RequestError, match="another process is writing it"):
        write_checkpoint(job_of(Memory({"model.a": torch.ones(3)}), tmp_path / "out"))
    os.close(held)
    write_checkpoint(job_of(Memory({"model.a": torch.ones(3)}), tmp_path / "out"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_source_is_named_and_nothing_appears(workers: int, tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "run")
    victim = Path(source) / read_manifest(LocalFiles(Path(source))).entries[3].pieces[1].blocks[0].file
    content = bytearray(victim.read_bytes())
    content[-3] ^= 4
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.large\.\d \(written by rank \d\) is damaged"):
        write_checkpoint(copy_of(source, str(tmp_path / "out"), workers))
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_told_and_nothing_hangs(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "run")
    job = replace(copy_of(source, str(tmp_path / "out"), workers=2), opener=partial(_dies, os.getpid()))
    with pytest.raises(CheckpointError, match=r"out: a worker process was killed .* Run the same command again"):
        write_checkpoint(job)


def _dies(parent: int) -> CheckpointSource:
    """Kills the process that opens it."""
    assert os.getpid() != parent
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_block_that_lies_across_several_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, block_bytes=1 << 10, own_file_bytes=0, share_bytes=1 << 30)
    truth = {"model.a": random_bits("a", (64, 96), torch.float32)}
    source = CheckpointSource(save_as_ranks(tmp_path / "run", 1, cut("model.a", truth["model.a"], (1, 4))))
    read: list[tuple[str, int]] = []
    original = LocalFiles.read_into

    def counted(self: LocalFiles, path: str, offset: int, buffers: Any) -> None:
        read.append((path, offset))
        original(self, path, offset, buffers)

    monkeypatch.setattr(LocalFiles, "read_into", counted)
    rows = [source.read("model.a", Box(offset=(row, 0), shape=(1, 96))) for row in range(64)]
    assert bits(torch.cat(rows)) == bits(truth["model.a"])
    assert len(read) == len(set(read)) == sum(len(piece.blocks) for piece in source.manifest.entries[0].pieces)


def test_runs_give_every_block_and_read_each_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, block_bytes=256, own_file_bytes=0, share_bytes=1)
    for shape in ((40, 7), (5, 2, 9, 11), (3, 1, 64), (1, 300), (13,)):
        truth = random_bits("t", shape, torch.float32)
        source = Memory({"model.t": truth})
        piece = (
            Box(offset=(1, *(0 for _ in shape[1:])), shape=(shape[0] - 1, *shape[1:])) if shape[0] > 1 else whole(shape)
        )
        plan = Plan(tensors={"model.t": (shape, "float32")}, writes=())
        runs = Runs(source, plan, [Write(name="model.t", box=piece, rank=0)], run_bytes=2048)
        boxes = list(block_boxes(piece, block_shape(piece.shape, 4)))
        for box in boxes:
            assert bits(torch.from_numpy(runs.read("model.t", box).copy())) == bits(truth[box.slices])
        assert sum(box.elements for _, box in source.reads) == piece.elements
        assert all(box.elements * 4 <= 2048 for _, box in source.reads)
        assert len(source.reads) < len(boxes) or len(boxes) == 1


def test_what_is_made_ahead_comes_in_order_and_waits_where_nobody_takes_it() -> None:
    made: list[int] = []

    def items() -> Iterator[bytes]:
        for number in range(50):
            made.append(number)
            yield bytes([number]) * 10

    coming = ahead(items(), most_bytes=40)
    assert next(coming) == bytes([0]) * 10
    time.sleep(0.2)
    assert len(made) <= 7
    assert list(coming) == [bytes([number]) * 10 for number in range(1, 50)]


def test_what_fails_ahead_fails_where_it_is_taken_and_a_closed_one_ends() -> None:
    def items() -> Iterator[bytes]:
        yield b"one"
        raise CheckpointError("no more")

    coming = ahead(items(), most_bytes=1 << 20)
    assert next(coming) == b"one"
    with pytest.raises(CheckpointError, match="no more"):
        next(coming)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * random.randint(1, 5)

    coming = ahead(endless(), most_bytes=3)
    next(coming)
    coming.close()


def test_the_dry_plan_writes_nothing_and_pieces_are_files_of_sane_size(tmp_path: Path) -> None:
    planned = plan_job(job_of(Memory({}), tmp_path / "out", held=held_whole(Plain(3))))
    assert planned.plan.bytes == 12 << 20
    assert not list(tmp_path.iterdir())
    large = Plain(1)
    large.forms = {"model.0": Form(shape=(1 << 16, 1 << 14), dtype="float32")}
    planned = plan_job(job_of(Memory({}), tmp_path / "out", held=held_whole(large)))
    assert {write.box.elements * 4 for write in planned.plan.writes} == {64 << 20}


def test_a_manifest_says_the_same_whoever_wrote_it(tmp_path: Path) -> None:
    source, truth = saved(tmp_path / "run")
    copied: Manifest = read_manifest(LocalFiles(Path(write_checkpoint(copy_of(source, str(tmp_path / "o"), 1)))))
    assert copied.sequence == 1 and [e.name for e in copied.entries] == sorted(truth)
