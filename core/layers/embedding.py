"""Token embedding and output head: one matrix each, or one for both."""

from __future__ import annotations

from torch import Tensor, nn

from core.kernels.cross_entropy import head_cross_entropy
from core.kernels.embedding import embedding
from core.layers.place import Place
from core.precision.matmul import linear
from core.state.box import whole
from core.state.spec import Normal, TensorSpec


class Vocabulary(nn.Module):
    """A [vocab, hidden] matrix, used as embedding (`embed`), as head (`logits`, `loss`), or as both."""

    def __init__(self, vocab: int, hidden: int, *, init_std: float, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(place.empty(vocab, hidden))
        self.init_std = init_std

    def specs(self) -> dict[str, TensorSpec]:
        """The matrix's declaration."""
        shape = tuple(self.weight.shape)
        return {"weight": TensorSpec(shape=shape, box=whole(shape), replicas="dense", init=Normal(std=self.init_std))}

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The rows of the tokens: [T, hidden]."""
        return embedding(tokens_T, self.weight)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Scores of every next token: [T, vocab] float32."""
        return linear(hidden_TH, self.weight).float()

    def loss(self, hidden_TH: Tensor, labels_T: Tensor) -> Tensor:
        """Cross-entropy summed over the tokens whose label is not -100: float32 scalar."""
        return head_cross_entropy(hidden_TH, self.weight, labels_T)
