"""How a run's start ended, in its folder: summary.json, events.jsonl and the report."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from core.errors import RequestError
from core.training.metrics import read_metrics
from launch.folder import SUMMARY_FILE, note_event, read_json, write_json


def end_run(out: Path, ended: str, seconds: float, *, report: bool = True) -> Path | None:
    """Note that a start `finished` or was `stopped` after `seconds`, and draw the report where asked. The report's page."""
    _note(out, ended, seconds)
    if not report:
        return None
    from launch.report import write_report

    return write_report(out)


def fail_run(out: Path, seconds: float, message: str) -> None:
    """Note that a start failed. What made it fail may keep that from being written too, and must not be hidden behind it."""
    with suppress(RequestError):
        _note(out, "failed", seconds, because=message.splitlines()[0])


def last_step(out: Path) -> int:
    """The last step that was measured."""
    measured = read_metrics(out)
    return int(measured[-1]["step"]) if measured else 0


def _note(out: Path, ended: str, seconds: float, **details: str) -> None:
    summary = read_json(out / SUMMARY_FILE)
    total = summary.get("seconds", 0.0) + seconds
    write_json(out / SUMMARY_FILE, {**summary, "seconds": total, "ended": ended})
    note_event(out, ended, step=last_step(out), **details)
