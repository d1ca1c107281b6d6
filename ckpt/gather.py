"""Published tensors put together from what all ranks hold, a bucket at a time, on the ranks that are to have them.

Every rank makes the same plan alone, after one exchange of what each holds; then one exchange of data per bucket. What every
receiver holds itself does not travel, and of several holders of a piece one sends it: whoever has been given least to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ckpt.agree import together
from ckpt.float8 import SCALE, quantise, scale_shape
from ckpt.store.safetensors import Stored
from ckpt.translate import Published, Rules, Source, part_of, published_plan
from core.parallel.groups import Group
from core.parallel.point_to_point import Hop, start_hops
from core.state.box import Box
from core.state.inventory import declared
from core.state.rules import Shape
from core.state.sharded import ShardedTensor
from core.transformer.stage import Stage
from core.transformer.weights import weights

# What weights become: all of one dtype; float8 in scaled blocks, with the rest as it would be without; None: as they are.
Format = torch.dtype | Literal["float8_blocks"] | None

Held = Mapping[str, ShardedTensor]
_ALIGN = 16


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the tensors are to be.

    Of the folder that the model came from: stored, its tensors by published name, block scales included; dtypes, what each canonical
    tensor was stored in. Both are empty for a model that came from none.
    """

    format: Format
    stored: Mapping[str, Stored] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def scaled(self) -> Mapping[str, torch.dtype] | None:
        """Published tensors that are to have block scales -> the dtype of these, as in the folder; None: those of the family."""
        if self.format != "float8_blocks":
            return {}
        found = {name: self.stored[tensor.scale].dtype for name, tensor in self.stored.items() if tensor.scale}
        return found or None

    def stored_dtype(self, name: str, canonical: str) -> torch.dtype | None:
        """The dtype in the folder of a tensor; bfloat16 for one that is float8 there."""
        found = self.stored[name].dtype if name in self.stored else self.dtypes.get(canonical)
        return torch.bfloat16 if found is not None and found.itemsize == 1 else found

    def dtype(self, published: Published, own: torch.dtype) -> torch.dtype:
        """The dtype of a trained tensor that is `own` in the model and has no block scales."""
        if isinstance(self.format, torch.dtype):
            return self.format
        stored = self.stored_dtype(published.name, published.sources[0].name)
        if stored is None:
            return torch.bfloat16 if self.format == "float8_blocks" else own
        return stored if stored.itemsize < own.itemsize else own


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a rank says of a piece that it holds. fixed: the only dtype in which it may be written, None for any."""

    name: str
    box: Box
    dtype: torch.dtype
    fixed: torch.dtype | None


@dataclass(frozen=True, kw_only=True)
class Output:
    """A published tensor to be: under which names, of which dtype, and who holds each of its sources.

    travels: the dtype in which it is sent. scales: the dtype of its block scales, None where it has none.
    """

    published: Published
    names: tuple[str, ...]
    dtype: torch.dtype
    travels: torch.dtype
    scales: torch.dtype | None
    holders: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """What it takes in memory before or after it is converted, whichever is more."""
        return self.published.elements * max(self.dtype.itemsize, self.travels.itemsize)

    def forms(self) -> Iterator[tuple[str, torch.dtype, Shape]]:
        """Every tensor that it gives: name, dtype and shape; with block scales two for each name."""
        for name in self.names:
            yield name, self.dtype, self.published.shape
            if self.scales is not None:
                yield name + SCALE, self.scales, scale_shape(self.published.shape)

    def finish(self, data: Tensor, known: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Its tensors, from the assembled one; known: block scales that may be those of the values."""
        if self.scales is None:
            return [(name, data) for name in self.names]
        numbers, scale = quantise(data, known)
        scale = scale.to(self.scales)
        return [pair for name in self.names for pair in ((name, numbers), (name + SCALE, scale))]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Outputs that are assembled together on each of the `receivers`; senders: by output and source, None where nothing travels."""

    receivers: tuple[int, ...]
    outputs: tuple[Output, ...]
    senders: tuple[tuple[int | None, ...], ...]

    @property
    def travels(self) -> bool:
        """Whether a receiver lacks anything."""
        return any(sender is not None for senders in self.senders for sender in senders)

    def sources(self) -> Iterator[tuple[Output, Source, int | None]]:
        """Every source with its output and sender, in the order in which they are sent."""
        for output, senders in zip(self.outputs, self.senders, strict=True):
            for source, sender in zip(output.published.sources, senders, strict=True):
                yield output, source, sender


def plan_outputs(
    model: Stage, rules: Rules, shapes: Mapping[str, Shape], wish: Wish
) -> tuple[tuple[Output, ...], Held]:
    """Every published tensor of the model, in the order of `shapes` (all its canonical tensors), and what this rank holds of them.

    Collective over the model's world; waits for parameters that are on their way. One exchange, of names and boxes.
    """
    world = model.place.groups.world
    model.wait_for("")
    held = weights(model, model.place.groups)
    said = together(world, lambda: _holdings(model, held, wish))
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in shapes}
    about: dict[str, Holding] = {}
    for position, holdings in enumerate(said):
        for holding in holdings:
            holders[holding.name].setdefault(holding.box, []).append(position)
            known = about.setdefault(holding.name, holding)
            if holding.fixed is not None and known.fixed is not None and holding.fixed.itemsize > known.fixed.itemsize:
                about[holding.name] = holding
    plan = published_plan(rules, shapes, {name: tuple(boxes) for name, boxes in holders.items()})
    scaled = wish.scaled()
    outputs = []
    for published in plan:
        of_family = torch.float32 if published.float8 else None
        scales = of_family if scaled is None else scaled.get(published.name)
        outputs.append(_output(published, about[published.sources[0].name], holders, (wish, scales)))
    return tuple(outputs), held


def route(outputs: Sequence[Output], receivers: tuple[int, ...], load: Counter[int]) -> Bucket:
    """A bucket, and who sends what in it; `load`, the bytes that each rank is to send, counts it in."""
    senders = []
    for output in outputs:
        mine: list[int | None] = []
        for source, holders in zip(output.published.sources, output.holders, strict=True):
            lacking = sum(receiver not in holders for receiver in receivers)
            sender = min(holders, key=lambda rank: (load[rank], rank)) if lacking else None
            if sender is not None:
                load[sender] += lacking * source.piece.box.elements * output.travels.itemsize
            mine.append(sender)
        senders.append(tuple(mine))
    return Bucket(receivers=receivers, outputs=tuple(outputs), senders=tuple(senders))


@torch.no_grad()
def collect(buckets: Sequence[Bucket], held: Held, world: Group, device: torch.device) -> list[tuple[Output, Tensor]]:
    """The assembled tensors of the bucket that this rank receives, empty where it receives none.

    Collective over `world`: one exchange for all the buckets, no two of which share a receiver, and none where nobody lacks
    anything. The tensors are the caller's own, on `device`, that of the model.
    """
    mine = next((bucket for bucket in buckets if world.position in bucket.receivers), None)
    arrived = _exchange(buckets, mine, held, (world, device)) if any(bucket.travels for bucket in buckets) else {}
    if mine is None:
        return []
    found, number = [], 0
    for output in mine.outputs:
        sources = range(number, number + len(output.holders))
        found.append((output, _assemble(output, held, [arrived.get(source) for source in sources])))
        number += len(output.holders)
    return found


def _holdings(model: Stage, held: Held, wish: Wish) -> list[Holding]:
    """What this rank says. A tensor that is not trained, such as the expert bias, keeps its dtype, unless the folder that it came
    from had another that holds its values exactly."""
    untrained = {name for name, entry in declared(model).items() if not entry.spec.trained}
    found = []
    for name, piece in held.items():
        own, stored = piece.data.dtype, wish.dtypes.get(name)
        fixed = own if name in untrained else None
        if fixed and stored is not None and 1 < stored.itemsize < own.itemsize:
            fixed = stored if torch.equal(piece.data.to(stored).to(own), piece.data) else own
        found.append(Holding(name=name, box=piece.box, dtype=own, fixed=fixed))
    return found


def _output(
    published: Published,
    holding: Holding,
    holders: Mapping[str, Mapping[Box, list[int]]],
    how: tuple[Wish, torch.dtype | None],
) -> Output:
    wish, scales = how
    dtype = holding.fixed or wish.dtype(published, holding.dtype)
    travels = dtype if dtype.itemsize < holding.dtype.itemsize else holding.dtype
    return Output(
        published=published,
        names=(published.name, *(copy for copy in published.copies if copy in wish.stored)),
        dtype=dtype if scales is None else torch.float8_e4m3fn,
        travels=travels if scales is None else holding.dtype,
        scales=scales,
        holders=tuple(tuple(holders[source.name][source.box]) for source in published.sources),
    )


def _exchange(
    buckets: Sequence[Bucket], mine: Bucket | None, held: Held, where: tuple[Group, torch.device]
) -> dict[int, Tensor]:
    """What came for my bucket: by number of the source, in the published order."""
    world, device = where
    me = world.position
    packed: dict[int, Tensor] = {}
    for bucket in buckets:
        packed |= dict.fromkeys(bucket.receivers, _pack(bucket, held, me, device))
    coming, elements = {}, Counter[int]()
    for number, (output, source, sender) in enumerate(mine.sources() if mine else ()):
        if sender is not None and sender != me:
            coming[number] = (output, source, sender, elements[sender])
            elements[sender] += _padded(output, source)
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    hops = []
    for distance in range(1, world.size):
        to, sender = (me + distance) % world.size, (me - distance) % world.size
        hops.append(Hop(x=packed.get(to, nothing), to=to, elements=elements[sender], source=sender))
    received = start_hops(hops, world).wait()
    found = {}
    for number, (output, source, sender, place) in coming.items():
        size = source.piece.box.elements * output.travels.itemsize
        flat = received[(me - sender) % world.size - 1][place : place + size]
        found[number] = flat.view(output.travels).view(source.piece.box.shape)
    return found


def _pack(bucket: Bucket, held: Held, me: int, device: torch.device) -> Tensor:
    """What this rank sends of a bucket, to each of its receivers alike: [bytes] uint8, every source at a multiple of 16."""
    mine = [(output, source) for output, source, sender in bucket.sources() if sender == me]
    buffer = torch.empty(sum(_padded(output, source) for output, source in mine), dtype=torch.uint8, device=device)
    place = 0
    for output, source in mine:
        size = source.piece.box.elements * output.travels.itemsize
        into = buffer[place : place + size].view(output.travels).view(source.piece.box.shape)
        into.copy_(part_of(source, held[source.name].data))
        place += _padded(output, source)
    return buffer


def _padded(output: Output, source: Source) -> int:
    size = source.piece.box.elements * output.travels.itemsize
    return -(-size // _ALIGN) * _ALIGN


def _assemble(output: Output, held: Held, arrived: Sequence[Tensor | None]) -> Tensor:
    """One tensor of what came and, where nothing did, of what is here; in its dtype, or before it is quantised in the model's."""
    dtype = output.dtype if output.scales is None else output.travels
    first = arrived[0]
    if len(arrived) == 1 and first is not None:
        return first.to(dtype)
    out: Tensor | None = None
    for source, came in zip(output.published.sources, arrived, strict=True):
        part = part_of(source, held[source.name].data) if came is None else came
        if out is None:
            out = torch.empty(output.published.shape, dtype=dtype, device=part.device)
        out[source.piece.box.slices] = part
    assert out is not None
    return out
