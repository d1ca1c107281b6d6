"""Host memory for the pieces that a rank writes: filled from the live state of training, and used again by every save."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt.plan import Write
from core.state.box import intersect, shifted
from core.state.sharded import ShardedTensor

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The piece `write` lies from byte `start` on; it is the part `inside` of tensor number `source` of those that this rank holds."""

    write: Write
    source: int
    inside: tuple[slice, ...]
    start: int
    size: int


class Staging:
    """One buffer for all pieces of a plan that this rank writes, which is less than it holds where others hold copies.

    Fresh memory is many times slower to write to than memory that was written before (the system clears it page by page), so the
    buffer stays between saves; it is made by the first use. Page-locked where a tensor lies on an accelerator.
    """

    def __init__(self, writes: Sequence[Write], tensors: Sequence[ShardedTensor]) -> None:
        """writes: this rank's. Every later `fill` gets tensors as these are: names, boxes, types and order."""
        self._device = next((t.data.device for t in tensors if t.data.device.type != "cpu"), None)
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._buffer: Tensor | None = None
        self._making = threading.Lock()
        self._parts, self._bytes = _lay_out(writes, tensors)

    def allocate(self) -> None:
        """Have the memory ready, every page of it, before it is needed; also from another thread."""
        with self._on_device():
            self._made(touched=True)

    def follow(self) -> None:
        """Let the next `fill` come after all that the calling thread has asked of the accelerator so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def fill(self, tensors: Sequence[ShardedTensor]) -> tuple[ShardedTensor, ...]:
        """The pieces, copied to the buffer when this returns; valid until the next call. From any thread."""
        with self._on_device():
            pieces = self._copies(tensors)
            if self._stream is not None:
                self._stream.synchronize()
        return tuple(pieces)

    def _on_device(self) -> AbstractContextManager[Any]:
        """In which this rank's accelerator is that of the calling thread too, and works on copies beside what it does for training."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _copies(self, tensors: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        buffer, pieces = self._made(touched=False), []
        for part in self._parts:
            holder, box = tensors[part.source], part.write.box
            data = buffer[part.start : part.start + part.size].view(holder.data.dtype).view(box.shape)
            data.copy_(holder.data.detach()[part.inside], non_blocking=True)
            pieces.append(ShardedTensor(name=holder.name, shape=holder.shape, box=box, data=data))
        return pieces

    def _made(self, *, touched: bool) -> Tensor:
        with self._making:
            if self._buffer is None:
                locked = self._device is not None
                self._buffer = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=locked)
                if touched and not locked:
                    self._buffer.zero_()
            return self._buffer


def _lay_out(writes: Sequence[Write], tensors: Sequence[ShardedTensor]) -> tuple[list[_Part], int]:
    """The pieces one behind the other, and the bytes of it all."""
    of: dict[str, list[int]] = {}
    for number, tensor in enumerate(tensors):
        of.setdefault(tensor.name, []).append(number)
    parts, end = [], 0
    for write in writes:
        source = next(n for n in of[write.name] if intersect(tensors[n].box, write.box) == write.box)
        inside = shifted(write.box, tensors[source].box.offset).slices
        size = write.box.elements * tensors[source].data.element_size()
        parts.append(_Part(write=write, source=source, inside=inside, start=end, size=size))
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return parts, end
