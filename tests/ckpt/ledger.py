"""Counts what a load does: how often each block is read, and how often each element of each target is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.manifest import Manifest
from core.state.box import intersect
from core.state.sharded import ShardedTensor


class Ledger:
    """The account of a load into `targets`, which lie on the host."""

    def __init__(self, targets: Sequence[ShardedTensor]) -> None:
        # (file, offset, bytes) -> how often; of several buffers that are filled at once the sum.
        self.reads: Counter[tuple[str, int, int]] = Counter()
        self._targets = targets
        # One count per element of the memory of a target, gaps of a strided one too.
        self._counts = [np.zeros(_extent(target.data), int) for target in targets]
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """All that was read, manifest and listings apart."""
        return sum(size * times for (_, _, size), times in self.reads.items())

    def assert_each_target_written_once(self) -> None:
        for target, counts in zip(self._targets, self._counts, strict=True):
            seen = np.lib.stride_tricks.as_strided(
                counts, target.data.shape, [stride * counts.itemsize for stride in target.data.stride()]
            )
            assert (seen == 1).all(), f"{target.name}: {Counter(seen.ravel().tolist())}"
            assert counts.sum() == target.data.numel(), f"{target.name}: written between its elements"

    def assert_read_just_what_is_met(self, manifest: Manifest) -> None:
        """Every block that holds an element of a target once; nothing else."""
        assert self.reads == Counter(dict.fromkeys(met_blocks(manifest, self._targets), 1))

    def note_read(self, path: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        with self._lock:
            self.reads[path, offset, sum(buffer.nbytes for buffer in buffers)] += 1
        for buffer in buffers:
            self._note(buffer.__array_interface__["data"][0], buffer.shape, (1,), 1, bytes_each=True)

    def note_copy(self, here: Tensor) -> None:
        self._note(here.data_ptr(), tuple(here.shape), here.stride(), here.element_size(), bytes_each=False)

    def _note(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], size: int, *, bytes_each: bool
    ) -> None:
        for target, counts in zip(self._targets, self._counts, strict=True):
            item = target.data.element_size()
            at, rest = divmod(address - target.data.data_ptr(), item)
            if not 0 <= at < len(counts):
                continue
            assert rest == 0, f"{target.name}: written from the middle of an element"
            if bytes_each:
                shape, stride = (shape[0] // item,), (1,)
            else:
                assert size == item
            with self._lock:
                written = np.lib.stride_tricks.as_strided(counts[at:], shape, [s * counts.itemsize for s in stride])
                written += 1
            return


@contextmanager
def watched(targets: Sequence[ShardedTensor]) -> Iterator[Ledger]:
    """The ledger of whatever is read from local files, and copied into the targets, inside."""
    ledger = Ledger(targets)
    real_read, real_copy = LocalFiles.read_into, torch.Tensor.copy_

    def read_into(files: LocalFiles, path: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        ledger.note_read(path, offset, buffers)
        real_read(files, path, offset, buffers)

    def copy_(here: Tensor, *values: Any, **options: Any) -> Tensor:
        ledger.note_copy(here)
        return real_copy(here, *values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFiles, "read_into", read_into)
        patch.setattr(torch.Tensor, "copy_", copy_)
        yield ledger


def met_blocks(manifest: Manifest, targets: Sequence[ShardedTensor]) -> set[tuple[str, int, int]]:
    """(file, offset, bytes) of the blocks that hold elements of targets, found element range by element range of each piece."""
    entries = {entry.name: entry for entry in manifest.entries}
    found = set()
    for target in targets:
        for piece in entries[target.name].pieces:
            numbers = np.full(piece.box.shape, -1)
            grid = np.indices(piece.box.shape) // np.reshape(piece.block, (-1, *[1] * len(piece.block))).clip(1)
            counts = [-(-s // b) for s, b in zip(piece.box.shape, piece.block, strict=True)]
            numbers[...] = np.ravel_multi_index(tuple(grid), counts) if counts else 0
            shared = intersect(piece.box, target.box)
            if shared:
                inside = tuple(
                    slice(o - p, o - p + s)
                    for o, p, s in zip(shared.offset, piece.box.offset, shared.shape, strict=True)
                )
                blocks = [piece.blocks[number] for number in np.unique(numbers[inside])]
                found |= {(block.file, block.offset, block.size) for block in blocks}
    return found


def _extent(tensor: Tensor) -> int:
    """The elements of memory from the first to the last of a tensor."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
