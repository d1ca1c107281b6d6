"""Buckets of weights that are held in a recipe's format alone, and rounded to it from float32 masters by all ranks together
(report sections 5.2.2 and 5.3.5)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core.config.recipe import Operand
from core.optim.buckets import Bucket, Slot, bucket_of, in_chunks, kind_of, lay_out, main_dtype, pack
from core.optim.formats import Formats
from core.parallel.collectives import all_reduce_max
from core.parallel.groups import Group, Groups
from core.parallel.pending import Pending, own_part, start_all_gather
from core.precision.formats import Format, Quantised, element_of, is_symmetric
from core.precision.operands import format_of
from core.precision.primary import PrimaryWeight, measured, rounded, scales_of, tensor_amax
from core.precision.quantiser import Quantiser
from core.precision.scales import Scales
from core.state.hollow import empty
from core.state.inventory import Entry, replicas

# Every weight begins on a boundary of 64 bytes of codes, of four bits too.
UNIT = 128


@dataclass(eq=False, kw_only=True)
class PrimaryBucket:
    """Neighbouring weights of one kind that are held in low precision; see `Bucket`.

    The parameters stay what autograd sees, of shape and `dtype`, and have no values. master: [n], my part of them. codes:
    [group.size * n] bytes, or half of them for four bits, of which the weights of `quantisers` are views; None where a weight and its
    transpose have scales of their own. Those are gathered in `dtype`, in a buffer that is gone when both have been rounded: two
    bytes a number would be sent otherwise too (report section 5.2.2).
    """

    slots: tuple[Slot, ...]
    group: Group
    decay: bool
    dtype: torch.dtype
    gradients: Tensor
    master: Tensor
    quantisers: Mapping[str, Quantiser]
    operand: Operand
    waiting: int = 0
    codes: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        size = self.gradients.numel() * element_of(self.format).bits // 8
        symmetric = is_symmetric(self.format)
        self.codes = torch.zeros(size, dtype=torch.uint8, device=self.master.device) if symmetric else None

    @property
    def format(self) -> Format:
        """Of all its weights."""
        return format_of(self.operand)

    @property
    def own_gradients(self) -> Tensor:
        """See Bucket."""
        return own_part(self.gradients, self.group)

    @property
    def own_start(self) -> int:
        """See Bucket."""
        return self.group.position * self.master.numel()

    def publish(self) -> None:
        """Round my part of the masters to codes, under scales of all of them: one all-reduce of the largest sizes over the copies, and
        one over the ranks that hold other parts of a matrix with one scale. Every rank of the group calls this at the same place."""
        if self.codes is None:
            if self.group.size == 1:
                self._round_both(self.master.to(self.dtype))
            return
        grids = self._largest()
        amaxes = self._over_cuts([tensor_amax(grid, self.format) for grid in grids])
        for slot, grid, amax in zip(self.slots, grids, amaxes, strict=True):
            quantiser = self.quantisers[slot.name]
            scales = scales_of(grid, amax, _expected(quantiser, self.operand, amax), self.format)
            start, stop = self._mine(slot)
            if start < stop:
                part = self.master[start - self.own_start : stop - self.own_start]
                made = rounded(part, start - slot.start, scales, self.format, shape_of(slot))
                self._bytes(start, stop).copy_(made)
            quantiser.primary = PrimaryWeight(rows=self._weight(slot, scales), amax=amax)

    def start_gather(self) -> Pending:
        """Start to fetch what other ranks have rounded; the weights may not be read until that has been waited for."""
        if self.codes is not None:
            return start_all_gather(self.codes, self.group)
        whole = torch.empty(self.gradients.numel(), dtype=self.dtype, device=self.master.device)
        own_part(whole, self.group).copy_(self.master)
        gathered = start_all_gather(whole, self.group)

        def finish() -> Tensor:
            self._round_both(gathered.finish())
            return self.master

        return Pending(work=gathered.work, finish=finish)

    def values(self) -> Tensor:
        """My part of the weights in `dtype`, as a checkpoint has them: [n], the masters themselves where those are no more precise."""
        return self.master.to(self.dtype)

    @property
    def num_bytes(self) -> int:
        """What is held of the weights between steps, masters aside."""
        weights = [quantiser.primary for quantiser in self.quantisers.values()]
        return sum(weight.num_bytes for weight in weights if weight is not None)

    @torch.no_grad()
    def _round_both(self, whole: Tensor) -> None:
        """Weights and their transposes, each under scales of its own."""
        for slot in self.slots:
            quantiser = self.quantisers[slot.name]
            weight = whole[slot.start : slot.stop].view(shape_of(slot))
            alone = replace(quantiser, primary=None, watch=None)
            quantiser.primary = PrimaryWeight(
                rows=alone.weight(weight, self.operand, transposed=False),
                columns=alone.weight(weight, self.operand, transposed=True),
            )

    def _largest(self) -> list[Tensor]:
        """The largest size in each block of every weight, over all ranks."""
        grids = []
        for slot in self.slots:
            start, stop = self._mine(slot)
            part = self.master[start - self.own_start : max(start, stop) - self.own_start]
            grids.append(measured(part, start - slot.start, self.format, shape_of(slot)))
        flat = all_reduce_max(torch.cat([grid.flatten() for grid in grids]), self.group)
        sizes = [grid.numel() for grid in grids]
        return [found.view(grid.shape) for found, grid in zip(flat.split(sizes), grids, strict=True)]

    def _over_cuts(self, amaxes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The largest of the whole matrices, of which tp or etp may have cut a part for this rank."""
        found = [amax for amax in amaxes if amax is not None]
        reach = self.quantisers[self.slots[0].name].reach
        if not found or reach is None:
            return list(amaxes)
        flat = all_reduce_max(torch.cat([amax.flatten() for amax in found]), reach.cut)
        parts = flat.split([amax.numel() for amax in found])
        return [part.view(amax.shape) for part, amax in zip(parts, found, strict=True)]

    def _mine(self, slot: Slot) -> tuple[int, int]:
        """Which elements of the buffers are both mine and the slot's; an end below the beginning: none."""
        low, high = self.own_start, self.own_start + self.master.numel()
        return min(max(low, slot.start), high), min(high, slot.stop)

    def _bytes(self, start: int, stop: int) -> Tensor:
        assert self.codes is not None
        bits = element_of(self.format).bits
        return self.codes[start * bits // 8 : stop * bits // 8]

    def _weight(self, slot: Slot, scales: Scales) -> Quantised:
        """A weight as it lies in the codes, or will."""
        shape, element = shape_of(slot), element_of(self.format)
        return Quantised(
            data=self._bytes(slot.start, slot.stop).view(element.dtype).view(*shape[:-1], -1),
            scales=scales.stored,
            tensor_scale=scales.tensor_scale,
            format=self.format,
            shape=shape,
        )


def shape_of(slot: Slot) -> tuple[int, ...]:
    """The weight of a slot as its products read it: [N, K], of experts [e, N, K]; halves lie one below the other."""
    *front, columns = slot.parameter.shape
    routed = slot.entry.spec.replicas == "expert"
    return (front[0], math.prod(front[1:]), columns) if routed else (math.prod(front), columns)


@torch.no_grad()
def pack_with_primary(
    entries: Mapping[str, Entry],
    groups: Groups,
    bucket_bytes: int,
    formats: Formats,
    quantisers: Mapping[str, Quantiser],
) -> tuple[Bucket | PrimaryBucket, ...]:
    """As `core.optim.buckets.pack`, with the weights of `quantisers` in buckets of their own, and in low precision from now on.

    Collective where there are any: every rank rounds its part of them, and fetches the others'.
    """
    if not quantisers:
        return pack(entries, groups, bucket_bytes, formats)
    low = {id(entries[name]) for name in quantisers}

    def kind(entry: Entry) -> Hashable:
        return kind_of(entry, groups), id(entry) in low

    chunks = in_chunks(entries, kind, bucket_bytes)
    buckets = tuple(
        _bucket(members, groups, formats, quantisers)
        if members[0][0] in quantisers
        else bucket_of(members, groups, formats)
        for members in chunks
    )
    for bucket in primary_of(buckets):
        bucket.publish()
        bucket.start_gather().wait()
    return buckets


def primary_of(buckets: Sequence[Bucket | PrimaryBucket]) -> Iterator[PrimaryBucket]:
    """Those of weights in low precision."""
    return (bucket for bucket in buckets if isinstance(bucket, PrimaryBucket))


def _bucket(
    members: Sequence[tuple[str, Entry]], groups: Groups, formats: Formats, quantisers: Mapping[str, Quantiser]
) -> PrimaryBucket:
    """Masters of some weights, which lose their values."""
    first = members[0][1]
    group, dtype, device = replicas(first.spec, groups), first.tensor.dtype, first.tensor.device
    wide = main_dtype(dtype)
    starts, size = lay_out(members, dtype, group.size, math.lcm(formats.block, UNIT))
    gradients = torch.zeros(size, dtype=formats.gradients or wide, device=device)
    master = torch.zeros(size // group.size, dtype=wide, device=device)
    low = group.position * master.numel()
    slots = []
    for (name, entry), start in zip(members, starts, strict=True):
        numel, shape = entry.tensor.numel(), entry.tensor.shape
        begin, end = max(low, start), min(low + master.numel(), start + numel)
        if begin < end:
            master[begin - low : end - low] = entry.tensor.flatten()[begin - start : end - start]
        entry.tensor.data = empty(entry.tensor)
        slots.append(Slot(name=name, entry=entry, start=start, gradient=gradients[start : start + numel].view(shape)))
    chosen = {slot.name: quantisers[slot.name] for slot in slots}
    operand = chosen[slots[0].name].recipe.held
    assert operand is not None, "weights whose recipe rounds them once for both products"
    return PrimaryBucket(
        slots=tuple(slots),
        group=group,
        decay=first.spec.decay,
        dtype=dtype,
        gradients=gradients,
        master=master,
        quantisers=chosen,
        operand=operand,
    )


def _expected(quantiser: Quantiser, operand: Operand, amax: Tensor | None) -> Tensor | None:
    """What delayed scaling takes for the largest size; it is remembered when a forward reads the weight."""
    if operand.scaling != "delayed" or amax is None:
        return None
    assert quantiser.history is not None, f"{quantiser.name}: delayed scaling remembers"
    return quantiser.history.amax("weight", amax, quantiser.recipe.margin, note=False)
