"""Reads a source in long runs, and hands them out block by block: what a read costs beside its bytes is then paid seldom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ckpt.blocks import block_boxes, block_shape
from ckpt.dtype import item_bytes
from ckpt.host import to_numpy
from ckpt.plan import Plan, Write
from ckpt.source import Source
from core.state.box import Box, shifted


class Runs:
    """Reads the blocks of `writes`, in about their order, by runs of at most `run_bytes` (or one block) from a source.

    A box that is no block of theirs is read by itself. One run is kept in memory.
    """

    def __init__(self, source: Source, plan: Plan, writes: Iterable[Write], run_bytes: int) -> None:
        self._source = source
        self._run_of: dict[tuple[str, Box], Box] = {}
        for write in writes:
            item = item_bytes(plan.tensors[write.name][1])
            boxes = block_boxes(write.box, block_shape(write.box.shape, item))
            for run, blocks in _joined(boxes, run_bytes // item):
                self._run_of.update({(write.name, block): run for block in blocks})
        self._held: tuple[str, Box] | None = None
        self._values: np.ndarray | None = None

    def read(self, name: str, box: Box) -> np.ndarray:
        """The values of a box."""
        run = self._run_of.get((name, box), box)
        if self._values is None or self._held != (name, run):
            # The old run goes before the new one comes.
            self._values = None
            self._values, self._held = to_numpy(self._source.read(name, run)), (name, run)
        return self._values[shifted(box, run.offset).slices]


def _joined(boxes: Iterable[Box], most: int) -> Iterator[tuple[Box, list[Box]]]:
    """Boxes that follow each other, joined to larger ones of at most `most` elements, and what each is joined of."""
    run: Box | None = None
    held: list[Box] = []
    for box in boxes:
        larger = None if run is None else _union(run, box)
        if run is not None and (larger is None or larger.elements > most):
            yield run, held
            larger, held = None, []
        run = larger or box
        held.append(box)
    if run is not None:
        yield run, held


def _union(box: Box, following: Box) -> Box | None:
    """The box of both, where the second continues the first along one dimension."""
    differ = [
        d for d in range(len(box.shape)) if (box.offset[d], box.shape[d]) != (following.offset[d], following.shape[d])
    ]
    if len(differ) != 1 or following.offset[differ[0]] != box.offset[differ[0]] + box.shape[differ[0]]:
        return None
    shape = list(box.shape)
    shape[differ[0]] += following.shape[differ[0]]
    return Box(offset=box.offset, shape=tuple(shape))
