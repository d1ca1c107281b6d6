"""`ckpt diff`: what is compared, and the differences for people and for programs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ckpt.bar import bar
from ckpt.diff import CHUNK_BYTES, Difference, compare, is_same
from ckpt.memory import memory_of_each
from ckpt.opening import open_any
from ckpt.source import Form

# A chunk of each side, and of one both in float64 a part at a time; sources read by way of wider types.
CHUNKS_IN_MEMORY = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What counts, and what it may take."""

    model_only: bool
    tolerance: float | None
    memory_bytes: int
    workers: int

    @property
    def chunk_bytes(self) -> int:
        """How much of a tensor a process reads at a time. Raises RequestError where memory is too little for anything."""
        room = memory_of_each(self.memory_bytes, self.workers)
        return min(CHUNK_BYTES, room // CHUNKS_IN_MEMORY)


def compare_addresses(a: str, b: str, asked: Asked) -> list[Difference]:
    """The differences of what lies at two addresses, with a bar on a terminal."""
    chunk_bytes = asked.chunk_bytes
    opened_a, opened_b = open_any(a), open_any(b)
    with bar("comparing") as progress:
        return compare(
            opened_a.opener,
            opened_b.opener,
            tolerance=asked.tolerance,
            model_only=asked.model_only,
            workers=asked.workers,
            chunk_bytes=chunk_bytes,
            progress=progress,
        )


def all_same(found: Sequence[Difference]) -> bool:
    """Whether nothing differs that counts."""
    return all(map(is_same, found))


def as_json(a: str, b: str, found: Sequence[Difference]) -> str:
    """One JSON object. An infinite difference, for which JSON has no number, is the text "inf"."""
    tensors = [{key: _number(value) for key, value in asdict(difference).items()} for difference in found]
    return json.dumps({"a": a, "b": b, "equal": all_same(found), "tensors": tensors}, indent=1)


def as_text(found: Sequence[Difference], *, everything: bool) -> Iterator[str]:
    """A line per tensor that differs (everything: per tensor), and how many there are of each kind."""
    shown = [one for one in found if everything or not is_same(one)]
    if shown:
        yield "\t".join(("tensor", "verdict", "max |a-b|", "max relative", "a", "b"))
    for one in shown:
        numbers = (
            ("", "") if one.absolute is None or one.relative is None else (f"{one.absolute:.6g}", f"{one.relative:.6g}")
        )
        yield "\t".join((one.name, one.verdict, *numbers, _form(one.a), _form(one.b)))
    counts = Counter(one.verdict for one in found)
    kinds = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
    yield f"{len(found):,} tensors: {kinds or 'nothing to compare'}"


def _form(form: Form | None) -> str:
    return "-" if form is None else f"{form.dtype} [{', '.join(map(str, form.shape))}]"


def _number(value: object) -> object:
    return "inf" if isinstance(value, float) and math.isinf(value) else value
