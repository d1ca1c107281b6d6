"""Run as a program: savers that are killed, each followed by a look at what is left.

    python -m tests.ckpt.interrupted RUN random KILLS SEED      killed at random instants
    python -m tests.ckpt.interrupted RUN changes                killed before each change of a folder, one after the other

It imports torch once and forks every saver, so that a kill costs milliseconds. Prints, per kill, the newest step and how
many half-written saves the kill left; ends with 1 and a message on the first checkpoint that is not whole.
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
from pathlib import Path

import torch

from ckpt.folders import latest, survey
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import save
from core.parallel.groups import one_rank
from core.state.box import whole
from core.state.sharded import ShardedTensor

ALONE = one_rank().world
SHAPES = {f"layers.{i}.w": (31, 7 * (i + 1)) for i in range(8)}
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def state(step: int, count: int = len(SHAPES)) -> list[ShardedTensor]:
    """A state that tells its step in every element of its `count` tensors."""
    return [
        ShardedTensor(name=name, shape=shape, box=whole(shape), data=torch.full(shape, float(step)))
        for name, shape in list(SHAPES.items())[:count]
    ]


def save_for_ever(run: Path) -> None:
    """Save step after step; every third one is saved twice, so that replacing is interrupted too."""
    newest = latest(run)
    step = read_manifest(newest).step if newest else 0
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            save(run, step, state(step), {"step": step}, ALONE, keep=1)


def look(run: Path, lowest: int, count: int = len(SHAPES)) -> None:
    """Print the newest step and the number of half-written ones; fail unless it is whole and not older than `lowest`."""
    newest = latest(run)
    assert newest is not None, "every checkpoint is gone"
    targets = state(-1, count)
    step = load(newest, targets, ALONE)["step"]
    assert step >= lowest, f"step {lowest} was complete, but {step} is the newest now"
    assert all(bool((target.data == step).all()) for target in targets), f"step {step} is not what was saved"
    print(step, len(survey(run).incomplete), flush=True)


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


def save_twice(run: Path, kill_before: int) -> None:
    """Replace step 2 and save step 3, and be killed before change number `kill_before` of a file's or folder's name."""
    changes = itertools.count()

    def watch(event: str, arguments: tuple) -> None:
        if event in CHANGES and next(changes) == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    for step in (2, 3):
        save(run, step, state(step, count=1), {"step": step}, ALONE, keep=1)


def save_first(run: Path) -> None:
    """Two complete checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        save(run, step, state(step, count=1), {"step": step}, ALONE, keep=2)


def kill_before_each_change(run: Path) -> int:
    """One saver per change that `save_twice` makes, each in a run of its own; the last one is not killed any more."""
    first = run / "first"
    if finished(forked(lambda: save_first(first))):
        return 1
    for change in itertools.count():
        mine = run / str(change)
        shutil.copytree(first, mine)
        status = finished(forked(lambda: save_twice(mine, change)))  # noqa: B023 (it runs at once)
        if finished(forked(lambda: look(mine, 2, count=1))):  # noqa: B023
            return 1
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
    return 1


def finished(child: int) -> int:
    """The wait status of a child that ends by itself."""
    return os.waitpid(child, 0)[1]


def kill_at_random(run: Path, kills: int, seed: int) -> int:
    """Kill `kills` savers that save for ever, and look after each."""
    chance = random.Random(seed)
    lowest = 0
    one_save = 0.0
    for _ in range(kills):
        saver = forked(lambda: save_for_ever(run))
        started = time.monotonic()
        while lowest == 0 and not (run / "checkpoints/latest").exists() and time.monotonic() < started + 30:
            time.sleep(0.01)  # the first save of all is let through: before it there is nothing to lose
        one_save = one_save or time.monotonic() - started
        time.sleep(chance.uniform(0, 2 * one_save))
        os.kill(saver, signal.SIGKILL)
        if not os.WIFSIGNALED(finished(saver)):
            return 1  # the saver failed by itself
        if finished(forked(lambda: look(run, lowest))):  # noqa: B023
            return 1
        lowest = int((run / "checkpoints/latest").read_text().removeprefix("step_"))
    return 0


def main(run: str, how: str, *numbers: str) -> int:
    """What the command line asks for."""
    logging.disable()
    return kill_before_each_change(Path(run)) if how == "changes" else kill_at_random(Path(run), *map(int, numbers))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
