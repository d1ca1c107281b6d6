"""AdamW (arXiv 1711.05101) over one kind of parameters: torch's fused update on float32 masters, canonical names outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.run import OptimizerConfig
from core.state.inventory import Entry

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True)
class Slot:
    """One parameter under training: main gradient and master are float32; the master is the parameter itself if that is."""

    entry: Entry
    master: Tensor
    gradient: Tensor | None = None


class AdamW:
    """The update of parameters whose copies lie on one group of ranks (dense or expert)."""

    def __init__(self, entries: Mapping[str, Entry], config: OptimizerConfig) -> None:
        self.slots = {name: Slot(entry=entry, master=_master(entry.tensor)) for name, entry in entries.items()}
        decayed = [slot.master for slot in self.slots.values() if slot.entry.spec.decay]
        others = [slot.master for slot in self.slots.values() if not slot.entry.spec.decay]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.update = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for slot in self.slots.values():
            self._create_state(slot.master)

    def accumulate(self) -> None:
        """Add the gradients that the last backward left to the main gradients, in float32, and clear them."""
        for slot in self.slots.values():
            fresh = slot.entry.tensor.grad
            slot.entry.tensor.grad = None
            if fresh is None:
                continue
            if slot.gradient is None:
                slot.gradient = fresh if fresh.dtype == slot.master.dtype else fresh.to(slot.master.dtype)
            else:
                slot.gradient.add_(fresh)

    def gradients(self) -> list[Tensor]:
        """The main gradients in order of name: zeros for a parameter that nothing reached, so that all ranks have all."""
        for slot in self.slots.values():
            if slot.gradient is None:
                slot.gradient = torch.zeros_like(slot.master)
        return [slot.gradient for slot in self.slots.values() if slot.gradient is not None]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; the main gradients are consumed."""
        self.gradients()
        for group in self.update.param_groups:
            group["lr"] = rate
        for slot in self.slots.values():
            slot.master.grad = slot.gradient
        self.update.step()
        for slot in self.slots.values():
            slot.master.grad = slot.gradient = None
            if slot.master is not slot.entry.tensor:
                slot.entry.tensor.copy_(slot.master)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """kind -> name -> tensor: `exp_avg`, `exp_avg_sq`, and `master` where the parameter is not float32. Shared, not copied."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*MOMENTS, "master")}
        for name, slot in self.slots.items():
            for kind in MOMENTS:
                found[kind][name] = self.update.state[slot.master][kind]
            if slot.master is not slot.entry.tensor:
                found["master"][name] = slot.master.detach()
        return found

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates: bias correction depends on their number."""
        for slot in self.slots.values():
            self.update.state[slot.master]["step"].fill_(float(steps))

    def _create_state(self, master: Tensor) -> None:
        """Make the state that torch would make in the first step, so that a checkpoint can be loaded before it."""
        state = self.update.state[master]
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(master, memory_format=torch.preserve_format)


def _master(tensor: Tensor) -> Tensor:
    """The float32 (float64 for float64) tensor that the update works on."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return torch.nn.Parameter(tensor.detach().float())
