"""Run as a program: savers that are killed, or that save into one folder at once, each time followed by a look at what is left.

    python -m tests.ckpt.interrupted RUN random KILLS SEED [WORLD]   one of WORLD ranks is killed at a random instant
    python -m tests.ckpt.interrupted RUN changes                     killed before each change of a folder, one after the other
    python -m tests.ckpt.interrupted RUN two TIMES                   two savers at once

It imports torch once and forks every saver, so that a kill costs milliseconds. Prints a line each time: the newest step, how
many half-written saves (or savers that were refused) there are, and the seconds until the last saver had ended. Ends with 1 and a
message on the first checkpoint that is not whole, or if a saver does not end within 60 s.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from ckpt.shelf.address import latest, open_shelf
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError
from core.parallel.groups import Group, groups_for, one_rank
from core.state.box import stretch, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import make_small

ALONE = one_rank().world
SHAPES = {f"layers.{i}.w": (31, 7 * (i + 1)) for i in range(8)}
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
MOST_SECONDS = 60.0
# Exit codes of a saver beside 0 and 1.
LOST_A_PEER, REFUSED = 3, 4


def state(step: int, count: int = len(SHAPES), world: Group = ALONE) -> list[ShardedTensor]:
    """This rank's part of a state that tells its step in every element of its `count` tensors: every other one is cut by rows."""
    held = []
    for i, (name, shape) in enumerate(list(SHAPES.items())[:count]):
        whose = (whole(shape), world.position, world.size)
        box, copy, copies = (stretch(shape, 0, world.position, world.size), 0, 1) if i % 2 else whose
        data = torch.full(box.shape, float(step))
        held.append(ShardedTensor(name=name, shape=shape, box=box, data=data, copy=copy, copies=copies))
    return held


def save_for_ever(run: Path, world: Group) -> None:
    """Save step after step; every third one is saved twice, so that replacing is interrupted too."""
    step = newest_step(run)
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            save(run, step, state(step, world=world), {"step": step}, world, Saving(keep=1))


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    newest = latest(run)
    return read_manifest(LocalFiles(Path(newest))).step if newest else 0


def save_as_rank(run: Path, rank: int, ranks: int, meeting: Path) -> None:
    """`save_for_ever` as one of several ranks; ends the process when another one is gone."""
    if ranks == 1:
        save_for_ever(run, ALONE)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=2 * MOST_SECONDS),
    )
    try:
        save_for_ever(run, groups_for(ParallelConfig()).world)
    except RuntimeError:
        os._exit(LOST_A_PEER)


def look(run: Path, lowest: int, count: int = len(SHAPES)) -> None:
    """Fail unless the newest checkpoint is whole and not older than step `lowest`."""
    newest = latest(run)
    assert newest is not None, "every checkpoint is gone"
    targets = state(-1, count)
    step = load(newest, targets, ALONE)["step"]
    assert step >= lowest, f"step {lowest} was complete, but {step} is the newest now"
    assert all(bool((target.data == step).all()) for target in targets), f"step {step} is not what was saved"


def forked(action: Callable[[], None]) -> int:
    """The process id of a child that runs `action` and ends."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def finished(child: int, within_seconds: float = MOST_SECONDS) -> int:
    """The wait status of a child that ends by itself. Raises TimeoutError, and kills it, if it does not."""
    end = time.monotonic() + within_seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"a saver did not end within {within_seconds:g} s")


def succeeds(action: Callable[[], None]) -> None:
    """Raise RuntimeError unless `action` does in a child, which has told why not."""
    if finished(forked(action)):
        raise RuntimeError("what a saver left is not as it should be")


def tell(run: Path, count: int | None = None, seconds: float = 0.0) -> None:
    """Print a line; `count` is that of half-written saves unless given."""
    left = len(open_shelf(run).survey().incomplete) if count is None else count
    print(newest_step(run), left, f"{seconds:.3f}", flush=True)


def save_twice(run: Path, kill_before: int) -> None:
    """Replace step 2 and save step 3, and be killed before change number `kill_before` of a file's or folder's name."""
    changes = itertools.count()

    def watch(event: str, arguments: tuple) -> None:
        if event in CHANGES and next(changes) == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    for step in (2, 3):
        save(run, step, state(step, count=1), {"step": step}, ALONE, Saving(keep=1))


def save_first(run: Path) -> None:
    """Two complete checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        save(run, step, state(step, count=1), {"step": step}, ALONE, Saving(keep=2))


def kill_before_each_change(run: Path) -> None:
    """One saver per change that `save_twice` makes, each in a run of its own; the last one is not killed any more."""
    first = run / "first"
    succeeds(partial(save_first, first))
    for change in itertools.count():
        mine = run / str(change)
        shutil.copytree(first, mine)
        status = finished(forked(partial(save_twice, mine, change)))
        succeeds(partial(look, mine, 2, count=1))
        tell(mine)
        if not os.WIFSIGNALED(status):
            if status:
                raise RuntimeError("a saver failed by itself")
            return


def kill_at_random(run: Path, kills: int, seed: int, ranks: int = 1) -> None:
    """Kill one of the ranks of `kills` jobs that save for ever, and look after each; the other ranks have to end by themselves."""
    chance = random.Random(seed)
    run.mkdir(parents=True, exist_ok=True)
    lowest, one_save = 0, 0.0
    for number in range(kills):
        before = half_written(run)
        savers = [forked(partial(save_as_rank, run, r, ranks, run / f"meeting-{number}")) for r in range(ranks)]
        wait_until(lambda: bool(half_written(run) - before))  # noqa: B023 (it runs at once)
        started = time.monotonic()
        if lowest == 0:  # the first save of all is let through: before it there is nothing to lose
            wait_until((run / "checkpoints/latest").exists)
            one_save = time.monotonic() - started
        time.sleep(chance.uniform(0, 2 * one_save))
        victim = chance.choice(savers)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for saver in savers:
            status = finished(saver)
            if os.WIFSIGNALED(status) != (saver == victim) or (saver != victim and status >> 8 != LOST_A_PEER):
                raise RuntimeError(f"a saver ended with wait status {status}")
        seconds = time.monotonic() - killed
        succeeds(partial(look, run, lowest))
        lowest = int((run / "checkpoints/latest").read_text().removeprefix("step_"))
        tell(run, seconds=seconds)


def half_written(run: Path) -> set[str]:
    """The names of the folders that are being written."""
    return {path.name for path in (run / "checkpoints").glob("*.partial")}


def wait_until(done: Callable[[], bool]) -> None:
    """Look every millisecond. Raises TimeoutError."""
    end = time.monotonic() + MOST_SECONDS
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("the savers do not save")
        time.sleep(0.001)


def save_once(run: Path, step: int) -> None:
    """One save, which may be refused because of another."""
    try:
        save(run, step, state(step), {"step": step}, ALONE, Saving(keep=1))
    except CheckpointError as error:
        if "another process is saving into this run" not in str(error):
            raise
        os._exit(REFUSED)


def save_at_once(run: Path, times: int) -> None:
    """Two savers, of two steps, each time: one or both save, one at most is refused."""
    for step in range(1, 2 * times, 2):
        started = time.monotonic()
        codes = [status >> 8 for status in map(finished, [forked(partial(save_once, run, step + i)) for i in (0, 1)])]
        seconds = time.monotonic() - started
        if sorted(codes) not in ([0, 0], [0, REFUSED]):
            raise RuntimeError(f"savers ended with {codes}")
        succeeds(partial(look, run, step))
        tell(run, codes.count(REFUSED), seconds)


def main(run: str, how: str, *numbers: str) -> int:
    """What the command line asks for."""
    logging.disable()
    torch.set_num_threads(1)
    # As large states are: several ranks write each tensor, in files of their own.
    make_small(pytest.MonkeyPatch(), block_bytes=512, own_file_bytes=1024, share_bytes=1024)
    ways: dict[str, Callable[..., None]] = {
        "changes": kill_before_each_change,
        "random": kill_at_random,
        "two": save_at_once,
    }
    try:
        ways[how](Path(run), *map(int, numbers))
    except (RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
