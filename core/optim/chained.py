"""Dense and expert parameters under one optimizer: apart in where their copies lie, one in the norm of their gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from core.config.run import OptimizerConfig
from core.optim.adam import AdamW, Shard
from core.optim.buckets import BUCKET_BYTES, Bucket
from core.optim.distributed import Gathering, Reduction
from core.optim.formats import Formats
from core.optim.moments import Place
from core.optim.norm import sum_of_squares
from core.optim.primary import PrimaryBucket, pack_with_primary, primary_of
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups
from core.precision.quantiser import Quantiser
from core.state.box import flat_boxes
from core.state.inventory import declared
from core.state.sharded import ShardedTensor


class ChainedOptimizer:
    """AdamW with its state spread over the ranks that hold copies of each parameter (ZeRO-1); see Optimizer for its use.

    Losses are shares of one sum over the global batch, so every gradient is a plain sum over its copies (contract 4).
    The model's parameters become views of flat buffers; all its tensors must be where and what they stay. primary: by name, the
    weights that are held as their products read them, and have no values of their own from now on.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        groups: Groups,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        formats: Formats | None = None,
        primary: Mapping[str, Quantiser] | None = None,
    ) -> None:
        formats = formats or Formats()
        trained = {name: entry for name, entry in declared(model).items() if entry.spec.trained}
        self.config = config
        self.groups = groups
        self.steps = 0
        self.buckets = pack_with_primary(trained, groups, bucket_bytes, formats, primary or {})
        self.shards = [
            Shard(master=b.master, gradient=b.own_gradients, decay=b.decay, places=_places(b)) for b in self.buckets
        ]
        self.adam = AdamW(self.shards, config, formats.moments, on_host=formats.on_host, seed=formats.seed)
        self.reduction = Reduction(self.buckets)
        self.gathering = Gathering(self.buckets)

    def begin(self, passes: Mapping[str, int] | int) -> None:
        """Say how many backward passes of the coming step reach each parameter (left out: none; a number: all).

        Until `reduce`, a sum over copies then starts during backward, as soon as its bucket's last gradient and all buckets
        before it are there.
        """
        self.reduction.begin(passes)

    def accumulate(self) -> None:
        """Take over the gradients that the last backward left, or that were computed by hand."""
        self.reduction.accumulate()

    def reduce(self) -> None:
        """Sum all main gradients over their copies, each rank its own part; waits for the other ranks."""
        self.reduction.reduce()

    def gradient_norm(self) -> float:
        """The norm of the gradient that is held, each element counted once: one all-reduce of one number over the world."""
        assert self.reduction.done, "gradient_norm() comes after reduce()"
        squares = sum_of_squares([shard.gradient for shard in self.shards])
        return float(all_reduce_sum(squares, self.groups.world).sqrt())

    @torch.no_grad()
    def step(self, rate: float, norm: float, scale: float = 1.0) -> None:
        """Scale gradients of the global norm `norm` down to clip_norm where they exceed it, and update every parameter.

        scale: what is held is so many times the gradient. Only starts to gather them: `wait_for` or `wait_all` comes before they are read.
        """
        assert self.reduction.done, "step() comes after reduce()"
        self.wait_all()
        limit = self.config.clip_norm
        self.adam.step(rate, (limit / norm if limit is not None and norm > limit else 1.0) / scale)
        for bucket in self.buckets:
            bucket.publish()
        self.gathering.start()
        self.reduction.clear()
        self.steps += 1

    def wait_for(self, prefix: str) -> None:
        """Wait until the parameter `prefix`, and all whose names begin with `prefix.`, are complete; "" means all."""
        self.gathering.wait_for(prefix)

    def wait_all(self) -> None:
        """Wait until every parameter is complete: whoever reads a model's state (checkpoint, inventory) calls this first."""
        self.gathering.wait_for("")

    def state(self) -> list[ShardedTensor]:
        """Moments, and masters where they are copies, of my part of every parameter: `optimizer.<kind>.<parameter>`; and of primary
        weights `model.<parameter>`, rounded to the run's dtype, as the checkpoint of any run has them.

        Each element is on exactly one rank. Data are shared with the optimizer where they are kept as a checkpoint has them, and
        copies in host memory otherwise: whoever fills them calls `restore`. Parameters are complete afterwards.
        """
        self.wait_all()
        found = [
            piece
            for bucket, shard in zip(self.buckets, self.shards, strict=True)
            for kind, flat in self._kinds(bucket, shard).items()
            for piece in _pieces(f"optimizer.{kind}", flat, bucket)
        ]
        for bucket in primary_of(self.buckets):
            found += _pieces("model", bucket.values(), bucket)
        return found

    def restore(self, pieces: Sequence[ShardedTensor]) -> None:
        """Take over what was written to the pieces of `state`. Parameters are complete afterwards."""
        found = {(piece.name, piece.box): piece.data for piece in pieces}
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            if self.adam.shared(shard):
                continue
            states = {kind: torch.zeros_like(flat) for kind, flat in self._kinds(bucket, shard).items()}
            for kind, flat in states.items():
                for piece in _pieces(f"optimizer.{kind}", flat, bucket):
                    piece.data.copy_(found[piece.name, piece.box])
            self.adam.restore(shard, states)
        primary = list(primary_of(self.buckets))
        for bucket in primary:
            bucket.publish()
        if primary or not all(isinstance(bucket.master, Tensor) for bucket in self.buckets):
            # Parameters were rounded anew, each by the rank that has its master.
            self.gathering.start()
            self.wait_all()

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates."""
        self.steps = steps
        self.adam.set_steps(steps)

    def _kinds(self, bucket: Bucket | PrimaryBucket, shard: Shard) -> dict[str, Tensor]:
        """The state of my part of a bucket, flat."""
        states = self.adam.states(shard)
        if isinstance(bucket.master, Tensor) and bucket.master.dtype != bucket.dtype:
            states["master"] = bucket.master
        return states


def _places(bucket: Bucket | PrimaryBucket) -> tuple[Place, ...]:
    """Where the tensors of a bucket lie in my part of it."""
    return tuple(
        Place(name=slot.name, box=slot.entry.spec.box, start=slot.start - bucket.own_start) for slot in bucket.slots
    )


def _pieces(kind: str, flat: Tensor, bucket: Bucket | PrimaryBucket) -> Iterator[ShardedTensor]:
    """My part `flat` of some state of a bucket, as boxes of the canonical tensors `<kind>.<parameter>`."""
    low, high = bucket.own_start, bucket.own_start + flat.numel()
    for slot in bucket.slots:
        start, stop = max(low, slot.start), min(high, slot.stop)
        if start >= stop:
            continue
        spec = slot.entry.spec
        for box, number in flat_boxes(spec.box, start - slot.start, stop - slot.start):
            at = slot.start + number - low
            data = flat[at : at + box.elements].view(box.shape)
            yield ShardedTensor(name=f"{kind}.{slot.name}", shape=spec.shape, box=box, data=data)
