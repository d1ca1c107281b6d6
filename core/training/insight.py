"""How a layer's experts are used in a step, and what rounding its operands loses: out of sums over the global batch.

The first is the same under every mapping, but for rank_load and saved. Of the second, what a mapping computes twice counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerInsight:
    """One MoE layer over a global batch.

    entropy: of the shares of the experts in what is routed, over its largest value: 1 where all have as much, 0 where one has all.
    dropped: share of the choices that found no room. saved: share of the routed rows that did not travel, because their token had been
    sent to that rank for another expert; it depends on ep and dispatcher. rank_load: rows of the busiest rank of ep over the mean of all. logit_max,
    logit_rms: the largest absolute value of the router's logits, and the root of their mean square.
    """

    entropy: float
    dropped: float
    saved: float
    rank_load: float
    logit_max: float
    logit_rms: float


@dataclass(frozen=True, kw_only=True)
class PrecisionInsight:
    """One kind of operand of the quantised products of a layer, in a step; of its elements that are not zero.

    relative_error: root of the sum of squared errors over that of squares. amax: the largest size; of gradients in float16, under the loss scale.
    saturated: share beyond the largest number that their scale allows. flushed: share that became zero. scales: how many have a scale of each
    power of two or between it and the next, from 2^smallest_exponent up; the ends hold what is beyond.
    """

    relative_error: float
    amax: float
    saturated: float
    flushed: float
    scales: tuple[int, ...]
    smallest_exponent: int


def precision_insight(sums: Sequence[float], amax: float, smallest_exponent: int) -> PrecisionInsight:
    """sums: of all ranks, as `core.precision.insight.Watch` has them, of one operand at least."""
    elements, squares, errors, saturated, flushed, *scales = sums
    return PrecisionInsight(
        relative_error=math.sqrt(errors / squares) if squares else 0.0,
        amax=amax,
        saturated=saturated / elements,
        flushed=flushed / elements,
        scales=tuple(map(int, scales)),
        smallest_exponent=smallest_exponent,
    )


def insight_of(counts: Sequence[int], *, told: Sequence[float], largest: float, tokens: int, ep: int) -> LayerInsight:
    """counts: choices per expert of what is routed. told: choices that were not, rows that did not travel, and the sum over the squared
    logits of `tokens` tokens. ep: ranks that share the experts. Zeros where nothing is routed."""
    routed = sum(counts)
    lost, saved, squares = told
    return LayerInsight(
        entropy=_entropy(counts),
        dropped=lost / max(1.0, lost + routed),
        saved=saved / max(1, routed),
        rank_load=_busiest(counts, ep) * ep / max(1, routed),
        logit_max=largest,
        logit_rms=math.sqrt(squares / max(1, tokens * len(counts))),
    )


def _entropy(counts: Sequence[int]) -> float:
    total = sum(counts)
    if total == 0:
        return 0.0
    if len(counts) == 1:
        return 1.0
    shares = (count / total for count in counts if count)
    # Never a minus zero, where one expert has everything.
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(counts))


def _busiest(counts: Sequence[int], ep: int) -> int:
    """Rows on the rank with most of them; ranks hold equally many experts, neighbours."""
    held = len(counts) // ep
    return max(sum(counts[first : first + held]) for first in range(0, len(counts), held))
