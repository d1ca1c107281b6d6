"""ZeRO-1 (arXiv 1910.02054): gradients are reduce-scattered over the copies of their parameters while backward still runs,
and parameters are gathered again while the next forward already runs. In between each rank updates its own part.

All ranks of a process group start its collectives in the same order: that of the buckets, whatever order gradients arise in.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from core.optim.buckets import Bucket
from core.optim.primary import PrimaryBucket
from core.parallel.groups import Group
from core.parallel.pending import Pending, start_reduce_scatter
from core.state.shard import local


class SumSlot(Protocol):
    """A parameter whose gradients are added up in a bucket; see `core.optim.buckets.Slot`."""

    name: str
    gradient: Tensor
    filled: bool
    passes_left: int

    @property
    def parameter(self) -> Tensor:
        """The parameter of the model, which gets a `.grad`."""
        ...


class SumBucket(Protocol):
    """Parameters whose main gradients are summed over the same copies at once; see `core.optim.buckets.Bucket`."""

    waiting: int

    @property
    def slots(self) -> Sequence[SumSlot]:
        """The parameters."""
        ...

    @property
    def group(self) -> Group:
        """The ranks that hold copies."""
        ...

    @property
    def gradients(self) -> Tensor:
        """The main gradients [group.size * n]."""
        ...


def take(slot: SumSlot) -> None:
    """Add what is here of the parameter's `.grad` to the main gradient, and clear it."""
    assert slot.parameter.grad is not None, f"{slot.name}: has no gradient"
    fresh = local(slot.parameter.grad)
    slot.parameter.grad = None
    if slot.filled:
        slot.gradient.add_(fresh)
    else:
        slot.gradient.copy_(fresh)
    slot.filled = True


def zero_unreached(bucket: SumBucket) -> None:
    """Let parameters that no pass reached count as zero."""
    for slot in bucket.slots:
        if not slot.filled:
            slot.gradient.zero_()


def _arrived(reduction: weakref.ref[Reduction], name: str, parameter: Tensor) -> None:
    """The hook behind a parameter's gradient. It must not own what owns the parameter: torch keeps hooks where Python's garbage
    collector cannot see them, so that model, optimizer and process groups would live for ever."""
    found = reduction()
    if found is not None:
        found.arrived(name)


class Reduction:
    """Adds up gradients in the buckets' main gradients and sums them over copies; each rank ends with its own part."""

    def __init__(self, buckets: Sequence[SumBucket]) -> None:
        self.buckets = tuple(buckets)
        self.slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self.done = False
        self._begun = False
        self._started = 0  # so many buckets, from the first, are under way or summed
        self._pending: deque[Pending] = deque()
        for _, slot in self.slots.values():
            slot.parameter.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), slot.name))

    def begin(self, passes: Mapping[str, int] | int) -> None:
        """Start a step of which it is known how many backward passes reach each parameter; those left out: none."""
        assert self.done or not any(slot.filled for _, slot in self.slots.values()), "begin() in the middle of a step"
        self.clear()
        told = dict.fromkeys(self.slots, passes) if isinstance(passes, int) else passes
        assert told.keys() <= self.slots.keys(), f"not trained here: {sorted(told.keys() - self.slots.keys())}"
        self._begun = True
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.passes_left = told.get(slot.name, 0)
            bucket.waiting = sum(slot.passes_left > 0 for slot in bucket.slots)
        self._start_ready()

    def accumulate(self) -> None:
        """Take over every gradient that lies in a parameter's `.grad`."""
        for bucket, slot in self.slots.values():
            if slot.parameter.grad is not None:
                if self.done:  # that step was abandoned
                    self.clear()
                self._take(bucket, slot)

    def reduce(self) -> None:
        """Start what has not started, and wait for all sums."""
        self.accumulate()
        while self._started < len(self.buckets):
            self._start_next()
        while self._pending:
            self._pending.popleft().wait()
        self._begun, self.done = False, True

    def clear(self) -> None:
        """Forget the gradients: what comes next belongs to another step."""
        while self._pending:
            self._pending.popleft().wait()
        for _, slot in self.slots.values():
            slot.filled = False
        self._begun, self.done, self._started = False, False, 0

    def arrived(self, name: str) -> None:
        """Take over a gradient that has just come. A backward outside a step that has begun is none of our business."""
        bucket, slot = self.slots[name]
        # Without a gradient: it was put off, and comes by hand.
        if self._begun and slot.parameter.grad is not None:
            self._take(bucket, slot)

    @torch.no_grad()
    def _take(self, bucket: SumBucket, slot: SumSlot) -> None:
        take(slot)
        if not self._begun:
            return
        slot.passes_left -= 1
        assert slot.passes_left >= 0, f"{slot.name}: reached by more backward passes than begin() was told"
        if slot.passes_left == 0:
            bucket.waiting -= 1
            self._start_ready()

    def _start_ready(self) -> None:
        """Start every bucket whose turn it is and that no further pass reaches.

        Never waits: a rank that did might keep others from the point at which they would join.
        """
        while self._started < len(self.buckets) and not self.buckets[self._started].waiting:
            self._start_next()
        while self._pending and self._pending[0].done():  # frees its buffer
            self._pending.popleft().wait()

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        self._started += 1
        zero_unreached(bucket)
        self._pending.append(start_reduce_scatter(bucket.gradients, bucket.group))


class Gathering:
    """Fetches the parts of the parameters that other ranks have updated."""

    def __init__(self, buckets: Sequence[Bucket | PrimaryBucket]) -> None:
        # As forward needs them, which is the other way round.
        self.buckets = tuple(bucket for bucket in reversed(buckets) if bucket.group.size > 1)
        self._pending: dict[Bucket | PrimaryBucket, Pending] = {}

    def start(self) -> None:
        """Start to gather every bucket; the parameters may not be touched until they have been waited for."""
        assert not self._pending, "the parameters are still on their way"
        self._pending = {bucket: bucket.start_gather() for bucket in self.buckets}

    def wait_for(self, prefix: str) -> None:
        """Wait for the parameter `prefix` and those whose names begin with `prefix.`; "" means all."""
        for bucket in tuple(self._pending):
            if not prefix or any(f"{slot.name}.".startswith(f"{prefix}.") for slot in bucket.slots):
                self._pending.pop(bucket).wait()
