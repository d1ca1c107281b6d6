"""What happens once a step to parameters that have copies: gradients summed, parts updated, parameters gathered again."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.precision import BYTES, state_bytes
from core.config.run import RunConfig
from core.pipeline.layout import Part
from launch.plan.communication import copied
from launch.plan.pricing import Passes, Pricing


@dataclass(frozen=True, kw_only=True)
class CopyTime:
    """Of one pipeline rank and step. axes: by axis bytes sent, seconds, and the seconds that no computation hides. optimizer: seconds
    of the update."""

    axes: tuple[tuple[str, float, float, float], ...]
    optimizer: float

    @property
    def exposed(self) -> float:
        """Seconds that nothing hides."""
        return sum(exposed for _, _, _, exposed in self.axes)


def copy_time(parts: tuple[Part, ...], passes: Passes, pricing: Pricing, microbatches: int) -> CopyTime:
    """passes: of one microbatch through all the rank's parts.

    ZeRO-1 sums gradients while the last backward runs and gathers parameters while the first forward does (core/optim/distributed.py).
    FSDP gathers a unit before its forward and again before its backward, and sums its gradients after it, for every microbatch.
    """
    run = pricing.run
    dense, experts = passes.dense + tables(parts, pricing), passes.experts
    forward, backward = passes.forward.total, passes.backward.total
    axes, update = [], 0.0
    for name, axis, numbers in (("dp", "replicas", dense), ("edp", "edp", experts)):
        copies = pricing.links.axes[axis].size
        summed = copied(numbers, axis, pricing.links, _gradient_bytes(run))
        gathered = copied(numbers, axis, pricing.links, _parameter_bytes(run))
        if run.parallel.sharding == "zero1":
            exposed = max(0.0, summed[1] - backward) + max(0.0, gathered[1] - forward)
            sent, seconds = (a + b for a, b in zip(summed, gathered, strict=True))
        else:
            each = max(0.0, gathered[1] - forward) + max(0.0, gathered[1] + summed[1] - backward)
            exposed = microbatches * each
            sent, seconds = (microbatches * (a + 2 * b) for a, b in zip(summed, gathered, strict=True))
        axes.append((name, sent, seconds, exposed))
        update += numbers / copies
    return CopyTime(axes=tuple(axes), optimizer=_update(update, pricing))


def tables(parts: tuple[Part, ...], pricing: Pricing) -> float:
    """Numbers of embedding and head on a rank with these parts; prediction modules have a copy of the embedding where they are."""
    model = pricing.run.model
    table = model.vocab * model.hidden / pricing.share.tp
    embedded = any(part.embedding or part.ahead for part in parts)
    headed = any(part.loss for part in parts) and not (model.tied_embeddings and embedded)
    return table * (embedded + headed)


def _gradient_bytes(run: RunConfig) -> float:
    return 2 if run.precision.main_gradients == "bfloat16" else 4


def _parameter_bytes(run: RunConfig) -> float:
    """Of a gathered number: primary weights travel in the recipe's format."""
    precision = run.precision
    if precision.primary and precision.recipe is not None:
        return precision.recipe.bits / 8
    return BYTES[precision.compute]


def _update(numbers: float, pricing: Pricing) -> float:
    """Adam passes memory once: gradients are read; masters and both moments read and written; parameters written. States that wait in
    host memory come and go over its link, both ways at once."""
    run, precision = pricing.run, pricing.run.precision
    states = state_bytes(precision)
    beside = BYTES["float32"] if precision.compute == "float32" else 0
    read = _parameter_bytes(run) if precision.masters == "remainder" else 0
    passed = _gradient_bytes(run) + 2 * (states + beside) + _parameter_bytes(run) + read
    moved = run.memory.optimizer_offload * states / pricing.chip.host_link
    return numbers * max(passed / pricing.chip.memory_bandwidth, moved)
