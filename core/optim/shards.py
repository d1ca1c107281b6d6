"""AdamW over what FSDP leaves of a model on each rank: shards of parameters, gradients and moments (arXiv 2304.11277)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.config.run import OptimizerConfig
from core.optim.adam import MOMENTS, AdamW, Shard
from core.optim.buckets import BUCKET_BYTES, in_chunks, lay_out, main_dtype, master_of
from core.optim.distributed import Reduction
from core.optim.formats import Formats
from core.optim.masters import HostMaster, Master
from core.optim.moments import Place
from core.optim.norm import sum_of_squares
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Group, Groups
from core.parallel.pending import start_all_gather
from core.state.inventory import Entry, copies, declared, piece_of
from core.state.sharded import ShardedTensor
from core.transformer.stage import Stage


@dataclass(eq=False, kw_only=True)
class ShardSlot:
    """One parameter: what this rank holds of it (all of it where FSDP had nothing to share) and of its main gradient.

    parameter: the model's own, whose `.grad` FSDP has summed over the ranks of the shards. gradient: a piece of the bucket's
    buffer, in the shape of the shard. master: what is updated, the shard itself if it is precise enough, else flat. filled: whether
    the gradient is of this step. passes_left: how many more backward passes of this step will reach the parameter.
    """

    name: str
    entry: Entry
    parameter: nn.Parameter
    gradient: Tensor
    master: Master
    filled: bool = False
    passes_left: int = 0


@dataclass(eq=False, kw_only=True)
class ShardBucket:
    """Parameters of whose shards the same ranks hold copies; gradients: [group.size * n]."""

    slots: tuple[ShardSlot, ...]
    group: Group
    gradients: Tensor
    waiting: int = 0


class FullyShardedOptimizer:
    """AdamW on the shards of a model that `core.optim.fsdp.shard` has prepared; see Optimizer for its use.

    FSDP sums a module's gradients over the ranks of the shards at the end of each backward. Copies of shards (of an outer
    replica axis, of neighbours along tp that hold the same, of an embedding on several pipeline ranks) are summed here once a
    step, beside the last backward that reaches them.
    """

    def __init__(
        self,
        model: Stage,
        config: OptimizerConfig,
        groups: Groups,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        formats: Formats | None = None,
    ) -> None:
        formats = formats or Formats()
        self.config = config
        self.compute = model.place.dtype
        self.groups = groups
        self.steps = 0
        self.buckets = _pack(model, groups, bucket_bytes, formats)
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots if slot.gradient.numel()]
        self.shards = [
            Shard(
                master=slot.master,
                gradient=slot.gradient,
                decay=slot.entry.spec.decay,
                places=(Place(name=slot.name, box=slot.entry.box, start=0),),
            )
            for slot in self.slots
        ]
        self.adam = AdamW(self.shards, config, formats.moments, on_host=formats.on_host, seed=formats.seed)
        self.reduction = Reduction(self.buckets)

    def begin(self, passes: Mapping[str, int] | int) -> None:
        """Say how many backward passes of the coming step reach each parameter (left out: none; a number: all).

        Until `reduce`, every shard's gradient is then taken over as soon as FSDP has it, and the sum over copies of a bucket
        starts behind the last.
        """
        self.reduction.begin(passes)

    def accumulate(self) -> None:
        """Take over the gradients that the last backward left."""
        self.reduction.accumulate()

    def reduce(self) -> None:
        """Sum all main gradients over the copies of their shards, every rank its own; waits for the other ranks."""
        self.reduction.reduce()
        shared = [bucket for bucket in self.buckets if bucket.group.size > 1]
        for pending in [start_all_gather(bucket.gradients, bucket.group) for bucket in shared]:
            pending.wait()

    def gradient_norm(self) -> float:
        """The norm of the gradient that is held, each element counted once: one all-reduce of one number over the world."""
        assert self.reduction.done, "gradient_norm() comes after reduce()"
        squares = sum_of_squares([bucket.gradients for bucket in self.buckets if bucket.group.position == 0])
        return float(all_reduce_sum(squares.to(self.buckets[0].gradients.device), self.groups.world).sqrt())

    @torch.no_grad()
    def step(self, rate: float, norm: float, scale: float = 1.0) -> None:
        """Scale gradients of the global norm `norm` down to clip_norm where they exceed it, and update every shard.

        scale: what is held is so many times the gradient.
        """
        assert self.reduction.done, "step() comes after reduce()"
        limit = self.config.clip_norm
        self.adam.step(rate, (limit / norm if limit is not None and norm > limit else 1.0) / scale)
        for slot in self.slots:
            if isinstance(slot.master, Tensor) and slot.master.dtype != slot.entry.tensor.dtype:
                slot.entry.tensor.copy_(slot.master)
        self.reduction.clear()
        self.steps += 1

    def wait_for(self, prefix: str) -> None:
        """Nothing: FSDP gathers parameters where they are used."""

    def wait_all(self) -> None:
        """Nothing: shards are complete."""

    def state(self) -> list[ShardedTensor]:
        """Moments of my shards, and masters where the model computes in less: `optimizer.<kind>.<parameter>`, data shared.

        The masters of sharded parameters are those parameters: whoever fills both from a checkpoint fills the model first.
        """
        return [
            piece_of(f"optimizer.{kind}.{slot.name}", slot.entry, data.view(slot.gradient.shape), self.groups)
            for slot, shard in zip(self.slots, self.shards, strict=True)
            for kind, data in (self.adam.states(shard) | self._masters(slot)).items()
        ]

    def restore(self, pieces: Sequence[ShardedTensor]) -> None:
        """Take over what was written to the pieces of `state`."""
        found = {piece.name: piece.data.reshape(-1) for piece in pieces}
        for slot, shard in zip(self.slots, self.shards, strict=True):
            kinds = (*MOMENTS, "master") if isinstance(slot.master, HostMaster) else MOMENTS
            self.adam.restore(shard, {kind: found[f"optimizer.{kind}.{slot.name}"] for kind in kinds})

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates."""
        self.steps = steps
        self.adam.set_steps(steps)

    def _masters(self, slot: ShardSlot) -> dict[str, Tensor]:
        if not isinstance(slot.master, Tensor) or slot.master.dtype == self.compute:
            return {}
        return {"master": slot.master}


@torch.no_grad()
def _pack(model: nn.Module, groups: Groups, bucket_bytes: int, formats: Formats) -> tuple[ShardBucket, ...]:
    """The trained parameters in buckets, in the order in which backward completes them; see `core.optim.buckets.pack`."""
    parameters = dict(model.named_parameters())

    def kind(entry: Entry) -> Hashable:
        return copies(entry, groups).ranks, main_dtype(entry.tensor.dtype)

    trained = {name: entry for name, entry in declared(model).items() if entry.spec.trained}
    chunks = in_chunks(trained, kind, bucket_bytes)
    return tuple(_bucket(members, parameters, groups, formats) for members in chunks)


def _bucket(
    members: Sequence[tuple[str, Entry]],
    parameters: Mapping[str, nn.Parameter],
    groups: Groups,
    formats: Formats,
) -> ShardBucket:
    """The main gradients of some parameters, zero."""
    first = members[0][1]
    group, main = copies(first, groups), main_dtype(first.tensor.dtype)
    dtype = formats.gradients or main
    starts, size = lay_out(members, dtype, group.size)
    gradients = torch.zeros(size, dtype=dtype, device=first.tensor.device)
    slots = []
    for (name, entry), start in zip(members, starts, strict=True):
        # Not the parameter itself, which FSDP and autograd give gradients of their own.
        held = entry.tensor.detach()
        gradient = gradients[start : start + held.numel()].view(held.shape)
        made = master_of(held.view(-1), formats)
        master = made.view(held.shape) if isinstance(made, Tensor) else made
        parameter = parameters[name]
        slots.append(ShardSlot(name=name, entry=entry, parameter=parameter, gradient=gradient, master=master))
    return ShardBucket(slots=tuple(slots), group=group, gradients=gradients)
