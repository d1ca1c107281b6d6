"""The factor of losses in a float16 backward, whose gradients would otherwise round to zero (arXiv 1710.03740 section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.errors import ZooError

_FIRST = 2.0**16
# Beyond, nothing is gained: float32 sums would come near their own end.
_MOST = 2.0**32
LEAST_SCALE = 2.0**-14
GOOD_STEPS = 1000


class LossScaleError(ZooError):
    """No factor is small enough for float16 gradients."""


@dataclass(kw_only=True)
class LossScaler:
    """The factor `scale` of this step, found out as training goes, or `fixed`; the same on every rank, as what it is told is.

    Dynamic: 2^16 at first, doubled after 1000 steps in a row that were good, halved after one whose gradient was not finite. That step
    updates nothing. good: steps since the last change. skipped: all steps that updated nothing; what counts updates counts without them.
    """

    fixed: float | None = None
    scale: float = _FIRST
    good: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.scale = self.fixed or self.scale

    def note(self, step: int, *, overflow: bool) -> None:
        """What became of step `step`, from one: an update, or a gradient that was not finite, of which nothing was updated.

        Raises LossScaleError where the next scale would be below 2^-14.
        """
        if not overflow:
            self.good += 1
            if self.fixed is None and self.good >= GOOD_STEPS:
                self.scale, self.good = min(2 * self.scale, _MOST), 0
            return
        self.skipped, self.good = self.skipped + 1, 0
        if self.fixed is not None:
            return
        if self.scale / 2 < LEAST_SCALE:
            raise LossScaleError(
                f"step {step}: the gradient is not finite in float16 even of losses times {self.scale:g}, and nothing was updated. "
                "The last checkpoint, if there is one, is good. Resume it with precision.compute=bfloat16, which has the exponents of float32, "
                "or with a lower optimizer.learning_rate."
            )
        self.scale /= 2

    def state(self) -> dict[str, float]:
        """What a checkpoint needs to go on."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint; one of a run without a scaler has nothing to say. A fixed scale stays what it is."""
        self.scale = self.fixed or float(state.get("scale", _FIRST))
        self.good, self.skipped = int(state.get("good", 0)), int(state.get("skipped", 0))
