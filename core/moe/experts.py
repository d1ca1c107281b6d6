"""The routed experts that one rank holds."""

from __future__ import annotations

from torch import Tensor, nn

from core.config.architecture import MoE, num_halves
from core.kernels.grouped_matmul import expert_mlp
from core.kernels.grouped_products import Biases
from core.layers.place import Place
from core.moe.dispatch.protocol import ExpertRows
from core.precision.experts import quantised_expert_mlp
from core.precision.quantiser import Quantiser
from core.state.box import cut, part
from core.state.spec import Constant, Normal, TensorSpec


class Experts(nn.Module):
    """The e = E / ep experts of this rank, of whose ffn etp holds a part each.

    gate_up [e, 2, ffn, hidden], or [e, 1, ffn, hidden] where nothing gates; down [e, hidden, ffn]; with biases gate_up_bias
    [e, 2 or 1, ffn] and down_bias [e, a stretch of hidden].

    Outputs of the ranks of etp are summed. If each of them held and added all of down_bias it would count once for each, and its
    gradient would be one more kind of sum; so each holds and adds other features of it.
    """

    def __init__(self, config: MoE, hidden: int, *, init_std: float, place: Place) -> None:
        super().__init__()
        experts, ffn, halves = config.experts, config.expert_ffn, num_halves(config.activation)
        # Name, shape, and the dimension that etp cuts.
        tensors = [("gate_up", (experts, halves, ffn, hidden), 2), ("down", (experts, hidden, ffn), 2)]
        if config.bias:
            tensors += [("gate_up_bias", (experts, halves, ffn), 2), ("down_bias", (experts, hidden), 1)]
        ep, etp = place.groups.ep, place.groups.etp
        self.declared: dict[str, TensorSpec] = {}
        for name, shape, dimension in tensors:
            box = cut(part(shape, 0, ep.position, ep.size), dimension, etp.position, etp.size)
            bias = name.endswith("bias")
            init = Constant(value=0.0) if bias else Normal(std=init_std)
            self.declared[name] = TensorSpec(shape=shape, box=box, replicas="expert", init=init, decay=not bias)
        self.later, self.activation = place.later, config.activation
        self.quantisers: dict[str, Quantiser] = {}
        made = {name: nn.Parameter(place.empty(*spec.box.shape)) for name, spec in self.declared.items()}
        self.gate_up, self.down = made["gate_up"], made["down"]
        self.gate_up_bias, self.down_bias = made.get("gate_up_bias"), made.get("down_bias")

    def specs(self) -> dict[str, TensorSpec]:
        """The declarations of all weights."""
        return self.declared

    def forward(self, rows: ExpertRows) -> Tensor:
        """Each row through its expert, times its router weight: [R, H]; under etp this rank's part of the sum."""
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            first = self.declared["down_bias"].box.offset[1]
            biases = Biases(gate_up=self.gate_up_bias, down=self.down_bias, first=first)
        if self.quantisers:
            return quantised_expert_mlp(
                rows.hidden_RH,
                rows.weights_R,
                self.gate_up,
                self.down,
                rows.counts,
                self.quantisers,
                later=self.later,
                activation=self.activation,
                biases=biases,
            )
        return expert_mlp(
            rows.hidden_RH,
            rows.weights_R,
            self.gate_up,
            self.down,
            rows.counts,
            self.later,
            activation=self.activation,
            biases=biases,
        )
