"""What happens once a step to parameters that have copies: gradients summed, parts updated, parameters gathered again."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.precision import BYTES, state_bytes
from core.config.run import RunConfig
from core.pipeline.layout import Part
from launch.plan.communication import copied
from launch.plan.pricing import Passes, Pricing
from launch.plan.weights import fetched_bytes


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
    axes, update, written = [], 0.0, 0.0
    for name, axis, numbers, low in (("dp", "replicas", dense, passes.low[0]), ("edp", "edp", experts, passes.low[1])):
        copies = pricing.links.axes[axis].size
        summed = copied(numbers, axis, pricing.links, _gradient_bytes(run))
        gathered = copied(numbers, axis, pricing.links, _parameter_bytes(run, low / numbers if numbers else 0.0))
        if run.parallel.sharding == "zero1":
            exposed = max(0.0, summed[1] - backward) + max(0.0, gathered[1] - forward)
            sent, seconds = (a + b for a, b in zip(summed, gathered, strict=True))
        else:
            each = max(0.0, gathered[1] - forward) + max(0.0, gathered[1] + summed[1] - backward)
            exposed = microbatches * each
            sent, seconds = (microbatches * (a + 2 * b) for a, b in zip(summed, gathered, strict=True))
        axes.append((name, sent, seconds, exposed))
        update += numbers / copies
        written += low / copies
    share = written / update if update else 0.0
    return CopyTime(axes=tuple(axes), optimizer=_update(update, _parameter_bytes(run, share), pricing))


def tables(parts: tuple[Part, ...], pricing: Pricing) -> float:
    """Numbers of embedding and head on a rank with these parts; prediction modules have a copy of the embedding where they are."""
    model = pricing.run.model
    table = model.vocab * model.hidden / pricing.share.tp
    embedded = any(part.embedding or part.ahead for part in parts)
    headed = any(part.loss for part in parts) and not (model.tied_embeddings and embedded)
    return table * (embedded + headed)


def _gradient_bytes(run: RunConfig) -> float:
    return 2 if run.precision.main_gradients == "bfloat16" else 4


def _parameter_bytes(run: RunConfig, low: float) -> float:
    """Of a gathered number, on average. low: the share of them that a recipe takes."""
    return low * fetched_bytes(run.precision) + (1 - low) * BYTES[run.precision.compute]


def _update(numbers: float, weight: float, pricing: Pricing) -> float:
    """Adam passes memory once: gradients are read; masters and both moments read and written; parameters written. States that wait in
    host memory come and go over its link, both ways at once. weight: bytes of a parameter."""
    run, precision = pricing.run, pricing.run.precision
    states = state_bytes(precision)
    beside = BYTES["float32"] if precision.compute == "float32" else 0
    read = weight if precision.masters == "remainder" else 0
    passed = _gradient_bytes(run) + 2 * (states + beside) + weight + read
    moved = run.memory.optimizer_offload * states / pricing.chip.host_link
    return numbers * max(passed / pricing.chip.memory_bandwidth, moved)
