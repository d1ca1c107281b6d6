"""Which rank failed first and what it said: from the error files, and from how the processes died."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.backends.protocol import JobError
from launch.folder import ERRORS_FOLDER

# A peer of a crashed rank notices within milliseconds and writes its own error file; the crash itself is seen a little
# later than it happened, and must still count as the earlier of the two.
NOTICED_LATE_SECONDS = 0.25
LOG_TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Death:
    """A worker that ended: code is its exit code, or minus the signal that killed it. ours: we or the agent ended it."""

    rank: int
    code: int
    seen: float
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed. message and traceback are its own words where it left any."""

    rank: int
    time: float
    code: int
    message: str | None = None
    traceback: str | None = None
    exit_code: int = 1
    ours: bool = False


def remove_error_files(out: Path) -> None:
    """Remove what an earlier start of this run left, so that only this start's errors are there."""
    for path in (out / ERRORS_FOLDER).glob("rank*.json"):
        path.unlink()


def find_failures(out: Path, deaths: Iterable[Death], since: float = 0.0) -> tuple[Failure, ...]:
    """Every rank that failed, the first cause first; those that were only ended because another failed come last.

    since: what was written before is of an earlier start of the workers, and passed over.
    """
    by_rank = {death.rank: death for death in deaths if death.code != 0}
    said = {rank: words for rank, words in _read_errors(out).items() if float(words.get("time", 0.0)) >= since}
    found = []
    for rank in sorted(by_rank.keys() | said.keys()):
        death, words = by_rank.get(rank), said.get(rank)
        code = death.code if death else 1
        if words:
            found.append(_from_words(rank, code, words))
        elif death:
            time = death.seen - NOTICED_LATE_SECONDS
            found.append(
                Failure(rank=rank, time=time, code=code, ours=death.ours or -code in (signal.SIGTERM, signal.SIGUSR1))
            )
    return tuple(sorted(found, key=lambda failure: (failure.ours, failure.time)))


def job_error(failures: tuple[Failure, ...], logs: Path) -> JobError:
    """The error to show: the first failing rank's own message, then the others in a line each, then where the logs are."""
    first, *others = failures
    lines = [f"rank {first.rank} failed first: {first.message or _how(first.code)}"]
    if first.traceback:
        lines.append(first.traceback.rstrip())
    if first.message is None:
        lines += _log_tail(logs / f"rank{first.rank}.stderr.txt")
    for failure in others:
        if not failure.ours:
            text = (failure.message or _how(failure.code)).splitlines() or [""]
            lines.append(f"then rank {failure.rank}: {text[0]}")
    lines.append(f"Logs of every rank: {logs}")
    return JobError("\n".join(lines), exit_code=first.exit_code)


def _read_errors(out: Path) -> dict[int, dict[str, Any]]:
    """What each rank wrote into `errors/rank{r}.json`; a file that a crash tore is passed over."""
    found = {}
    for path in (out / ERRORS_FOLDER).glob("rank*.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found[int(data["rank"])] = dict(data)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _from_words(rank: int, code: int, words: Mapping[str, Any]) -> Failure:
    traceback = words.get("traceback")
    return Failure(
        rank=rank,
        time=float(words.get("time", 0.0)),
        code=code,
        message=str(words.get("message", "")),
        traceback=None if traceback is None else str(traceback),
        # an unexpected error is a failed job whatever the file says
        exit_code=int(words.get("exit_code", 1)) if traceback is None else 1,
    )


def _how(code: int) -> str:
    """How a process ended that left no word."""
    if code >= 0:
        return f"it ended with exit code {code} and left no message"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (where nobody sent it, the machine was out of memory)" if -code == signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"


def _log_tail(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return [f"The end of {path}:", *(f"  {line}" for line in lines)] if lines else []
