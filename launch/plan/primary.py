"""What weights take that are held in a recipe's format alone, and what is sent for them, as core/optim/primary.py lays them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.config.recipe import Operand
from core.optim.buckets import lay_out
from core.optim.primary import UNIT
from core.parallel.groups import Groups
from core.precision.formats import NVFP4, PerTensor, block_of, element_of, is_symmetric
from core.precision.imagined import imagined
from core.precision.operands import format_of
from core.state.inventory import Entry

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class PrimaryBytes:
    """Of one bucket. size: numbers, padding included. held: bytes of the weights. gathered: bytes that all ranks of its group have of
    them once they are fetched. measured: of the largest sizes, summed up over the group; cut: over those that hold parts of a matrix."""

    size: int
    held: int
    gathered: int
    measured: int
    cut: int


def primary_bytes(
    members: Sequence[tuple[str, Entry]], operand: Operand, dtype: torch.dtype, ranks: int, block: int
) -> PrimaryBytes:
    """A bucket of these weights over so many ranks. block: what parts of moments must be whole numbers of."""
    format = format_of(operand)
    _, size = lay_out(list(members), dtype, ranks, math.lcm(block, UNIT))
    bits, square = element_of(format).bits, is_symmetric(format)
    whole = isinstance(format, PerTensor | NVFP4)
    # One number stands for all of every weight's own.
    held, measured, cut = len(members) * dtype.itemsize, 0, 0
    for _, entry in members:
        shape = _shape(entry)
        rows = imagined(shape, format, META)
        if not square:
            held += rows.num_bytes + imagined((*shape[:-2], shape[-1], shape[-2]), format, META).num_bytes
            continue
        amax = 4 * math.prod(shape[:-2]) if whole else 0
        held += rows.num_bytes - rows.data.nbytes + amax
        height, width = block_of(format, shape)
        measured += 4 * math.prod(shape[:-2]) * -(-shape[-2] // height) * -(-shape[-1] // width)
        cut += amax
    codes = size * bits // 8 if square else 0
    return PrimaryBytes(
        size=size,
        held=held + codes,
        gathered=codes if square else size * dtype.itemsize,
        measured=measured,
        cut=cut,
    )


def told(found: PrimaryBytes, entry: Entry, groups: Groups, ranks: int) -> tuple[int, dict[str, int]]:
    """Bytes that a rank sends in a step to measure the weights of a bucket: over its group, and by axis over other parts of a matrix."""
    over = groups.etp if entry.spec.replicas == "expert" else groups.tp
    cut = {over.axis: _all_reduced(found.cut, over.size)} if over.size > 1 and found.cut else {}
    return _all_reduced(found.measured, ranks), cut


def _shape(entry: Entry) -> tuple[int, ...]:
    """As its products read it: [N, K], of experts [e, N, K]; halves lie one below the other."""
    *front, columns = entry.tensor.shape
    if entry.spec.replicas == "expert":
        return front[0], math.prod(front[1:]), columns
    return math.prod(front), columns


def _all_reduced(num_bytes: int, ranks: int) -> int:
    return 2 * (ranks - 1) * num_bytes // ranks
