"""The MLP of dense layers and of shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from core.config.architecture import SWIGLU, Activation, num_halves
from core.kernels.activation import activate
from core.layers.place import Place
from core.memory.recompute import recompute
from core.precision.quantiser import Quantiser
from core.state.box import stretch
from core.state.spec import Normal, TensorSpec


class MLP(nn.Module):
    """down(activation(gate_up x)): gate_up [2, ffn, hidden] with the gate first, [1, ffn, hidden] where nothing gates; down
    [hidden, ffn]; tp cuts ffn.

    again: in the backward it is made again from x, which alone is kept: the all-gather over tp runs once more, the reduce-scatter
    does not.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        init_std: float,
        place: Place,
        activation: Activation = SWIGLU,
        again: bool = False,
    ) -> None:
        super().__init__()
        self.place, self.activation, self.again = place, activation, again
        self.quantisers: dict[str, Quantiser] = {}
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
        return self.place.scatter_sequence(self.partial(x_TH, rows), rows)

    def partial(self, x_TH: Tensor, rows: tuple[int, ...]) -> Tensor:
        """This rank's part of the sum for the tokens of all ranks of tp: [sum(rows), hidden]. The all-gather alone."""
        if self.again:
            return recompute(lambda mine: self._products(self.place.gather_sequence(mine, rows)), x_TH)
        return self.place.with_sequence(x_TH, rows, self._products)

    def _products(self, everyone_TH: Tensor) -> Tensor:
        product = self.place.product(everyone_TH, self.gate_up, self.quantisers.get("gate_up"))
        return self.place.product(activate(product, self.activation), self.down, self.quantisers.get("down"))
