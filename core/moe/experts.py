"""The routed experts that one rank holds."""

from __future__ import annotations

from torch import Tensor, nn

from core.config.architecture import MoE
from core.kernels.grouped_matmul import expert_mlp
from core.layers.place import Place
from core.moe.dispatch.protocol import ExpertRows
from core.state.box import cut, part
from core.state.spec import Normal, TensorSpec


class Experts(nn.Module):
    """gate_up [e, 2, ffn, hidden] and down [e, hidden, ffn]: the e = E / ep experts of this rank, etp cutting their ffn."""

    def __init__(self, config: MoE, hidden: int, *, init_std: float, place: Place) -> None:
        super().__init__()
        shapes = ((config.experts, 2, config.expert_ffn, hidden), (config.experts, hidden, config.expert_ffn))
        ep, etp, init = place.groups.ep, place.groups.etp, Normal(std=init_std)
        boxes = (cut(part(shape, 0, ep.position, ep.size), 2, etp.position, etp.size) for shape in shapes)
        self.declared = tuple(
            TensorSpec(shape=shape, box=box, replicas="expert", init=init)
            for shape, box in zip(shapes, boxes, strict=True)
        )
        self.later = place.later
        self.gate_up, self.down = (nn.Parameter(place.empty(*spec.box.shape)) for spec in self.declared)

    def specs(self) -> dict[str, TensorSpec]:
        """The declarations of both weights."""
        return {"gate_up": self.declared[0], "down": self.declared[1]}

    def forward(self, rows: ExpertRows) -> Tensor:
        """Each row through its expert, times its router weight: [R, H]; under etp this rank's part of the sum."""
        return expert_mlp(rows.hidden_RH, rows.weights_R, self.gate_up, self.down, rows.counts, self.later)
