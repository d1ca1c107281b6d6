"""Over which ranks one scale reaches, so that a scale of a whole tensor is the same whatever part of it a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from core.parallel.collectives import all_reduce_max
from core.parallel.groups import Group, Groups
from core.precision.history import Role
from core.state.spec import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The ranks that hold parts of what has one scale: of a weight, what tp or etp cut it into; of what is multiplied by it, the
    tokens and features of one microbatch, which tp and cp share out. Replicas have microbatches of their own, with their own scales.

    cut: who holds the other parts of the weight. tokens: who has others of the microbatch's tokens, or features. experts, first: of all
    ranks, and of this one's; none outside experts. Where ep joins several microbatches an expert's rows of all of them have one scale.
    """

    cut: Group
    tokens: Group
    experts: int = 0
    first: int = 0

    @property
    def alone(self) -> bool:
        """Whether this rank holds all of everything."""
        return self.cut.alone and self.tokens.alone

    def largest(self, role: Role, amax: Tensor) -> Tensor:
        """The largest of these over the ranks, of the same shape: infinite where one is not finite. At most two small all-reduces.

        amax: one number of a tensor, or one for each expert that this rank holds.
        """
        found = amax.float().nan_to_num(nan=math.inf, posinf=math.inf)
        if role == "weight" or self.experts:
            found = all_reduce_max(found, self.cut)
        if role == "weight" or self.tokens.alone:
            return found
        if not self.experts:
            return all_reduce_max(found, self.tokens)
        # Ranks of one microbatch hold the same experts, others, or both: each expert has a place in what is sent.
        here = slice(self.first, self.first + found.numel())
        everyone = found.new_zeros(self.experts)
        everyone[here] = found.flatten()
        return all_reduce_max(everyone, self.tokens)[here].view(found.shape)


def reach_of(spec: TensorSpec, groups: Groups, *, routed: bool) -> Reach | None:
    """That of a weight's products; None where no other rank matters. routed: of experts, whose weights begin with a dimension of them."""
    if routed:
        cut, held = groups.etp, spec.box
        found = Reach(cut=cut, tokens=groups.sequence, experts=spec.shape[0], first=held.offset[0])
    else:
        found = Reach(cut=groups.tp, tokens=groups.sequence)
    return None if found.alone else found
