"""The MLP of dense layers and of shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from core.config.architecture import SWIGLU, Activation, num_halves
from core.kernels.activation import activate
from core.layers.place import Place
from core.state.box import stretch
from core.state.spec import Normal, TensorSpec


class MLP(nn.Module):
    """down(activation(gate_up x)): gate_up [2, ffn, hidden] with the gate first, [1, ffn, hidden] where nothing gates; down
    [hidden, ffn]; tp cuts ffn."""

    def __init__(
        self, hidden: int, ffn: int, *, init_std: float, place: Place, activation: Activation = SWIGLU
    ) -> None:
        super().__init__()
        self.place, self.activation = place, activation
        tp, init = place.groups.tp, Normal(std=init_std)
        shapes = {"gate_up": (num_halves(activation), ffn, hidden), "down": (hidden, ffn)}
        self.declared = {
            name: TensorSpec(shape=s, box=stretch(s, 1, tp.position, tp.size), replicas="dense", init=init)
            for name, s in shapes.items()
        }
        self.gate_up, self.down = (nn.Parameter(place.empty(*spec.box.shape)) for spec in self.declared.values())

    def specs(self) -> dict[str, TensorSpec]:
        """The declarations of both weights."""
        return self.declared

    def forward(self, x_TH: Tensor, rows: tuple[int, ...]) -> Tensor:
        """[rows[mine], hidden] to the same; rows: tokens of each rank of tp. An all-gather and a reduce-scatter over tp."""
        everyone = self.place.gather_sequence(x_TH, rows)
        act = activate(self.place.product(everyone, self.gate_up), self.activation)
        return self.place.scatter_sequence(self.place.product(act, self.down), rows)
