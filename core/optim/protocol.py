"""What a training step asks of an optimizer, whatever lies behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from core.config.run import OptimizerConfig
from core.state.sharded import ShardedTensor


class Optimizer(Protocol):
    """One step is: `begin`, then for every backward pass `accumulate`, then `reduce`, `gradient_norm` and `step`.

    Every rank of the world makes the same calls in the same order. Names are canonical names of trained parameters.
    """

    config: OptimizerConfig
    steps: int

    def begin(self, passes: Mapping[str, int] | int) -> None:
        """Say how many backward passes of the coming step will reach each parameter (those left out: none; a number: all).

        From now to `reduce`, gradients are taken over as they arise and sums over copies start as soon as they can, beside the
        backward. Without this call they all start in `reduce`, and gradients are taken over by `accumulate` alone.
        """
        ...

    def accumulate(self) -> None:
        """Take over the gradients that lie in `.grad` after a backward, or after weight gradients were computed by hand."""
        ...

    def reduce(self) -> None:
        """Sum all gradients over the copies of their parameters; waits for it."""
        ...

    def gradient_norm(self) -> float:
        """The norm of what is held of the whole model's gradient, each element counted once, the same on every rank; after `reduce`.

        Not finite where any element is not. A step that is abandoned then ends here: nothing has changed."""
        ...

    def step(self, rate: float, norm: float, scale: float = 1.0) -> None:
        """Scale a gradient of norm `norm` down to config.clip_norm where it exceeds that, and update every parameter.

        scale: what is held is so many times the gradient, because losses were multiplied by it.
        Parameters may still be on their way when it returns: `wait_for` or `wait_all` comes before anything reads them.
        """
        ...

    def wait_for(self, prefix: str) -> None:
        """Wait until the parameter `prefix`, and all whose names begin with `prefix.`, are complete; "" means all."""
        ...

    def wait_all(self) -> None:
        """Wait until every parameter is complete: before a checkpoint, an inventory, an export, or the end of the job."""
        ...

    def state(self) -> list[ShardedTensor]:
        """This rank's share of the state as `optimizer.<kind>.<parameter>`, and `model.<parameter>` of what the model itself has no
        values of; parameters are complete afterwards.

        Data are shared, or copies in host memory of what is kept in another form: whoever fills them calls `restore`.
        """
        ...

    def restore(self, pieces: Sequence[ShardedTensor]) -> None:
        """Take over what was written to the pieces of `state`, as a checkpoint is loaded; other pieces are passed over.

        Comes after the model's own tensors are loaded."""
        ...

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates: bias correction depends on their number."""
        ...
