"""Collectives that autograd sees, over rows: the first dimension of a tensor of any dtype that the backend can send.

Every rank of the group takes part in each forward and each backward, with zero rows too: a rank that left one out would hang
the others. Backward runs on a rank only if its input requires a gradient and its output reaches the loss, so both have
to hold on all ranks or on none. A group of one rank communicates nothing and needs no torch.distributed.

All sums over rows that travel are taken in the order of the ranks and, for 16-bit floats, in float32: one result, however
the backend would have folded it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.groups import Group
from core.parallel.imagined import fill_exchanged, fill_gathered, fill_reduced

Rows = tuple[int, ...]

# Gathers equal parts into one tensor. Torch 2.13 renamed it, and warns of the old name that earlier ones know alone.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Packing(Protocol):
    """Rows in fewer bytes while they travel. Gradients travel as they are, and pass what packing rounds off as if it were nothing."""

    def pack(self, x_RH: Tensor) -> Tensor:
        """[R, H] as bytes: [R, …] uint8."""
        ...

    def unpack(self, bytes_RB: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """The rows again, rounded: [R, columns] in `dtype`. Packed once more they are the same."""
        ...


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The equally many rows of every rank, one rank after the other: [rows, …] -> [size * rows, …].

    Backward: the sum over ranks of the gradient of my rows (reduce-scatter).
    """
    if group.alone:
        return x
    return _Gather.apply(x, (x.shape[0],) * group.size, group, None)


def all_gather_rows(x: Tensor, counts: Sequence[int], group: Group, packing: Packing | None = None) -> Tensor:
    """The rows of every rank, one rank after the other: [counts[position], …] -> [sum(counts), …].

    counts: how many rows each rank of the group has, the same on all of them; zeros are fine.
    packing: how they travel; a group of one rounds them too, so that numbers do not depend on its size.
    Backward: the sum over ranks of the gradient of my rows. Raises ValueError if `x` does not have the rows that `counts` says.
    """
    _check_rows(x, counts, group, "counts")
    if x.shape[0] != counts[group.position]:
        raise ValueError(
            f"counts={tuple(counts)} give rank {group.position} {counts[group.position]} rows, not {x.shape[0]}"
        )
    if group.alone:
        return _as_packed(x, packing)
    return _Gather.apply(x, tuple(counts), group, packing)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of my part of the rows: [size * rows, …] -> [rows, …].

    Backward: the gradients of all ranks, one after the other (all-gather). Raises ValueError if the rows do not divide.
    """
    if x.shape[0] % group.size:
        raise ValueError(f"{x.shape[0]} rows do not divide into equal parts for {group.size} ranks")
    if group.alone:
        return x
    return _ReduceScatter.apply(x, (x.shape[0] // group.size,) * group.size, group)


def reduce_scatter_rows(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The sum over ranks of my part of the rows: [sum(counts), …] -> [counts[position], …]; the counterpart of `all_gather_rows`.

    Backward: the gradients of all ranks, one after the other. Raises ValueError if `x` does not have sum(counts) rows.
    """
    _check_rows(x, counts, group, "counts")
    if x.shape[0] != sum(counts):
        raise ValueError(f"counts={tuple(counts)} are {sum(counts)} rows, not {x.shape[0]}")
    if group.alone:
        return x
    return _ReduceScatter.apply(x, tuple(counts), group)


@dataclass(kw_only=True)
class UnderWay:
    """Rows that are being sent: what is computed before `finish` is computed meanwhile, and so is its backward in the backward."""

    rows: Tensor
    journey: _Journey | None

    def finish(self) -> Tensor:
        """The rows; called once."""
        return self.rows if self.journey is None else _Arrive.apply(self.rows, self.journey)


def all_to_all(
    x: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int], group: Group, packing: Packing | None = None
) -> Tensor:
    """The rows that every rank has for me, in the order of the ranks: [sum(send_rows), …] -> [sum(receive_rows), …].

    send_rows: how many rows go to each rank of the group; receive_rows: how many come from each; zeros are fine. packing: as of
    `all_gather_rows`.
    Backward: the same rows travel back. Raises ValueError if `x` does not have the rows that are to be sent.
    """
    return start_all_to_all(x, send_rows, receive_rows, group, packing).finish()


def start_all_to_all(
    x: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int], group: Group, packing: Packing | None = None
) -> UnderWay:
    """`all_to_all`, begun. All ranks begin and finish their collectives in the same order."""
    _check_rows(x, send_rows, group, "send_rows")
    _check_rows(x, receive_rows, group, "receive_rows")
    if x.shape[0] != sum(send_rows):
        raise ValueError(f"send_rows={tuple(send_rows)} are {sum(send_rows)} rows, not {x.shape[0]}")
    if send_rows[group.position] != receive_rows[group.position]:
        rows = f"{send_rows[group.position]} rows to itself but receives {receive_rows[group.position]}"
        raise ValueError(f"rank {group.position} sends {rows}")
    if group.alone:
        return UnderWay(rows=_as_packed(x, packing), journey=None)
    journey = _Journey(group=group, send_rows=tuple(send_rows), receive_rows=tuple(receive_rows), packing=packing)
    return UnderWay(rows=_Depart.apply(x, journey), journey=journey)


def all_to_all_equal(x: Tensor, group: Group) -> Tensor:
    """The equally many rows that every rank has for me, in the order of the ranks: [size * rows, …] -> the same shape.

    Without gradient (for counts). Raises ValueError if the rows do not divide.
    """
    if x.shape[0] % group.size:
        raise ValueError(f"{x.shape[0]} rows do not divide into equal parts for {group.size} ranks")
    if group.alone:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    group.count("all_to_all", x.nbytes // group.size * (group.size - 1))
    if group.imagined:
        rows = (x.shape[0] // group.size,) * group.size
        fill_exchanged(out, x, rows, rows, group.position)
        return out
    group.wait(dist.all_to_all_single(out, x.detach().contiguous(), group=group.handle, async_op=True))
    return out


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """A new tensor with the sum of `x` over the ranks, the same on each; without gradient (for counts and norms)."""
    return _all_reduce(x, group, dist.ReduceOp.SUM)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """A new tensor with the largest of each element of `x` over the ranks, the same on each; without gradient."""
    return _all_reduce(x, group, dist.ReduceOp.MAX)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, counts: Rows, group: Group, packing: Packing | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        if packing is None:
            return _gather(x, counts, group)
        return packing.unpack(_gather(packing.pack(x), counts, group), x.shape[1], x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _sum_parts(gradient, ctx.counts, ctx.group), None, None, None


class _Packed(torch.autograd.Function):
    """What rows are after a journey, of those that have none."""

    @staticmethod
    def forward(ctx, x: Tensor, packing: Packing) -> Tensor:
        return packing.unpack(packing.pack(x), x.shape[1], x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def _as_packed(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else _Packed.apply(x, packing)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, counts: Rows, group: Group) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _sum_parts(x, counts, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _gather(gradient, ctx.counts, ctx.group), None, None


@dataclass(kw_only=True)
class _Journey:
    """An all-to-all and its way back: one of the two is under way at a time. sent: belongs to the collective until it has ended.

    packing: of the way out; gradients come back as they are."""

    group: Group
    send_rows: Rows
    receive_rows: Rows
    packing: Packing | None = None
    work: dist.Work | None = None
    sent: Tensor | None = None
    out: Tensor | None = None

    def begin(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Send; the tensor that will be filled."""
        rows = (self.receive_rows, self.send_rows) if back else (self.send_rows, self.receive_rows)
        self.sent = x.contiguous()
        self.out, self.work = _begin_exchange(self.sent, *rows, self.group, "all_to_all")
        return self.out

    def end(self) -> Tensor:
        """What was begun last, when it is filled."""
        assert self.out is not None, "a journey ends after it has begun, and once"
        self.group.wait(self.work)
        out, self.out, self.work, self.sent = self.out, None, None, None
        return out


class _Depart(torch.autograd.Function):
    """Begins the journey, and ends the way back of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        if journey.packing is None:
            return journey.begin(x)
        journey.begin(journey.packing.pack(x))
        # Bytes have no gradient: what stands for the rows until they are there is of their shape and dtype, and takes no memory.
        return x.new_zeros(()).expand(sum(journey.receive_rows), x.shape[1])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.journey.end(), None


class _Arrive(torch.autograd.Function):
    """Ends the journey, and begins the way back. Autograd runs nodes made later first: those of what was computed meanwhile come
    between the two in the backward too."""

    @staticmethod
    def forward(ctx, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        arrived = journey.end()
        if journey.packing is not None:
            return journey.packing.unpack(arrived, rows.shape[1], rows.dtype)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.journey.begin(gradient, back=True)
        # Autograd wants something of this shape; what arrives has that of the rows that were sent, and the journey carries it.
        return gradient, None


def _all_reduce(x: Tensor, group: Group, operation: dist.ReduceOp.RedOpType) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if group.alone:
        return total
    group.count("all_reduce", 2 * (group.size - 1) * total.nbytes // group.size)
    if group.imagined:
        fill_reduced(total, group.size, largest=operation == dist.ReduceOp.MAX)
        return total
    group.wait(dist.all_reduce(total, op=operation, group=group.handle, async_op=True))
    return total


def _gather(x: Tensor, counts: Rows, group: Group) -> Tensor:
    """Every rank's rows, in the order of the ranks."""
    if (
        len(set(counts)) > 1
    ):  # as an all-to-all of copies: no backend gathers uneven rows without padding or a broadcast each
        return _exchange(x.repeat(group.size, *[1] * (x.dim() - 1)), _mine(counts, group), counts, group, "all_gather")
    group.count("all_gather", (group.size - 1) * x.nbytes)
    out = x.new_empty((sum(counts), *x.shape[1:]))
    if group.imagined:
        fill_gathered(out, x)
    elif out.numel():  # empty here means empty on every rank
        group.wait(gather_into(out, x.contiguous(), group=group.handle, async_op=True))
    return out


def _sum_parts(x: Tensor, counts: Rows, group: Group) -> Tensor:
    """The sum over ranks of the part of `x` that belongs to me, in the order of the ranks.

    As an all-to-all and a local sum: a reduce-scatter sends as much, but its order of summation is the backend's affair, it
    rounds 16-bit floats after each addition, and gloo has none for uneven parts.
    """
    mine = _mine(counts, group)
    parts = _exchange(x, counts, mine, group, "reduce_scatter").view(group.size, mine[0], *x.shape[1:])
    return sum_in_order(parts).to(x.dtype)


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, one after the other: a new tensor, in float32 for 16-bit floats."""
    total = parts[0].to(torch.float32) if parts.dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _exchange(x: Tensor, send_rows: Rows, receive_rows: Rows, group: Group, name: str) -> Tensor:
    """The rows that every rank has for me."""
    sent = x.contiguous()
    out, work = _begin_exchange(sent, send_rows, receive_rows, group, name)
    group.wait(work)
    return out


def _begin_exchange(
    x: Tensor, send_rows: Rows, receive_rows: Rows, group: Group, name: str
) -> tuple[Tensor, dist.Work | None]:
    """The one call that rows of unequal number travel through: what will be filled, and what to wait for. `x` stays as it is until then."""
    out = x.new_empty((sum(receive_rows), *x.shape[1:]))
    row_bytes = x[:1].nbytes if x.shape[0] else 0
    group.count(name, row_bytes * (sum(send_rows) - send_rows[group.position]))
    if group.imagined:
        fill_exchanged(out, x, send_rows, receive_rows, group.position)
        return out, None
    rows = list(receive_rows), list(send_rows)
    return out, dist.all_to_all_single(out, x, *rows, group=group.handle, async_op=True)


def _mine(counts: Rows, group: Group) -> Rows:
    """My own number of rows, once for every rank."""
    return (counts[group.position],) * group.size


def _check_rows(x: Tensor, rows: Sequence[int], group: Group, name: str) -> None:
    if len(rows) != group.size or min(rows) < 0:
        raise ValueError(f"{name}={tuple(rows)} must be {group.size} counts, one per rank of the group")
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows")
