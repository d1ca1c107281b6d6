"""AdamW (arXiv 1711.05101) over a few flat tensors: torch's fused update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.run import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Elements that are updated together: `master` is changed in place by `gradient`, of equal shape and dtype."""

    master: Tensor
    gradient: Tensor
    decay: bool


class AdamW:
    """The update of all shards of a rank, decayed ones and others."""

    def __init__(self, shards: Sequence[Shard], config: OptimizerConfig) -> None:
        self.shards = tuple(shards)
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
        for shard in shards:
            shard.master.grad = shard.gradient
            self._create_state(shard.master)

    def step(self, rate: float) -> None:
        """One update at learning rate `rate` by what the gradients hold."""
        for group in self.update.param_groups:
            group["lr"] = rate
        self.update.step()

    def moments(self, shard: Shard) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq` of a shard, in its shape; shared, not copied."""
        return {kind: self.update.state[shard.master][kind] for kind in MOMENTS}

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates: bias correction depends on their number."""
        for shard in self.shards:
            self.update.state[shard.master]["step"].fill_(float(steps))

    def _create_state(self, master: Tensor) -> None:
        """Make the state that torch would make in the first step, so that a checkpoint can be loaded before it."""
        state = self.update.state[master]
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(master)
