"""Run as a program: savers that are killed at random instants, each followed by a look at what is left.

    python -m tests.ckpt.interrupted RUN KILLS SEED

It imports torch once and forks every saver, so that a kill costs milliseconds. Prints, per kill, the newest step and how
many half-written saves the kill left; ends with 1 and a message on the first checkpoint that is not whole.
"""

from __future__ import annotations

import logging
import os
import random
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
LONGEST_SECONDS = 0.15  # a few saves long, so that every part of a save is hit


def state(step: int) -> list[ShardedTensor]:
    """A state that tells its step in every element."""
    return [
        ShardedTensor(name=name, shape=shape, box=whole(shape), data=torch.full(shape, float(step)))
        for name, shape in SHAPES.items()
    ]


def save_for_ever(run: Path) -> None:
    """Save step after step; every third one is saved twice, so that replacing is interrupted too."""
    newest = latest(run)
    step = read_manifest(newest).step if newest else 0
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            save(run, step, state(step), {"step": step}, ALONE, keep=1)


def look(run: Path, lowest: int) -> None:
    """Print the newest step and the number of half-written ones; fail unless it is whole and not older than `lowest`."""
    newest = latest(run)
    assert newest is not None, "every checkpoint is gone"
    targets = state(-1)
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


def main(run: Path, kills: int, seed: int) -> int:
    """Kill `kills` savers and look after each."""
    logging.disable()
    chance = random.Random(seed)
    lowest = 0
    for _ in range(kills):
        saver = forked(lambda: save_for_ever(run))
        started = time.monotonic()
        while lowest == 0 and not (run / "checkpoints/latest").exists() and time.monotonic() < started + 30:
            time.sleep(0.01)  # the first save of all is let through: before it there is nothing to lose
        time.sleep(chance.uniform(0, LONGEST_SECONDS))
        os.kill(saver, signal.SIGKILL)
        _, status = os.waitpid(saver, 0)
        if not os.WIFSIGNALED(status):
            return 1  # the saver failed by itself
        looker = forked(lambda: look(run, lowest))  # noqa: B023 (it runs at once)
        if os.waitpid(looker, 0)[1]:
            return 1
        lowest = int((run / "checkpoints/latest").read_text().removeprefix("step_"))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
