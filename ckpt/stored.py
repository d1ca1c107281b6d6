"""A checkpoint as a Source: its tensors by name, any box of them read from the blocks that it meets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt.described import describe_checkpoint
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.manifest import Entry, file_faults, read_manifest
from ckpt.read import carry_out, damaged, reads_of
from ckpt.source import Described, Form
from core.errors import CheckpointError
from core.state.box import Box
from core.state.sharded import ShardedTensor


class CheckpointSource:
    """The checkpoint at an address. Raises CheckpointError where there is none, or a file of it is missing or cut short."""

    def __init__(self, checkpoint: Address) -> None:
        self.files = open_files(checkpoint)
        self.manifest = read_manifest(self.files)
        wrong = file_faults(self.files, self.manifest)
        if wrong:
            raise CheckpointError(damaged(self.files, self.manifest, wrong))
        self._entries = {entry.name: _Sorted(entry) for entry in self.manifest.entries}

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor."""
        return {entry.name: Form(shape=entry.shape, dtype=entry.dtype) for entry in self.manifest.entries}

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box` of a tensor, checked. Raises CheckpointError where it is damaged."""
        entry = self._entries[name].near(box)
        data = torch.empty(box.shape, dtype=getattr(torch, entry.dtype))
        target = ShardedTensor(name=name, shape=entry.shape, box=box, data=data)
        for read in reads_of(self.files.address, target, entry):
            carry_out(self.files, self.manifest.codec, read)
        return data

    def describe(self) -> Described | None:
        """The model of the run that saved it, or that it was converted from."""
        return describe_checkpoint(self.files, self.manifest)


class _Sorted:
    """An entry whose pieces can be found by where they begin: a large checkpoint has thousands."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.pieces = sorted(entry.pieces, key=lambda piece: piece.box.offset)
        self.first = [piece.box.offset[:1] for piece in self.pieces]
        self.longest = max((piece.box.shape[:1] for piece in self.pieces), default=(0,))

    def near(self, box: Box) -> Entry:
        """The entry with the pieces alone that can meet `box`, by their first dimension."""
        if not box.shape:
            return self.entry
        low = bisect_left(self.first, (box.offset[0] - self.longest[0] + 1,))
        high = bisect_left(self.first, (box.offset[0] + box.shape[0],))
        return Entry(
            name=self.entry.name, shape=self.entry.shape, dtype=self.entry.dtype, pieces=tuple(self.pieces[low:high])
        )
