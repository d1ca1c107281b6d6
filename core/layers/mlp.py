"""The SwiGLU MLP of dense layers and of shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from core.kernels.swiglu import swiglu
from core.layers.place import Place
from core.precision.matmul import linear
from core.state.box import whole
from core.state.spec import Normal, TensorSpec


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x): gate_up [2, ffn, hidden] with the gate first, down [hidden, ffn]."""

    def __init__(self, hidden: int, ffn: int, *, init_std: float, place: Place) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(place.empty(2, ffn, hidden))
        self.down = nn.Parameter(place.empty(hidden, ffn))
        self.init_std = init_std

    def specs(self) -> dict[str, TensorSpec]:
        """The declarations of both weights."""
        init = Normal(std=self.init_std)
        shapes = {"gate_up": tuple(self.gate_up.shape), "down": tuple(self.down.shape)}
        return {n: TensorSpec(shape=s, box=whole(s), replicas="dense", init=init) for n, s in shapes.items()}

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        return linear(swiglu(linear(x, self.gate_up.flatten(0, 1))), self.down)
