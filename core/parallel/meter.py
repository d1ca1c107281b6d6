"""Counts what one rank sends to others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Meter:
    """Bytes that leave this rank, forward and backward, by (axis of the group, name of the collective).

    One is handed to the groups whose traffic is to be counted together. Collectives count what a good implementation has to
    send: an all-reduce as its ring does, 2 (n - 1) / n of its bytes.
    """

    sent_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, axis: str, collective: str, count: int) -> None:
        """Count `count` bytes."""
        self.sent_bytes[axis, collective] += count

    def by_axis(self) -> dict[str, int]:
        """Bytes per axis, over all collectives."""
        found: Counter[str] = Counter()
        for (axis, _), count in self.sent_bytes.items():
            found[axis] += count
        return dict(found)
