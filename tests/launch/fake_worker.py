"""A worker without torch, for the tests of the backend: does what `out/plan.json` says its rank should do."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, lambda *_: (out / f"stopped{rank}").touch())
    signal.signal(signal.SIGUSR1, lambda *_: (out / f"stopped{rank}").touch())
    (out / f"pid{rank}").write_text(str(os.getpid()))
    names = ("WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_PORT", "GROUP_RANK", "LOCAL_RANK", "ZOO_TEST")
    shown = {name: os.environ.get(name) for name in names}
    (out / f"ready{rank}").write_text(json.dumps(shown))
    what = json.loads((out / "plan.json").read_text())[rank]
    while not all((out / f"ready{r}").exists() for r in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    ACTIONS[what](out, rank)


def print_lines(out: Path, rank: int) -> None:
    print(f"rank {rank} prints")
    print(f"rank {rank} complains", file=sys.stderr)


def fail(out: Path, rank: int) -> None:
    time.sleep(0.1)
    write_error(out, rank, "the disk is full", None, 1)
    sys.exit(1)


def refuse(out: Path, rank: int) -> None:
    write_error(out, rank, "the folder is not a checkpoint", None, 2)
    sys.exit(2)


def raise_error(out: Path, rank: int) -> None:
    write_error(out, rank, "division by zero", "Traceback: the line that divided", 1)
    sys.exit(1)


def die(out: Path, rank: int) -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(out: Path, rank: int) -> None:
    while True:
        time.sleep(1)


def follow(out: Path, rank: int) -> None:
    """As a peer whose connection to the dead rank breaks."""
    while not dead_peer(out, rank):
        time.sleep(0.005)
    write_error(out, rank, "connection closed by peer", "Traceback: a collective", 1)
    sys.exit(1)


def save(out: Path, rank: int) -> None:
    while not (out / f"stopped{rank}").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    (out / f"saved{rank}").touch()


def fail_once(out: Path, rank: int) -> None:
    """As long as no start before has got this far."""
    if (out / f"failed{rank}").exists():
        print(f"rank {rank} goes on")
        return
    (out / f"failed{rank}").touch()
    write_error(out, rank, "a cable was pulled", None, 1)
    sys.exit(1)


def wait_for_first(out: Path, rank: int) -> None:
    """Stopped by what only another rank was told, as all ranks leave the loop together; every rank says how far it came."""
    while not any(out.glob("stopped*")):
        time.sleep(0.02)
    (out / "ends").mkdir(exist_ok=True)
    (out / "ends" / f"rank{rank}.json").write_text('{"step": 3, "steps": 9}')


ACTIONS = {
    "fail once": fail_once,
    "stop together": wait_for_first,
    "print": print_lines,
    "fail": fail,
    "refuse": refuse,
    "raise": raise_error,
    "die": die,
    "exit": lambda out, rank: os._exit(7),
    "hang": hang,
    "follow": follow,
    "save": save,
}


def dead_peer(out: Path, rank: int) -> bool:
    """Whether a rank other than mine has become a zombie or is gone."""
    for path in out.glob("pid*"):
        state = Path(f"/proc/{path.read_text()}/stat")
        if path.name != f"pid{rank}" and (not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"):
            return True
    return False


def write_error(out: Path, rank: int, message: str, traceback: str | None, exit_code: int) -> None:
    (out / "errors").mkdir(exist_ok=True)
    data = {"rank": rank, "time": time.time(), "message": message, "traceback": traceback, "exit_code": exit_code}
    (out / "errors" / f"rank{rank}.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main()
