"""Process groups made from a mesh, handed to whoever needs them; a group of one rank needs no process group at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from core.config.mapping import ParallelConfig
from core.parallel.baton import Baton
from core.parallel.mesh import Division, Mesh, fold
from core.parallel.meter import Meter

# A group does not inherit the timeout of the world: left alone, torch lets a collective that nobody answers wait half an hour.
TIMEOUT = timedelta(minutes=5)
# Ranks wait here for the one that writes most. Those that died are noticed at once, whatever the timeout.
CHECKPOINT_TIMEOUT = timedelta(hours=1)


# What travels along pp ("activation" or "gradient"), and whether to a later rank.
Pipe = tuple[str, bool]
PIPES: tuple[Pipe, ...] = tuple((kind, up) for kind in ("activation", "gradient") for up in (True, False))


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that communicate over one axis, and my position among them. `handle` is None in a group of one.

    axis: under which name `meter` counts what is sent. baton: who runs while a collective is under way. imagined: no peer is
    there, and collectives give what a plan needs of them (core/parallel/imagined.py); `handle` is None then too.
    """

    ranks: tuple[int, ...]
    position: int
    handle: dist.ProcessGroup | None
    axis: str = ""
    meter: Meter | None = field(default=None, compare=False)
    baton: Baton | None = field(default=None, compare=False)
    imagined: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        """Whether a collective has nobody to send to: in a group of one, and in one that only says who would be in it."""
        return self.handle is None and not self.imagined

    def count(self, collective: str, sent_bytes: int) -> None:
        """Tell the meter, if there is one, what leaves this rank."""
        if self.meter is not None:
            self.meter.add(self.axis, collective, sent_bytes)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective that was started; whoever shares the baton runs meanwhile."""
        if self.baton is not None:
            self.baton.give_way()
        if work is not None:
            work.wait()


@dataclass(frozen=True, kw_only=True)
class ShardGroups:
    """One rank's groups under FSDP, where the ranks that would hold copies of a piece hold shards of it.

    dense: cp * dp, over whose ranks a dense piece is cut into shards; expert: edp. Hybrid sharding takes the inner part of dp
    and of edp, and the outer part holds copies of the shards. copies: by every divisor n of tp, who holds the same shard of a
    dense piece that n neighbours along tp hold: those neighbours, times dp's outer part. expert_copies: edp's outer part.
    embedding_copies: dp's outer part times the pipeline ranks that hold the embedding; this rank alone where it holds none.
    """

    dense: Group
    expert: Group
    expert_copies: Group
    embedding_copies: Group
    copies: Mapping[int, Group]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """One rank's groups of both foldings.

    heads, ring: the two foldings of cp, neighbours that exchange heads for sequence and the ring of those.
    sequence: tp * cp, the ranks that share the tokens of one microbatch. tokens: tp * cp * dp, the ranks of one pipeline stage,
    over which the tokens of a global batch are spread. experts: etp * ep, the ranks that together hold every expert once.
    node, nodes: the two foldings of ep, neighbours on one node and the ranks at the same place of each node.
    replicas: cp * dp, the ranks that hold equal copies of what tp cuts. adjacent: by every divisor n of tp, n neighbours along
    tp times cp * dp. edp: the ranks that hold copies of the same experts. embedding: tp's cut of the embedding on all pipeline
    ranks that hold it, times cp * dp; this rank alone where it holds none. pipes: pp once for each kind of message and
    direction, so that messages on one of them arrive in the order in which they were sent, whatever the backend. checkpoint: the
    world once more, for objects on the CPU, so that a save in the background never meets what training sends. shards: under FSDP alone.
    """

    tp: Group
    cp: Group
    dp: Group
    pp: Group
    etp: Group
    ep: Group
    edp: Group
    heads: Group
    ring: Group
    sequence: Group
    tokens: Group
    experts: Group
    node: Group
    nodes: Group
    replicas: Group
    embedding: Group
    world: Group
    checkpoint: Group
    adjacent: Mapping[int, Group]
    pipes: Mapping[Pipe, Group]
    shards: ShardGroups | None = None


_DENSE = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "replicas": ("cp", "dp")}
_DENSE |= {"sequence": ("tp", "cp"), "tokens": ("tp", "cp", "dp"), "world": ("tp", "cp", "dp", "pp")}
_EXPERT = {"etp": ("etp",), "ep": ("ep",), "edp": ("edp",), "experts": ("etp", "ep")}
_CONTEXT = {"heads": ("cp.inner",), "ring": ("cp.outer",)}
_NODES = {"node": ("ep.inner",), "nodes": ("ep.outer",)}

# Groups of equal ranks share one process group, unless they are of different channels. Where gradients and parameters travel,
# beside what the layers send, there must be a channel of its own: it would have to wait for its turn among the layers' calls.
Channel = Pipe | Literal["layers", "copies", "checkpoints"]
_OF_COPIES = ("replicas", "edp", "embedding")

# Makes one group of a rank: the name under which it counts bytes, the division that it comes from, and its channel.
MakeGroup = Callable[[str, Division, Channel], Group]


@dataclass(frozen=True, kw_only=True)
class Divisions:
    """How a mesh divides its ranks into the groups of `Groups`, for all ranks at once: what real and planned groups share."""

    named: Mapping[str, Division]
    adjacent: Mapping[int, Division]
    shards: ShardDivisions | None = None

    def assemble(self, make: MakeGroup) -> Groups:
        """One rank's groups out of what `make` makes of each division, always in the same order."""
        mine = {
            name: make(name, division, "copies" if name in _OF_COPIES else "layers")
            for name, division in self.named.items()
        }
        adjacent = {n: make("replicas", division, "copies") for n, division in self.adjacent.items()}
        pipes = {pipe: make("pp", self.named["pp"], pipe) for pipe in PIPES}
        shards = None if self.shards is None else self.shards.assemble(make)
        checkpoint = make("checkpoint", self.named["world"], "checkpoints")
        return Groups(**mine, checkpoint=checkpoint, adjacent=adjacent, pipes=pipes, shards=shards)


@dataclass(frozen=True, kw_only=True)
class ShardDivisions:
    """The divisions behind `ShardGroups`, by the name under which their groups count bytes."""

    named: Mapping[str, tuple[str, Division]]
    copies: Mapping[int, Division]

    def assemble(self, make: MakeGroup) -> ShardGroups:
        """One rank's groups, always in the same order."""
        mine = {field: make(name, division, "copies") for field, (name, division) in self.named.items()}
        return ShardGroups(**mine, copies={n: make("replicas", d, "copies") for n, d in self.copies.items()})


def divide(
    mesh: Mesh,
    *,
    heads: int = 1,
    ep_per_node: int = 1,
    embedding_stages: tuple[int, ...] = (0,),
    fsdp_replicas: int | None = None,
) -> Divisions:
    """The divisions of a mesh; options as for `make_groups`.

    Raises ValueError where heads does not divide cp, ep_per_node ep, or fsdp_replicas dp.
    """
    named: dict[str, Division] = {}
    context, nodes = mesh.dense.split("cp", heads), mesh.expert.split("ep", ep_per_node)
    for folding, names in ((mesh.dense, _DENSE), (mesh.expert, _EXPERT), (context, _CONTEXT), (nodes, _NODES)):
        named |= {name: Division(folding=folding, axes=axes) for name, axes in names.items()}
    stages = tuple(sorted(embedding_stages))
    named["embedding"] = Division(folding=mesh.dense, axes=("cp", "dp", "pp"), stages=stages)
    adjacent = {
        n: Division(folding=mesh.dense.split("tp", n), axes=("tp.inner", "cp", "dp")) for n in _neighbours(mesh)
    }
    shards = None if fsdp_replicas is None else _divide_into_shards(mesh, stages, fsdp_replicas)
    return Divisions(named=named, adjacent=adjacent, shards=shards)


def _divide_into_shards(mesh: Mesh, stages: tuple[int, ...], replicas: int) -> ShardDivisions:
    """`replicas` whole copies along dp. Experts have as many of them as their own edp allows: fewer where ep is larger than dp."""
    if mesh.dense.size("dp") % replicas:
        raise ValueError(f"dp of {mesh.dense.size('dp')} ranks does not hold {replicas} whole copies")
    dense = mesh.dense.split("dp", mesh.dense.size("dp") // replicas)
    edp = mesh.expert.size("edp")
    expert = mesh.expert.split("edp", edp // math.gcd(edp, replicas))
    named = {
        "dense": ("replicas", Division(folding=dense, axes=("cp", "dp.inner"))),
        "expert": ("edp", Division(folding=expert, axes=("edp.inner",))),
        "expert_copies": ("edp", Division(folding=expert, axes=("edp.outer",))),
        "embedding_copies": ("embedding", Division(folding=dense, axes=("dp.outer", "pp"), stages=stages)),
    }
    copies = {n: Division(folding=dense.split("tp", n), axes=("tp.inner", "dp.outer")) for n in _neighbours(mesh)}
    return ShardDivisions(named=named, copies=copies)


def _neighbours(mesh: Mesh) -> tuple[int, ...]:
    """How many neighbours along tp can hold the same: the divisors of tp."""
    tp = mesh.dense.size("tp")
    return tuple(n for n in range(1, tp + 1) if tp % n == 0)


def one_rank(meter: Meter | None = None) -> Groups:
    """The groups of a world of one rank: nothing communicates."""
    names = (*_DENSE, *_EXPERT, *_CONTEXT, *_NODES, "embedding", "checkpoint")
    alone = {name: Group(ranks=(0,), position=0, handle=None, axis=name, meter=meter) for name in names}
    dense, expert = alone["replicas"], alone["edp"]
    shards = ShardGroups(
        dense=dense, expert=expert, expert_copies=expert, embedding_copies=alone["embedding"], copies={1: dense}
    )
    return Groups(**alone, adjacent={1: dense}, pipes=dict.fromkeys(PIPES, alone["pp"]), shards=shards)


def make_groups(
    mesh: Mesh,
    rank: int,
    *,
    heads: int = 1,
    ep_per_node: int = 1,
    embedding_stages: tuple[int, ...] = (0,),
    fsdp_replicas: int | None = None,
    timeout: timedelta = TIMEOUT,
    meter: Meter | None = None,
    baton: Baton | None = None,
) -> Groups:
    """The groups of `rank`. Every rank of the world must call it, in the same order: making a group is collective.

    heads: size of the groups that exchange heads inside cp. ep_per_node: neighbours of ep on one node. embedding_stages: pipeline
    ranks that hold the embedding.
    fsdp_replicas: whole copies along dp of what FSDP shards; None without FSDP.
    timeout: how long a collective waits for the other ranks before it raises. meter, baton: what the groups are given.
    """
    # In a fake world (core/parallel/fake.py) there are no others, and tens of thousands of groups would be made for nobody.
    alone = dist.is_initialized() and dist.get_backend() == dist.Backend.FAKE
    maker = _Maker(rank=rank, timeout=timeout, meter=meter, baton=baton, alone=alone)
    divisions = divide(
        mesh,
        heads=heads,
        ep_per_node=ep_per_node,
        embedding_stages=embedding_stages,
        fsdp_replicas=fsdp_replicas,
    )
    return divisions.assemble(maker.group)


def groups_for(
    parallel: ParallelConfig,
    *,
    embedding_stages: tuple[int, ...] = (0,),
    timeout: timedelta = TIMEOUT,
    meter: Meter | None = None,
) -> Groups:
    """The groups of this process under `parallel`: of the initialised world, or of one rank where there is none."""
    if not dist.is_initialized():
        return one_rank(meter)
    return make_groups(
        fold(parallel, dist.get_world_size()),
        dist.get_rank(),
        heads=parallel.cp_alltoall,
        ep_per_node=parallel.ep_per_node,
        embedding_stages=embedding_stages,
        fsdp_replicas=parallel.fsdp_replicas if parallel.sharding == "fsdp" else None,
        timeout=timeout,
        meter=meter,
        baton=Baton() if parallel.schedule == "combined" else None,
    )


@dataclass(kw_only=True)
class _Maker:
    """Makes groups for one rank; those of a channel with equal ranks share one process group. alone: no other rank makes any."""

    rank: int
    timeout: timedelta
    meter: Meter | None
    baton: Baton | None
    alone: bool
    made: dict[tuple[Channel, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    def group(self, name: str, division: Division, channel: Channel) -> Group:
        """My group of a division; every rank makes all of its groups, and keeps its own."""
        mine = division.members(self.rank)
        for ranks in (mine,) if self.alone else division.groups():
            if len(ranks) > 1 and (channel, ranks) not in self.made:
                self.made[channel, ranks] = self._new_group(ranks, channel)
        handle = self.made.get((channel, mine))
        assert len(mine) == 1 or handle is not None, f"rank {self.rank} is in no group for {name}"
        position = mine.index(self.rank)
        # A save in the background takes no turns with training.
        baton = None if channel == "checkpoints" else self.baton
        return Group(ranks=mine, position=position, handle=handle, axis=name, meter=self.meter, baton=baton)

    def _new_group(self, ranks: tuple[int, ...], channel: Channel) -> dist.ProcessGroup:
        if channel != "checkpoints" or self.alone:
            return dist.new_group(list(ranks), timeout=self.timeout)
        # What accelerators communicate with has no collectives of objects on the CPU.
        return dist.new_group(list(ranks), timeout=CHECKPOINT_TIMEOUT, backend="gloo")
