"""States that wait in host memory between steps, and come to the device piece by piece when they are updated (report section 4.1.6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from core.config.precision import SCALE_ELEMENTS

# So many elements share a scale, and are never parted between host and device.
BLOCK = SCALE_ELEMENTS
Range = tuple[int, int]


class Kept:
    """One number of `dtype` for each `per` of `elements`, zero at first; those of the first `on_host` elements lie in host memory.

    on_host: a multiple of `per`, or all elements. Host memory is pinned where the device is a GPU.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, *, on_host: int = 0, per: int = 1
    ) -> None:
        assert on_host % per == 0 or on_host == elements, f"{on_host} elements cut one of the blocks of {per}"
        self.elements, self.on_host, self.per = elements, on_host, per
        there = -(-on_host // per)
        self.host = torch.zeros(there, dtype=dtype, pin_memory=device.type == "cuda" and there > 0)
        self.here = torch.zeros(-(-elements // per) - there, dtype=dtype, device=device)

    def fetch(self, start: int, stop: int) -> Tensor:
        """The numbers of elements [start, stop) on the device: those that lie there themselves, else a copy. All of them on one side."""
        numbers, there = self._numbers(start, stop), self.host.numel()
        if start >= self.on_host:
            return self.here[numbers.start - there : numbers.stop - there]
        return self.host[numbers].to(self.here.device, non_blocking=True, copy=True)

    def put(self, start: int, stop: int, numbers: Tensor) -> None:
        """Take back what `fetch` gave, changed."""
        if start < self.on_host:
            self.host[self._numbers(start, stop)].copy_(numbers, non_blocking=True)

    def _numbers(self, start: int, stop: int) -> slice:
        assert start % self.per == 0, f"element {start} is inside a block of {self.per}"
        return slice(start // self.per, -(-stop // self.per))


class Shuttle:
    """Carries pieces to the device and back. On a GPU one comes and one goes while another is updated, each on a stream of its own.

    At most three pieces are on the device at once: the host waits for what went before it fetches more.
    """

    def __init__(self, device: torch.device) -> None:
        streams = device.type == "cuda"
        self._coming = torch.cuda.Stream(device) if streams else None
        self._going = torch.cuda.Stream(device) if streams else None

    def carry(self, parts: Sequence[Kept], ranges: Sequence[Range]) -> Iterator[tuple[Range, list[Tensor]]]:
        """Each range with its numbers of every part; what the caller has made of them goes back before the next one is given."""
        if self._coming is not None and self._going is not None:
            self._coming.wait_stream(self._going)
        sent: list[torch.cuda.Event | None] = []
        ahead = self._fetch(parts, ranges[0]) if ranges else []
        for number, each in enumerate(ranges):
            numbers = self._arrived(ahead, each, parts)
            if number + 1 < len(ranges):
                if number and (event := sent[number - 1]) is not None:
                    event.synchronize()
                ahead = self._fetch(parts, ranges[number + 1])
            yield each, numbers
            sent.append(self._send(parts, each, numbers))

    def wait(self) -> None:
        """Wait until everything is back in host memory, before that is read there."""
        if self._going is not None:
            self._going.synchronize()

    def _fetch(self, parts: Sequence[Kept], each: Range) -> list[Tensor]:
        if self._coming is None or not _away(parts, each):
            return [part.fetch(*each) for part in parts]
        with torch.cuda.stream(self._coming):
            return [part.fetch(*each) for part in parts]

    def _arrived(self, numbers: list[Tensor], each: Range, parts: Sequence[Kept]) -> list[Tensor]:
        """Have the computation wait for what was fetched, which is then its own."""
        if self._coming is not None and _away(parts, each):
            current = torch.cuda.current_stream(self._coming.device)
            current.wait_stream(self._coming)
            for tensor in numbers:
                tensor.record_stream(current)
        return numbers

    def _send(self, parts: Sequence[Kept], each: Range, numbers: Sequence[Tensor]) -> torch.cuda.Event | None:
        if self._going is None or not _away(parts, each):
            for part, tensor in zip(parts, numbers, strict=True):
                part.put(*each, tensor)
            return None
        self._going.wait_stream(torch.cuda.current_stream(self._going.device))
        with torch.cuda.stream(self._going):
            for part, tensor in zip(parts, numbers, strict=True):
                part.put(*each, tensor)
                tensor.record_stream(self._going)
            event = torch.cuda.Event()
            event.record()
        return event


def pieces(elements: int, on_host: int, size: int) -> list[Range]:
    """[0, elements) in pieces of up to `size`, none of which lies on both sides of `on_host`."""
    cuts = [*range(0, on_host, size), *range(on_host, elements, size), elements]
    return [(low, high) for low, high in pairwise(cuts) if low < high]


def share_on_host(elements: int, share: float) -> int:
    """How many of so many elements lie in host memory where a share of them shall: whole blocks, or all."""
    return elements if share >= 1.0 else int(elements * share) // BLOCK * BLOCK


def _away(parts: Sequence[Kept], each: Range) -> bool:
    return any(each[0] < part.on_host for part in parts)
