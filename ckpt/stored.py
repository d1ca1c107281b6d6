"""A checkpoint as a Source: its tensors by name, any box of them read from the blocks that it meets."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ckpt.described import describe_checkpoint
from ckpt.files.address import open_files
from ckpt.files.protocol import Address, Files
from ckpt.manifest import Block, Codec, Entry, Manifest, file_faults, read_manifest
from ckpt.read import carry_out, damaged, read_block, reads_of
from ckpt.source import Described, Form
from core.errors import CheckpointError
from core.state.box import Box
from core.state.sharded import ShardedTensor

# What is kept of blocks of which only a part was wanted: the next read usually wants another part.
KEPT_BYTES = 48 << 20


class CheckpointSource:
    """The checkpoint at an address. Raises CheckpointError where there is none, or a file of it is missing or cut short.

    manifest: that of the checkpoint where it is known already, or of a folder that has none.
    """

    def __init__(self, checkpoint: Address, manifest: Manifest | None = None) -> None:
        self.files = open_files(checkpoint)
        self.manifest = manifest or read_manifest(self.files)
        wrong = file_faults(self.files, self.manifest)
        if wrong:
            raise CheckpointError(damaged(self.files, self.manifest, wrong))
        self._entries = {entry.name: _Sorted(entry) for entry in self.manifest.entries}
        self._kept = _Kept()

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
            carry_out(self.files, self.manifest.codec, read, fetch=self._kept.fetch)
        return data

    def describe(self) -> Described | None:
        """The model of the run that saved it, or that it was converted from."""
        return describe_checkpoint(self.files, self.manifest)


class _Kept:
    """The blocks read last, up to KEPT_BYTES: a block that lies across several pieces to be read is then read once."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, np.ndarray] = OrderedDict()
        self._bytes = 0

    def fetch(self, files: Files, codec: Codec, dtype: str, block: Block, box: Box) -> np.ndarray:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return self._blocks[block]
        content = read_block(files, codec, dtype, block, box)
        self._blocks[block] = content
        self._bytes += content.nbytes
        while self._bytes > KEPT_BYTES and len(self._blocks) > 1:
            self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return content


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
