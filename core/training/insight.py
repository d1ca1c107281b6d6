"""How a layer's experts are used in a step: out of sums over the global batch, so the same under every mapping (but for rank_load)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerInsight:
    """One MoE layer over a global batch.

    entropy: of the shares of the experts in what is routed, over its largest value: 1 where all have as much, 0 where one has all.
    dropped: share of the choices that found no room. rank_load: rows of the busiest rank of ep over the mean of all. logit_max,
    logit_rms: the largest absolute value of the router's logits, and the root of their mean square.
    """

    entropy: float
    dropped: float
    rank_load: float
    logit_max: float
    logit_rms: float


def insight_of(
    counts: Sequence[int], *, lost: float, squares: float, largest: float, tokens: int, ep: int
) -> LayerInsight:
    """counts: choices per expert of what is routed. lost: choices that were not. squares: sum over the squared logits of `tokens`
    tokens. ep: ranks that share the experts. Zeros where nothing is routed."""
    routed = sum(counts)
    return LayerInsight(
        entropy=_entropy(counts),
        dropped=lost / max(1.0, lost + routed),
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
