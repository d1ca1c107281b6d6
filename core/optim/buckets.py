"""Trained parameters and their main gradients as few flat buffers, each spread over the ranks that hold copies of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.optim.formats import Formats
from core.optim.kept import share_on_host
from core.optim.masters import HostMaster, Master, Remainder
from core.parallel.groups import Group, Groups
from core.parallel.pending import Pending, own_part, start_all_gather
from core.state.inventory import Entry, replicas

# Large enough that latency does not matter, small enough that the first is full early in a backward.
BUCKET_BYTES = 32 << 20
# Every parameter and every rank's part begin on this boundary. Grouped products refuse operands off 16 bytes; and in whole
# vectors the update rounds each element alike wherever it lies, which the scalar loop at a ragged end does not.
ALIGNMENT_BYTES = 64


@dataclass(eq=False, kw_only=True)
class Slot:
    """One parameter in a bucket, at the elements [start, stop) of its buffers.

    gradient: that piece of the main gradients, in the parameter's shape. filled: whether it holds a gradient of this step.
    passes_left: how many more backward passes of this step will reach the parameter, where that was told.
    """

    name: str
    entry: Entry
    start: int
    gradient: Tensor
    filled: bool = False
    passes_left: int = 0

    @property
    def parameter(self) -> Tensor:
        """The parameter of the model."""
        return self.entry.tensor

    @property
    def stop(self) -> int:
        """The end of the slot."""
        return self.start + self.entry.tensor.numel()


@dataclass(eq=False, kw_only=True)
class Bucket:
    """Neighbouring parameters of one kind, whose `.data` are views of the flat `parameters`.

    parameters, gradients: [group.size * n], gaps and end zero. master: [n], what the update works on of my part: that part of
    `parameters` itself if it is precise enough, else a float32 copy, or what `formats` makes of it. waiting: how many parameters will be
    reached by further passes.
    """

    slots: tuple[Slot, ...]
    group: Group
    decay: bool
    parameters: Tensor
    gradients: Tensor
    formats: Formats = Formats()
    master: Master = field(init=False)
    waiting: int = 0

    def __post_init__(self) -> None:
        self.master = master_of(own_part(self.parameters, self.group), self.formats)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.parameters.dtype

    @property
    def own_gradients(self) -> Tensor:
        """My part of the gradients [n]: after the sum over copies, what the update takes."""
        return own_part(self.gradients, self.group)

    @property
    def own_start(self) -> int:
        """Where my part begins in the buffers."""
        return self.group.position * (self.parameters.numel() // self.group.size)

    def publish(self) -> None:
        """Round the master into my part of the parameters, where it is a copy; another than a tensor has done so in the update."""
        if isinstance(self.master, Tensor) and self.master.dtype != self.parameters.dtype:
            own_part(self.parameters, self.group).copy_(self.master)

    def start_gather(self) -> Pending:
        """Start to fetch the parameters that other ranks have rounded."""
        return start_all_gather(self.parameters, self.group)


@torch.no_grad()
def pack(
    entries: Mapping[str, Entry], groups: Groups, bucket_bytes: int, formats: Formats | None = None
) -> tuple[Bucket, ...]:
    """The trained parameters `entries` (in module order) in buckets, in the order in which backward completes them.

    A bucket holds parameters of equal dtype, decay and group of copies, in module order, of up to `bucket_bytes` bytes of
    masters; a larger parameter is alone. The parameters move into the buckets, values and identity kept. Groups of equal ranks
    but different axes stay apart, so that the bytes of each axis are counted as its own. formats: of masters and main
    gradients; ranks' parts are whole blocks of what has scales.

    The order is that of the buckets' first parameters in the module, backwards. Ranks that share a group have the same
    parameters for it in the same order, so they come to the same buckets in the same order, whatever else each of them has.
    """

    chunks = in_chunks(entries, lambda entry: kind_of(entry, groups), bucket_bytes)
    return tuple(bucket_of(members, groups, formats or Formats()) for members in chunks)


def kind_of(entry: Entry, groups: Groups) -> Hashable:
    """What parameters of one bucket have in common."""
    group = replicas(entry.spec, groups)
    return group.axis, group.ranks, entry.spec.decay, entry.tensor.dtype


def in_chunks(
    entries: Mapping[str, Entry], kind: Callable[[Entry], Hashable], most_bytes: int
) -> list[list[tuple[str, Entry]]]:
    """Entries of one kind together, in chunks of up to `most_bytes` of masters; the chunks as backward completes them."""
    classes: dict[Hashable, list[tuple[int, str, Entry]]] = {}
    for index, (name, entry) in enumerate(entries.items()):
        classes.setdefault(kind(entry), []).append((index, name, entry))
    chunks = [chunk for members in classes.values() for chunk in _chunks_of(members, most_bytes)]
    chunks.sort(key=lambda chunk: chunk[0][0], reverse=True)
    return [[(name, entry) for _, name, entry in chunk] for chunk in chunks]


def bucket_of(members: Sequence[tuple[str, Entry]], groups: Groups, formats: Formats) -> Bucket:
    """The buffers of some parameters, which move into them."""
    first = members[0][1]
    group, like = replicas(first.spec, groups), first.tensor
    starts, size = lay_out(members, like.dtype, group.size, formats.block)
    parameters = torch.zeros(size, dtype=like.dtype, device=like.device)
    gradients = torch.zeros(size, dtype=formats.gradients or main_dtype(like.dtype), device=like.device)
    slots = []
    for (name, entry), start in zip(members, starts, strict=True):
        tensor = entry.tensor
        view = parameters[start : start + tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        tensor.data = view
        gradient = gradients[start : start + tensor.numel()].view(tensor.shape)
        slots.append(Slot(name=name, entry=entry, start=start, gradient=gradient))
    return Bucket(
        slots=tuple(slots),
        group=group,
        decay=first.spec.decay,
        parameters=parameters,
        gradients=gradients,
        formats=formats,
    )


def lay_out(
    members: Sequence[tuple[str, Entry]], dtype: torch.dtype, ranks: int, block: int = 1
) -> tuple[list[int], int]:
    """Where each tensor begins in a flat buffer of `dtype`, aligned, and how long that is to part evenly over `ranks`, aligned.

    block: a number of elements, which no part cuts.
    """
    unit = math.lcm(ALIGNMENT_BYTES // dtype.itemsize, block)
    starts, filled = [], 0
    for _, entry in members:
        starts.append(filled)
        filled += _rounded_up(entry.tensor.numel(), unit)
    return starts, _rounded_up(filled, unit * ranks)


def master_of(parameters: Tensor, formats: Formats) -> Master:
    """What an update works on instead of these flat parameters: themselves if they are precise enough, else float32 in some form."""
    if parameters.dtype == main_dtype(parameters.dtype):
        return parameters
    on_host = share_on_host(parameters.numel(), formats.on_host)
    if formats.masters == "remainder":
        return Remainder(parameters, on_host)
    return HostMaster(parameters, on_host) if formats.on_host else parameters.to(main_dtype(parameters.dtype))


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which format parameters are updated and, unless fewer bits are asked for, gradients summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks_of(members: Sequence[tuple[int, str, Entry]], most_bytes: int) -> Iterator[list[tuple[int, str, Entry]]]:
    """Neighbours together, filled from the end, since backward begins there; each chunk in module order."""
    chunk: list[tuple[int, str, Entry]] = []
    filled = 0
    for member in reversed(members):
        tensor = member[2].tensor
        size = tensor.numel() * main_dtype(tensor.dtype).itemsize
        if chunk and filled + size > most_bytes:
            yield chunk[::-1]
            chunk, filled = [], 0
        chunk.append(member)
        filled += size
    if chunk:
        yield chunk[::-1]


def _rounded_up(count: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `count`."""
    return math.ceil(count / unit) * unit
