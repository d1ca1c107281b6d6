"""Saving beside training: the values of the call, whoever is slow; one at a time; and no failure is silent."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt.asynchronous
from ckpt.asynchronous import AsynchronousSaver, SynchronousSaver
from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.save import Saving
from ckpt.shelf.address import latest, steps
from ckpt.staging import Staging
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError
from core.parallel.groups import groups_for, one_rank
from core.state.box import Box, stretch, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import assert_loads, bits, cut, joined, make_small, planned_as_ranks, random_bits
from tests.ranks import Ranks

ALONE = one_rank().world
SLOW_SECONDS = 0.3


def state(value: float = 0.0) -> list[ShardedTensor]:
    """Two tensors full of one value."""
    shapes = {"model.a": (7, 31), "optimizer.exp_avg.a": (3, 5, 11)}
    return [
        ShardedTensor(name=name, shape=shape, box=whole(shape), data=torch.full(shape, value))
        for name, shape in shapes.items()
    ]


def fill(tensors: list[ShardedTensor], value: float) -> None:
    for tensor in tensors:
        tensor.data.fill_(value)


def value_of(checkpoint: str | None) -> float:
    """The value that a checkpoint of `state` is full of."""
    assert checkpoint is not None
    found = state(torch.nan)
    load(checkpoint, found, ALONE)
    values = {float(v) for tensor in found for v in tensor.data.reshape(-1)}
    assert len(values) == 1, f"values of different times: {values}"
    return values.pop()


class Gate:
    """Holds every write of a file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        write = LocalFiles.write

        def held(files: LocalFiles, path: str, buffers: Any) -> int:
            self.reached.set()
            assert self.open.wait(20)
            return write(files, path, buffers)

        monkeypatch.setattr(LocalFiles, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Staging.fill

    def slow(staging: Staging, tensors: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return copies(staging, tensors)

    monkeypatch.setattr(Staging, "fill", slow)


def fail_to_write(monkeypatch: pytest.MonkeyPatch, fails: threading.Event) -> None:
    """Let the disk be broken while `fails` is set."""
    write = LocalFiles.write

    def broken(files: LocalFiles, path: str, buffers: Any) -> int:
        if fails.is_set():
            raise OSError(5, "Input/output error", f"{files.root}/{path}")
        return write(files, path, buffers)

    monkeypatch.setattr(LocalFiles, "write", broken)


def test_values_are_those_of_the_call_though_the_copies_are_slow_and_the_update_comes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch)
    tensors = state(1.0)
    with AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        begin = time.perf_counter()
        saver.save(1, tensors, {})
        assert time.perf_counter() - begin < SLOW_SECONDS, "save waits for the copies"
        saver.before_update()
        assert time.perf_counter() - begin >= SLOW_SECONDS
        fill(tensors, 2.0)
        saver.wait()
        (save,) = saver.finished()
    assert value_of(latest(tmp_path)) == 1.0
    assert save.step == 1 and save.bytes == (7 * 31 + 3 * 5 * 11) * 4
    assert SLOW_SECONDS - 0.01 <= save.stalled_seconds <= save.seconds


def test_training_goes_on_while_a_slow_writer_writes_what_was_there_at_the_call(tmp_path: Path, gate: Gate) -> None:
    tensors, extra = state(1.0), {"step": [1]}
    with AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        saver.save(1, tensors, extra)
        saver.before_update()
        assert gate.reached.wait(20)
        fill(tensors, 2.0)
        extra["step"][0] = 2
        assert not saver.failed and saver.finished() == () and latest(tmp_path) is None
        saver.poll()
        gate.open.set()
        saver.wait()
        (save,) = saver.finished()
        assert saver.finished() == ()
    assert value_of(latest(tmp_path)) == 1.0
    assert load(str(latest(tmp_path)), state(), ALONE) == {"step": [1]}
    assert save.stalled_seconds < save.seconds


def test_the_old_checkpoint_stays_and_is_the_latest_until_the_new_one_is_whole(tmp_path: Path, gate: Gate) -> None:
    gate.open.set()
    pointer = tmp_path / "checkpoints" / "latest"
    with AsynchronousSaver(tmp_path, ALONE, Saving(keep=1)) as saver:
        saver.save(1, state(1.0), {})
        saver.wait()
        gate.open.clear()
        gate.reached.clear()
        saver.save(2, state(2.0), {})
        assert gate.reached.wait(20)
        assert pointer.read_text() == "step_00000001\n" and steps(tmp_path) == (1,)
        assert value_of(latest(tmp_path)) == 1.0
        gate.open.set()
    assert pointer.read_text() == "step_00000002\n" and steps(tmp_path) == (2,)
    assert value_of(latest(tmp_path)) == 2.0


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    tensors = state(1.0)
    with AsynchronousSaver(tmp_path, ALONE, Saving(keep=9)) as saver:
        saver.save(1, tensors, {})
        assert gate.reached.wait(20)
        saver.before_update()
        fill(tensors, 2.0)
        opener = threading.Timer(SLOW_SECONDS, gate.open.set)
        opener.start()
        saver.save(2, tensors, {})
        assert steps(tmp_path) == (1,) or steps(tmp_path) == (1, 2)
        saver.wait()
        opener.join()
        first, second = saver.finished()
    assert steps(tmp_path) == (1, 2)
    assert second.stalled_seconds >= SLOW_SECONDS - 0.05, "what the save before still took stops training too"
    assert (first.step, second.step) == (1, 2)
    assert [value_of(str(tmp_path / f"checkpoints/step_0000000{n}")) for n in (1, 2)] == [1.0, 2.0]


def test_a_failure_is_raised_once_and_saving_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = threading.Event()
    fail_to_write(monkeypatch, fails)
    saver = AsynchronousSaver(tmp_path, ALONE, Saving(keep=1))
    saver.save(1, state(1.0), {})
    saver.wait()
    for raised in (saver.wait, lambda: saver.save(3, state(3.0), {}), lambda: poll_until_over(saver)):
        fails.set()
        saver.save(2, state(2.0), {})
        with pytest.raises(
            CheckpointError, match=r"(?s)checkpoint of step 2 could not be written.*Input/output error.*step_"
        ):
            raised()
        assert steps(tmp_path) == (1,) and value_of(latest(tmp_path)) == 1.0
        fails.clear()
        saver.poll()
        saver.wait()
    saver.save(4, state(4.0), {})
    saver.wait()
    assert [save.step for save in saver.finished()] == [1, 4]
    assert value_of(latest(tmp_path)) == 4.0


def poll_until_over(saver: AsynchronousSaver) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        saver.poll()
        time.sleep(0.001)


def test_leaving_the_context_raises_a_failure_or_adds_it_to_what_ended_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = threading.Event()
    fails.set()
    fail_to_write(monkeypatch, fails)
    with pytest.raises(CheckpointError, match="step 1"), AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        saver.save(1, state(), {})
    with pytest.raises(ZeroDivisionError) as caught, AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        saver.save(2, state(), {})
        _ = 1 / 0
    (note,) = caught.value.__notes__
    assert "checkpoint of step 2 could not be written" in note


def test_a_training_that_fails_leaves_the_checkpoint_under_way_whole(tmp_path: Path, gate: Gate) -> None:
    threading.Timer(SLOW_SECONDS, gate.open.set).start()
    with pytest.raises(ZeroDivisionError), AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        saver.save(1, state(1.0), {})
        _ = 1 / 0
    assert value_of(latest(tmp_path)) == 1.0


def test_what_cannot_be_saved_is_refused_by_the_call(tmp_path: Path) -> None:
    hole = ShardedTensor(name="model.a", shape=(4, 3), box=Box(offset=(0, 0), shape=(2, 3)), data=torch.zeros(2, 3))
    with AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        with pytest.raises(CheckpointError, match=r"model\.a.*held by no piece"):
            saver.save(1, [hole], {})
        saver.save(1, state(), {})
        with pytest.raises(CheckpointError, match="JSON"):
            saver.save(2, state(), {"x": object()})
        with pytest.raises(CheckpointError, match="step=-1"):
            saver.save(-1, state(), {})
    assert steps(tmp_path) == (1,)


def test_thirty_saves_of_ten_megabytes_grow_the_process_by_less_than_two_buffers(tmp_path: Path) -> None:
    size = 10 << 20
    data = torch.ones(size // 4)
    tensor = ShardedTensor(name="model.a", shape=(size // 4,), box=whole((size // 4,)), data=data)
    # Whatever a first save loads and starts is no growth; its buffer goes with it.
    with AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        saver.save(0, state(), {})
    del saver
    before = resident_bytes()
    with AsynchronousSaver(tmp_path, ALONE, Saving(keep=1)) as saver:
        for step in range(1, 31):
            saver.save(step, [tensor], {})
            saver.before_update()
        saver.wait()
        assert resident_bytes() - before < 2 * size
    assert len(saver.finished()) == 30


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_synchronous_saver_makes_the_same_checkpoint_and_stops_training_for_all_of_it(tmp_path: Path) -> None:
    found = {}
    for kind in (SynchronousSaver, AsynchronousSaver):
        with kind(tmp_path / kind.__name__, ALONE, Saving()) as saver:
            saver.prepare(state())
            saver.save(3, state(3.0), {"a": 1})
            assert not saver.failed
            saver.before_update()
            saver.wait()
            (save,) = saver.finished()
        folder = Path(str(latest(tmp_path / kind.__name__)))
        found[kind] = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert save.bytes == (7 * 31 + 3 * 5 * 11) * 4 and save.step == 3
        assert kind is AsynchronousSaver or save.stalled_seconds == save.seconds > 0
    assert found[SynchronousSaver] == found[AsynchronousSaver]


TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint16)


def test_a_rank_copies_the_pieces_that_it_writes_and_no_others_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, block_bytes=64, own_file_bytes=32, share_bytes=16)
    truth = {f"model.{n}": random_bits(str(n), (6, 4, n + 3), dtype) for n, dtype in enumerate(TYPES)}
    truth |= {"model.scalar": torch.tensor(7.0), "model.empty": torch.zeros(0, 4)}
    ranks = joined(*[cut(name, t, (1,) * t.dim(), copies=3) for name, t in truth.items()])
    planned = planned_as_ranks(ranks, Saving())
    held = sum(t.nbytes for t in truth.values())
    copied: dict[str, list[Box]] = {}
    total = 0
    for rank, tensors in enumerate(ranks):
        writes = [write for file in planned.files if file.rank == rank for write in file.writes]
        staging = Staging(writes, tensors)
        staging.allocate()
        for _ in range(2):
            pieces = staging.fill(tensors)
        assert sum(p.data.nbytes for p in pieces) < 0.6 * held, "more than its share"
        for piece in pieces:
            assert bits(piece.data) == bits(truth[piece.name][piece.box.slices])
            copied.setdefault(piece.name, []).append(piece.box)
            total += piece.data.nbytes
    assert total == held
    assert copied.keys() == truth.keys() - {"model.empty"}


def test_pieces_that_do_not_lie_row_by_row_in_memory_are_copied_by_their_values(tmp_path: Path) -> None:
    base = torch.arange(5 * 7 * 3, dtype=torch.float32).view(5, 7, 3)
    turned = base.permute(2, 0, 1)
    tensor = ShardedTensor(name="model.a", shape=(3, 5, 7), box=whole((3, 5, 7)), data=turned)
    with AsynchronousSaver(tmp_path, ALONE, Saving()) as saver:
        saver.save(1, [tensor], {})
        saver.before_update()
        truth = turned.clone()
        base.zero_()
    assert_loads(str(latest(tmp_path)), [[tensor]], {"model.a": truth})


def share(rank: int, world: int, value: float) -> list[ShardedTensor]:
    """A cut tensor, and one that all ranks hold."""
    cut_box = stretch((11, 3), 0, rank, world)
    return [
        ShardedTensor(name="model.cut", shape=(11, 3), box=cut_box, data=torch.full(cut_box.shape, value)),
        ShardedTensor(
            name="model.all", shape=(5,), box=whole((5,)), data=torch.full((5,), value), copy=rank, copies=world
        ),
    ]


def one_fails(rank: int, world: int, run: Path, where: str) -> tuple[str, float, float]:
    """What a rank is told when rank 2 fails in the background, how long that took, and what it can load then."""
    group = groups_for(ParallelConfig()).checkpoint
    with pytest.MonkeyPatch.context() as patch, AsynchronousSaver(run, group, Saving(keep=1)) as saver:
        saver.save(1, share(rank, world, 1.0), {})
        saver.wait()
        if rank == 2 and where == "write":
            fails = threading.Event()
            fails.set()
            fail_to_write(patch, fails)
        elif rank == 2:
            patch.setattr(Staging, "fill", out_of_memory)
        saver.save(2, share(rank, world, 2.0), {})
        begin = time.monotonic()
        saver.before_update()
        with pytest.raises(CheckpointError) as caught:
            poll_until_over(saver)
        seconds = time.monotonic() - begin
    found = share(rank, world, torch.nan)
    load(str(latest(run)), found, group)
    assert {float(v) for t in found for v in t.data.reshape(-1)} == {1.0}
    return str(caught.value), seconds, float(found[0].data[0, 0])


def out_of_memory(staging: Staging, tensors: Any) -> Any:
    raise MemoryError("no 512 MiB are left")


@pytest.mark.parametrize(
    ("where", "said"),
    [("write", r"step_00000002.*/tensors|step_00000002.*pieces/00002"), ("copy", "no 512 MiB are left")],
)
def test_a_rank_that_fails_fails_all_within_seconds_by_name(
    ranks: Ranks, tmp_path: Path, where: str, said: str
) -> None:
    for text, seconds, value in ranks.run(one_fails, 4, tmp_path, where, timeout_seconds=40.0):
        assert "rank 2: " in text and seconds < 10 and value == 1.0
        assert re.search(said, text), text
        assert "the checkpoint of step 2 could not be " in text
    assert steps(tmp_path) == (1,)


def plans(rank: int, world: int, run: Path) -> tuple[list[int], list[float]]:
    """How often the ranks had planned after each of four saves, between which one rank comes to hold something else."""
    group = groups_for(ParallelConfig()).checkpoint
    made = []
    agree = ckpt.asynchronous.agree

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return agree(*arguments)

    counts, values = [], []
    with pytest.MonkeyPatch.context() as patch, AsynchronousSaver(run, group, Saving(keep=1)) as saver:
        patch.setattr(ckpt.asynchronous, "agree", counted)
        saver.prepare(share(rank, world, 0.0))
        for step in range(1, 5):
            tensors = share(rank, world, float(step))
            if step > 2:
                # Only rank 1 holds it otherwise than before: in two boxes.
                tensors = tensors if rank == 0 else [*halves(tensors[0]), tensors[1]]
            saver.save(step, tensors, {})
            saver.wait()
            counts.append(len(made))
            found = share(rank, world, torch.nan)
            load(str(latest(run)), found, group)
            values += [float(v) for t in found for v in t.data.reshape(-1).unique()]
    return counts, values


def halves(tensor: ShardedTensor) -> list[ShardedTensor]:
    low, rows = tensor.box.offset[0], tensor.box.shape[0]
    return [
        ShardedTensor(
            name=tensor.name,
            shape=tensor.shape,
            box=Box(offset=(low + start, 0), shape=(stop - start, 3)),
            data=tensor.data[start:stop],
        )
        for start, stop in ((0, 1), (1, rows))
    ]


def test_the_plan_is_made_again_only_when_some_rank_holds_something_else(ranks: Ranks, tmp_path: Path) -> None:
    for counts, values in ranks.run(plans, 2, tmp_path):
        assert counts == [1, 1, 2, 2]
        assert values == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


def beside_collectives(rank: int, world: int, run: Path) -> list[float]:
    """Saves whose ranks are at different points of a training that communicates all the time."""
    groups = groups_for(ParallelConfig())
    sums = []
    with AsynchronousSaver(run, groups.checkpoint, Saving(keep=2)) as saver:
        for step in range(6):
            tensors = share(rank, world, float(step))
            saver.save(step, tensors, {})
            for _ in range(5):
                # One rank is late for training, the other for the save.
                time.sleep(0.002 * ((rank + step) % world))
                x = torch.full((1000,), float(rank + 1))
                torch.distributed.all_reduce(x, group=groups.world.handle)
                sums.append(float(x[0]))
            saver.before_update()
    return sums


def test_a_save_never_meets_the_collectives_of_training(ranks: Ranks, tmp_path: Path) -> None:
    for sums in ranks.run(beside_collectives, 3, tmp_path):
        assert sums == [6.0] * 30
    assert steps(tmp_path) == (4, 5)
