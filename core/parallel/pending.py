"""Collectives over flat buffers that run while something else is computed; the result is asked for later.

All ranks of a group start them in the same order. Nothing here blocks before `wait`, and a group of one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.collectives import gather_into, sum_in_order
from core.parallel.groups import Group

# Elements of 16-bit floats that are summed at once, so that their float32 sum is a small buffer beside theirs.
_PIECE = 1 << 20


@dataclass(kw_only=True)
class Pending:
    """A collective under way. Its operands belong to it until `wait` has returned."""

    work: dist.Work | None
    finish: Callable[[], Tensor]

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> Tensor:
        """The result; called once. Raises RuntimeError where a rank failed to take part in time."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


def start_reduce_scatter(flat: Tensor, group: Group) -> Pending:
    """The sum over ranks of my part of `flat`: [size * n] -> [n], which is that part of `flat` itself.

    The other parts of `flat` are kept. The sum is taken in the order of the ranks, from an all-to-all that sends as much as a
    reduce-scatter does: the same bits on every backend and in every run. 16-bit floats are summed in float32 and rounded once. Until
    `wait` a second buffer of the size of `flat` is held.
    Raises ValueError if the elements do not divide by the ranks.
    """
    mine = own_part(flat, group)
    if group.handle is None or not flat.numel():  # empty here means empty on every rank
        return Pending(work=None, finish=lambda: mine)
    parts = torch.empty_like(flat).view(group.size, -1)
    group.count("reduce_scatter", (group.size - 1) * mine.nbytes)
    work = dist.all_to_all_single(parts.view(-1), flat, group=group.handle, async_op=True)

    def finish() -> Tensor:
        if flat.dtype.itemsize == 2:
            for start in range(0, mine.numel(), _PIECE):
                piece = slice(start, start + _PIECE)
                mine[piece].copy_(sum_in_order(parts[:, piece]))
            return mine
        torch.add(parts[0], parts[1], out=mine)
        for part in parts[2:]:
            mine.add_(part)
        return mine

    return Pending(work=work, finish=finish)


def start_all_gather(flat: Tensor, group: Group) -> Pending:
    """Every rank's part of `flat`, filled in from the rank that has it: [size * n], each rank's own n elements being right before.

    Raises ValueError if the elements do not divide by the ranks.
    """
    mine = own_part(flat, group)
    if group.handle is None or not flat.numel():
        return Pending(work=None, finish=lambda: flat)
    group.count("all_gather", (group.size - 1) * mine.nbytes)
    work = gather_into(flat, mine, group=group.handle, async_op=True)
    return Pending(work=work, finish=lambda: flat)


def own_part(flat: Tensor, group: Group) -> Tensor:
    """My part of a flat buffer that is spread evenly over the ranks: [size * n] -> [n], a view."""
    if flat.dim() != 1 or flat.numel() % group.size:
        raise ValueError(f"a buffer of shape {tuple(flat.shape)} does not divide over {group.size} ranks")
    each = flat.numel() // group.size
    return flat[group.position * each : (group.position + 1) * each]
