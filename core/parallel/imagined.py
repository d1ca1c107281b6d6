"""Collectives over groups that are not there: results of the right shape, bytes counted as ever, and nothing sent.

For a plan, which runs real modules on the meta device. What has no data (a meta tensor) has its shape alone. What has data
(counts, choices of experts) is filled in as if every peer held what this rank holds, so that sizes read from it are true where all
ranks do alike, as under balanced routing, and are what this rank would meet where all peers send to it what it sends to itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fill_exchanged(
    out: Tensor, x: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int], position: int
) -> None:
    """What an all-to-all of rows would leave in `out`: of every peer the rows that I send to my own position, over and over."""
    if out.is_meta or not out.numel():
        return
    first = sum(send_rows[:position])
    own = x[first : first + send_rows[position]]
    if all(rows == own.shape[0] for rows in receive_rows):  # as a rule; a large group would have to be gone through
        fill_gathered(out, own)
    else:
        torch.cat([_repeated(own, rows) for rows in receive_rows], out=out)


def fill_gathered(out: Tensor, x: Tensor) -> None:
    """What an all-gather of equally many rows would leave in `out`: mine, of every peer."""
    if not out.is_meta and out.numel():
        out.copy_(_repeated(x, out.shape[0]))


def fill_reduced(total: Tensor, ranks: int, *, largest: bool) -> None:
    """What an all-reduce would make of `total`, in place: the sum of so many equal ones, or the largest of them."""
    if not total.is_meta and not largest:
        total.mul_(ranks)


def _repeated(x: Tensor, rows: int) -> Tensor:
    """So many rows: those of x in turn; zeros where it has none."""
    if not x.shape[0]:
        return x.new_zeros(rows, *x.shape[1:])
    return x[torch.arange(rows) % x.shape[0]]
