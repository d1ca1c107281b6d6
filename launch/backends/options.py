"""Options of a back end, as `--cluster KEY=VALUE`: typed declarations, and how a job is divided over nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from core.config.override import Assignment, override_section
from core.errors import ConfigError, Fault
from launch.backends.protocol import Job

Options = TypeVar("Options")

SECTION = "cluster"
# Slurm's ways of saying how long: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?|(?P<short>\d+(?::\d+){0,2}))"
)


def parse_options(default: Options, texts: Sequence[str]) -> Options:
    """`default` with what `--cluster` says. Raises ConfigError with every fault: an unknown key, a value of another type, a line break."""
    items: list[Assignment] = []
    faults: list[Fault] = []
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            rule = "is not of the form key=value"
            faults.append(Fault(code="cluster.form", setting="--cluster", value=text, rule=rule, works="time=4:00:00"))
        elif not value.isprintable():
            rule = "holds a line break or another character that cannot be printed"
            faults.append(_fault(key.strip(), repr(value), rule, "one line", "text"))
        else:
            items.append(Assignment(key=f"{SECTION}.{key.strip()}", text=value.strip(), origin="--cluster"))
    options, wrong = override_section(SECTION, default, items)
    if faults or wrong:
        raise ConfigError([*faults, *wrong])
    return options


def seconds_of(key: str, text: str) -> int:
    """A duration as Slurm takes it, in seconds. Raises ConfigError where it is none."""
    found = TIME.fullmatch(text)
    if found is None:
        raise ConfigError([_fault(key, text, "is not a duration", "90 (minutes), 4:00:00 or 1-12:00:00", "time")])
    if found["short"]:
        parts = [int(part) for part in found["short"].split(":")]
        hours, minutes, seconds = (0, *parts, 0) if len(parts) == 1 else (0, *parts) if len(parts) == 2 else parts
        return hours * 3600 + minutes * 60 + seconds
    days, hours, minutes, seconds = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def wrong(key: str, value: object, rule: str, works: str, code: str) -> ConfigError:
    """The error of one option."""
    return ConfigError([_fault(key, value, rule, works, code)])


def _fault(key: str, value: object, rule: str, works: str, code: str) -> Fault:
    return Fault(code=f"cluster.{code}", setting=f"{SECTION}.{key}", value=value, rule=rule, works=works)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How a job lies on a cluster: so many nodes of `ranks` each.

    segment: so many nodes next to each other have to be joined by NVLink, None where no group of experts spans several.
    """

    count: int
    ranks: int
    segment: int | None


def divide(job: Job, nodes: int | None) -> Nodes:
    """The nodes of a job; nodes: how many were asked for, None for as few as its hardware allows.

    Raises ConfigError where the ranks cannot be spread evenly, or a node would need more GPUs than it has.
    """
    if nodes is not None and nodes < 1:
        raise wrong("nodes", nodes, "must be at least 1", "1", "nodes")
    if nodes is None:
        each = job.gpus_per_node or job.ranks
        nodes = -(-job.ranks // each)
    if job.ranks % nodes:
        near = next(number for number in range(nodes, job.ranks + 1) if job.ranks % number == 0)
        raise wrong(
            "nodes", nodes, f"must divide the {job.ranks} ranks, since every node has as many", str(near), "nodes"
        )
    each = job.ranks // nodes
    if job.gpus_per_node is not None and each > job.gpus_per_node:
        rule = f"gives a node {each} ranks, and it has {job.gpus_per_node} GPUs"
        least = next(
            n for n in range(nodes, job.ranks + 1) if job.ranks % n == 0 and job.ranks // n <= job.gpus_per_node
        )
        raise wrong("nodes", nodes, rule, str(least), "nodes")
    return Nodes(count=nodes, ranks=each, segment=_segment(job, nodes, each))


def _segment(job: Job, nodes: int, each: int) -> int | None:
    """Nodes that must share an NVLink domain: those of a group of ranks that exchange tokens, or the domain where it is larger."""
    most = job.domain // each
    span = min(-(-job.expert_ranks // each), nodes)
    if most < 2 or span < 2:
        return None
    if span <= most and nodes % span == 0:
        return span
    largest = max(number for number in range(1, min(most, nodes) + 1) if nodes % number == 0)
    return largest if largest > 1 else None
