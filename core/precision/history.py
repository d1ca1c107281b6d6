"""The largest values of earlier steps, by which delayed scaling chooses its scales (report section 5.3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from core.parallel.collectives import all_reduce_max
from core.parallel.groups import Groups
from core.precision.scales import delayed_amax, next_history
from core.state.box import Box, whole
from core.state.inventory import replicas
from core.state.spec import Constant, TensorSpec

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")


class AmaxHistory(nn.Module):
    """Of one weight's operands, newest step first: history [3, H], of experts [E, 3, H], float32; a part of every checkpoint.

    seen: the largest of the step that runs, [3] or [E, 3]; `remember` makes it the newest entry. It is over everything that the step
    multiplied on all ranks that hold copies of the weight or, under tp, other parts of it: the same whatever the mapping.

    experts: of all ranks, of which this one holds those of the box `held`; None for a weight outside them. Not for etp, whose
    ranks hold parts of one expert (core/check says so).
    """

    history: Tensor

    def __init__(
        self, steps: int, groups: Groups, device: torch.device, *, experts: int = 0, held: Box | None = None
    ) -> None:
        super().__init__()
        front = () if held is None else (experts,)
        shape = (*front, len(ROLES), steps)
        box = (
            whole(shape)
            if held is None
            else Box(offset=(held.offset[0], 0, 0), shape=(held.shape[0], len(ROLES), steps))
        )
        self.register_buffer("history", torch.zeros(box.shape, dtype=torch.float32, device=device))
        self.seen = torch.zeros(box.shape[:-1], dtype=torch.float32, device=device)
        self.declared = TensorSpec(
            shape=shape,
            box=box,
            replicas="dense" if held is None else "expert",
            init=Constant(value=0.0),
            adjacent=groups.tp.size if held is None else 1,
            decay=False,
            trained=False,
        )

    def specs(self) -> dict[str, TensorSpec]:
        """The declaration of the history."""
        return {"history": self.declared}

    def amax(self, role: Role, measured: Tensor, margin: int, *, note: bool) -> Tensor:
        """What to expect of an operand, of the shape of `measured` ([E], or one number); that itself while nothing is remembered.

        note: remember what was measured, when the step ends.
        """
        i = ROLES.index(role)
        seen = self.seen[..., i]
        if note:
            seen.copy_(torch.maximum(seen, torch.nan_to_num(measured.float().view(seen.shape), nan=0.0, posinf=0.0)))
        past = delayed_amax(self.history[..., i, :], margin=margin).view(measured.shape)
        return torch.where(past > 0, past, measured.float())

    def see_as(self, other: AmaxHistory, role: Role) -> None:
        """Note what another weight's history has seen of an operand that both read."""
        i = ROLES.index(role)
        self.seen[..., i].copy_(torch.maximum(self.seen[..., i], other.seen[..., i]))


@torch.no_grad()
def remember(histories: Iterable[AmaxHistory], groups: Groups) -> None:
    """End a step: what was seen becomes the newest entry of every history. One all-reduce for each kind of copies.

    Every rank calls this at the same place, with its own histories in module order.
    """
    kinds: dict[tuple[str, int], list[AmaxHistory]] = {}
    for history in histories:
        kinds.setdefault((history.declared.replicas, history.declared.adjacent), []).append(history)
    for members in kinds.values():
        _remember(members, groups)


def forget(histories: Iterable[AmaxHistory]) -> None:
    """End a step that updated nothing: what was seen in it counts for none."""
    for history in histories:
        history.seen.zero_()


def _remember(members: Sequence[AmaxHistory], groups: Groups) -> None:
    flat = torch.cat([history.seen.flatten() for history in members])
    largest = all_reduce_max(flat, replicas(members[0].declared, groups))
    for history, seen in zip(members, largest.split([history.seen.numel() for history in members]), strict=True):
        history.history.copy_(next_history(history.history, seen.view(history.seen.shape)))
        history.seen.zero_()
