"""AdamW (arXiv 1711.05101) over a few flat tensors: torch's fused update, of states that may be kept in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from core.config.run import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements that are widened at once, into three temporary copies: on a CPU what stays in its cache, elsewhere so many that launches do
# not count (192 MiB). Whole vectors, so that an element is rounded alike wherever a piece ends.
_PIECES = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Elements that are updated together: `master` is changed in place by `gradient`, of equal shape, which may be of fewer bits."""

    master: Tensor
    gradient: Tensor
    decay: bool


class AdamW:
    """The update of all shards of a rank, decayed ones and others.

    moments: the dtype in which both moments are kept between steps; None: that of the master. The arithmetic is the master's
    (float32) whatever is kept: gradient and moments are widened exactly, the update uses this step's moments before they
    are rounded, and they are rounded to nearest even when they are written (report section 4.1.6).

    What is lost in bfloat16, with its 8 significant bits: each step rounds both moments by up to u = 2**-8 of themselves, and
    what was rounded before fades by beta. So the second moment is off by at most u / (1 - beta2), with beta2 = 0.95 8 %, and
    as roundings go either way rather by u / sqrt(3 * (1 - beta2**2)), 0.7 %; the step, which has its root, by half of
    that. A gradient's own noise moves it by more: one that is independent from step to step makes the second moment fluctuate by
    sqrt(2 * (1 - beta2) / (1 + beta2)), 23 %. And the moment still decays: a step without gradient takes 5 % of
    it, more than a rounding can give back. That is why it is accepted, and why beta > 1 - u, where rounding would undo every decay
    and a moment could only grow, is refused (core/check/precision.py).
    """

    def __init__(self, shards: Sequence[Shard], config: OptimizerConfig, moments: torch.dtype | None = None) -> None:
        self.shards = tuple(shards)
        self.config = config
        decayed = [shard.master for shard in shards if shard.decay]
        others = [shard.master for shard in shards if not shard.decay]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.update = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        # What is of one dtype is updated at once; the rest, to which torch is given no gradient, piece by piece.
        plain = [{s.gradient.dtype, moments or s.master.dtype} == {s.master.dtype} for s in self.shards]
        self._plain = [shard for shard, is_plain in zip(self.shards, plain, strict=True) if is_plain]
        self._narrow = [shard for shard, is_plain in zip(self.shards, plain, strict=True) if not is_plain]
        for shard in self.shards:
            self._create_state(shard.master, moments or shard.master.dtype)
        for shard in self._plain:
            shard.master.grad = shard.gradient

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """One update at learning rate `rate` by `factor` times what the gradients hold."""
        for group in self.update.param_groups:
            group["lr"] = rate
        if factor != 1.0:
            for shard in self._plain:
                shard.gradient.mul_(factor)
        self.update.step()
        for shard in self._narrow:
            self._step_in_pieces(shard, rate, factor)

    def moments(self, shard: Shard) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq` of a shard, in its shape; shared, not copied."""
        return {kind: self.update.state[shard.master][kind] for kind in MOMENTS}

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates: bias correction depends on their number."""
        for shard in self.shards:
            self.update.state[shard.master]["step"].fill_(float(steps))

    def _create_state(self, master: Tensor, moments: torch.dtype) -> None:
        """Make the state that torch would make in the first step, so that a checkpoint can be loaded before it."""
        state = self.update.state[master]
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(master, dtype=moments)

    def _step_in_pieces(self, shard: Shard, rate: float, factor: float) -> None:
        """The same update of a shard whose gradient or moments have fewer bits than its master."""
        steps, wide = self.update.state[shard.master]["step"], shard.master.dtype
        kept = [tensor.view(-1) for tensor in self.moments(shard).values()]
        master, gradient = shard.master.view(-1), shard.gradient.view(-1)
        size = _PIECES.get(master.device.type, _LARGE_PIECE)
        for start in range(0, master.numel(), size):
            piece = slice(start, start + size)
            # Moments of the master's dtype stay where they are: nothing is copied there or back.
            first, second = (tensor[piece].to(wide) for tensor in kept)
            fresh = gradient[piece].to(wide)
            adamw(
                [master[piece]],
                [fresh if factor == 1.0 else fresh * factor],
                [first],
                [second],
                [],
                # Counted up in there, once for every piece.
                [steps.clone()],
                fused=True,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=rate,
                weight_decay=self.config.weight_decay if shard.decay else 0.0,
                eps=self.config.eps,
                maximize=False,
            )
            for tensor, new in zip(kept, (first, second), strict=True):
                tensor[piece].copy_(new)
        steps.add_(1.0)
