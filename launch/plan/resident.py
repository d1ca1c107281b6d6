"""What a rank holds from step to step: parameters, summed gradients, and the optimizer's states, laid out as core/optim lays them out.

Pieces come from the real modules' own declarations; the arithmetic of buckets is that of core/optim/buckets.py. Dense pieces are
spread over the copies that tp, cp and dp make, experts over edp (ZeRO-1), or over the ranks of their shards (FSDP).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from core.config.precision import BYTES, SCALED_MOMENTS, PrecisionConfig
from core.optim.buckets import BUCKET_BYTES, in_chunks, lay_out, main_dtype
from core.optim.formats import formats_of
from core.optim.fsdp import MOST_PADDING
from core.optim.kept import BLOCK, share_on_host
from core.parallel.groups import Group, Groups
from core.pipeline.layout import Part
from core.state.inventory import Entry, replicas
from launch.plan.kinds import Kinds
from launch.plan.primary import primary_bytes, told
from launch.plan.weights import primary_operand

Named = tuple[str, Entry]


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes held from step to step, and what keeping copies equal costs.

    travelling: of the largest bucket, whose sum over copies is under way beside the gradients. gathered: with FSDP, of the two largest
    neighbouring units, whose parameters are whole at once, and of the larger one's gradient. sent: what a step sends for copies of
    parameters, by axis: gradients there, parameters back. sent_by_units: what FSDP sends for each microbatch. on_host: how much of
    `optimizer` waits in host memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    travelling: int
    gathered: int
    sent: Mapping[str, int]
    sent_by_units: Mapping[str, int]
    on_host: int = 0


def held_names(parts: Sequence[Part], entries: Mapping[str, Entry], kinds: Kinds, tied: bool) -> list[Named]:
    """The tensors of a stage in module order, by name, each with the entry of the one that it is like.

    entries: of a model with one layer of each kind and the last one once more (launch/plan/trace.py).
    """
    by_owner: dict[str, list[Named]] = {}
    for name, entry in entries.items():
        owner, rest = _owner(name)
        by_owner.setdefault(owner, []).append((rest, entry))
    found: list[Named] = []
    layers = [i for part in parts for i in part.layers]
    ahead = [d for part in parts for d in part.ahead]
    if any(part.embedding or part.ahead or (part.loss and tied) for part in parts):
        found += [(f"embedding.{rest}", entry) for rest, entry in by_owner["embedding"]]
    for i in layers:
        found += [(f"layers.{i}.{rest}", entry) for rest, entry in by_owner[f"layers.{kinds.of[i]}"]]
    if layers and layers[-1] == len(kinds.of) - 1:
        found += [(f"final_norm.{rest}", entry) for rest, entry in by_owner["final_norm"]]
    for d in ahead:
        found += [(f"mtp.{d}.{rest}", entry) for rest, entry in by_owner[f"mtp.{d}"]]
    if not tied and any(part.loss for part in parts):
        found += [(f"head.{rest}", entry) for rest, entry in by_owner["head"]]
    return found


def _owner(name: str) -> tuple[str, str]:
    """The part of a model that a tensor belongs to, and its name there."""
    words = name.split(".")
    depth = 2 if words[0] in ("layers", "mtp") else 1
    return ".".join(words[:depth]), ".".join(words[depth:])


def zero1(
    named: Sequence[Named],
    groups: Groups,
    dtype: torch.dtype,
    precision: PrecisionConfig,
    taken: Collection[str] = (),
    away: float = 0.0,
) -> Resident:
    """As `core.optim.buckets.pack`, `core.optim.primary.pack_with_primary` and `core.optim.adam.AdamW` allocate it.

    taken: the names of weights that the recipe takes. away: the share of states that waits in host memory.
    """
    trained, buffers = _split(named)
    operand = primary_operand(precision)
    low = {id(entry) for name, entry in trained.items() if operand is not None and name in taken}

    def kind(entry: Entry) -> Hashable:
        group = replicas(entry.spec, groups)
        return (group.axis, group.ranks, entry.spec.decay, entry.tensor.dtype), id(entry) in low

    main, parameters, gradients, optimizer, travelling, on_host = main_dtype(dtype), buffers, 0, 0, 0, 0
    sent: dict[str, int] = {}
    for members in in_chunks(trained, kind, BUCKET_BYTES):
        first = members[0][1]
        group = replicas(first.spec, groups)
        unit, cut = formats_of(precision).block, dict[str, int]()
        if operand is not None and id(first) in low:
            found = primary_bytes(members, operand, dtype, group.size, unit)
            size, held, gathered = found.size, found.held, found.gathered
            measuring, cut = told(found, first, groups, group.size)
            own = main.itemsize
        else:
            _, size = lay_out(members, dtype, group.size, unit)
            held = gathered = size * dtype.itemsize
            own, measuring = BYTES[precision.masters] if dtype != main else 0, 0
        share = size // group.size
        parameters += held
        gradients += size * _gradient_bytes(main, precision)
        optimizer += _state_bytes(share, own, main, precision) + 4
        on_host += _state_bytes(share_on_host(share, away), own, main, precision)
        if group.size > 1:
            travelling = max(travelling, size * _gradient_bytes(main, precision))
            summed = (group.size - 1) * share * _gradient_bytes(main, precision)
            back = (group.size - 1) * gathered // group.size
            sent[group.axis] = sent.get(group.axis, 0) + summed + back + measuring
        for axis, count in cut.items():
            sent[axis] = sent.get(axis, 0) + count
    return Resident(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        travelling=travelling,
        gathered=0,
        sent=sent,
        sent_by_units={},
        on_host=on_host,
    )


def fsdp(
    named: Sequence[Named],
    groups: Groups,
    dtype: torch.dtype,
    precision: PrecisionConfig,
    gathers: Mapping[str, int],
    away: float = 0.0,
) -> Resident:
    """As `core.optim.fsdp.shard` and `core.optim.shards.FullyShardedOptimizer` allocate it: shards in float32, which are the masters.

    gathers: how often a microbatch gathers the embedding and the head; all else is gathered forward and backward, once each. away: the
    share of states that waits in host memory.
    """
    assert groups.shards is not None, "these groups are not for sharding=fsdp"
    trained, buffers = _split(named)
    main, parameters = main_dtype(dtype), buffers
    shards: dict[str, int] = {}
    units: dict[str, list[int]] = {}
    by_unit: dict[str, int] = {}
    for name, entry in trained.items():
        group = _shard_group(name, entry, groups)
        shards[name], padded = _shard(entry, group)
        sharded = group.size > 1
        parameters += padded * main.itemsize if sharded else shards[name] * dtype.itemsize
        if sharded:
            units.setdefault(_unit(name), []).append(padded * group.size)
            times = gathers.get(_unit(name), 2)
            once = (group.size - 1) * padded * (times * dtype.itemsize + _gradient_bytes(main, precision))
            by_unit[group.axis] = by_unit.get(group.axis, 0) + once
    gradients, sent = _copies_of_shards(trained, shards, groups, main, precision)
    optimizer = on_host = 0
    for name, entry in trained.items():
        if shards[name]:
            own = main.itemsize if dtype != main and _shard_group(name, entry, groups).size == 1 else 0
            optimizer += _state_bytes(shards[name], own, main, precision) + 4
            on_host += _state_bytes(share_on_host(shards[name], away), own, main, precision)
    whole = [sum(sizes) for sizes in units.values()]
    two = max((sum(whole[i : i + 2]) for i in range(len(whole))), default=0)
    return Resident(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        travelling=0,
        gathered=two * dtype.itemsize + max(whole, default=0) * _gradient_bytes(main, precision),
        sent=sent,
        sent_by_units=by_unit,
        on_host=on_host,
    )


def _copies_of_shards(
    trained: Mapping[str, Entry],
    shards: Mapping[str, int],
    groups: Groups,
    main: torch.dtype,
    precision: PrecisionConfig,
) -> tuple[int, dict[str, int]]:
    """Bytes of the main gradients, and what a step sends to sum copies of shards, there and back."""

    def kind(entry: Entry) -> Hashable:
        return _copies(entry, groups).ranks, main

    sized = {name: _sized(entry, shards[name]) for name, entry in trained.items()}
    gradients, sent = 0, dict[str, int]()
    for members in in_chunks(sized, kind, BUCKET_BYTES):
        group = _copies(members[0][1], groups)
        _, size = lay_out(members, formats_of(precision).gradients or main, group.size)
        gradients += size * _gradient_bytes(main, precision)
        if group.size > 1:
            both = 2 * (group.size - 1) * (size // group.size) * _gradient_bytes(main, precision)
            sent[group.axis] = sent.get(group.axis, 0) + both
    return gradients, sent


def _sized(entry: Entry, elements: int) -> Entry:
    """An entry whose tensor has so many elements, and no data."""
    return Entry(spec=entry.spec, tensor=torch.empty(elements, device="meta"))


def _copies(entry: Entry, groups: Groups) -> Group:
    """As `core.state.inventory.copies` of a shard."""
    assert groups.shards is not None
    match entry.spec.replicas:
        case "expert":
            return groups.shards.expert_copies if groups.shards.expert.size > 1 else replicas(entry.spec, groups)
        case "embedding":
            return groups.shards.embedding_copies if groups.shards.dense.size > 1 else replicas(entry.spec, groups)
        case "dense":
            shared = groups.shards.dense.size > 1
            return groups.shards.copies[entry.spec.adjacent] if shared else replicas(entry.spec, groups)


def _shard_group(name: str, entry: Entry, groups: Groups) -> Group:
    assert groups.shards is not None
    return groups.shards.expert if entry.spec.replicas == "expert" else groups.shards.dense


def _shard(entry: Entry, group: Group) -> tuple[int, int]:
    """The elements of my shard, and those of the largest, to which torch pads all."""
    shape = tuple(entry.tensor.shape)
    if group.size == 1 or not shape:
        return entry.tensor.numel(), entry.tensor.numel()
    even = -(-shape[0] // group.size) * group.size <= MOST_PADDING * shape[0]
    cut = 0 if even else next((d for d, n in enumerate(shape) if n % group.size == 0), 0)
    others = entry.tensor.numel() // max(1, shape[cut])
    largest = -(-shape[cut] // group.size)
    mine = min(largest, max(0, shape[cut] - group.position * largest))
    return mine * others, largest * others


def gathers_of(parts: Sequence[Part], tied: bool, depth: int) -> dict[str, int]:
    """How often one microbatch gathers embedding and head under FSDP: each use is a gather, and one more in its backward, which an
    embedding alone can do without."""
    embeds = sum(part.embedding + len(part.ahead) for part in parts)
    losses = sum(part.loss for part in parts) * (1 + depth)
    if tied:
        return {"embedding": 2 * (embeds + losses)}
    heads = any(part.loss for part in parts)
    return {"embedding": embeds if heads else 2 * embeds, "head": 2 * losses}


def _unit(name: str) -> str:
    """The unit of FSDP that a parameter belongs to."""
    parts = name.split(".")
    if "experts" in parts:
        return ".".join(parts[: parts.index("experts") + 1])
    if parts[0] == "mtp":
        return ".".join(parts[:3] if parts[2] == "layer" else parts[:2])
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _split(named: Sequence[Named]) -> tuple[dict[str, Entry], int]:
    """The trained ones, and the bytes of the others."""
    trained = {name: entry for name, entry in named if entry.spec.trained}
    return trained, sum(entry.tensor.nbytes for _, entry in named if not entry.spec.trained)


def _gradient_bytes(main: torch.dtype, precision: PrecisionConfig) -> int:
    return (formats_of(precision).gradients or main).itemsize


def _state_bytes(elements: int, master: int, main: torch.dtype, precision: PrecisionConfig) -> int:
    """Both moments of so many elements with their scales, and masters of so many bytes."""
    scales = -(-elements // BLOCK) if precision.moments in SCALED_MOMENTS else 0
    return elements * (master + 2 * (formats_of(precision).moments or main).itemsize) + 2 * scales
