"""Token embedding and output head: one matrix each, or one for both, its vocabulary cut over tp."""

from __future__ import annotations

from torch import Tensor, nn

from core.kernels.cross_entropy import VocabularyCut, head_cross_entropy
from core.kernels.embedding import embedding
from core.layers.place import Place
from core.parallel.collectives import all_gather_rows
from core.precision.matmul import linear
from core.state.box import ends, stretch
from core.state.spec import Normal, Replicas, TensorSpec


class Vocabulary(nn.Module):
    """This rank's stretch of the rows of a [vocab, hidden] matrix: embedding (`embed`), head (`logits`, `loss`), or both.

    replicas: over which ranks copies of the stretch lie: "embedding" for the embedding, "dense" for a head of its own.

    In all methods `rows` says how many of the T tokens of this rank of cp each rank of tp holds, one stretch after the other
    (`Packing.rows`); None is all of them on a single rank. Every rank of tp takes part in each, with no rows of its own too.
    """

    def __init__(self, vocab: int, hidden: int, *, init_std: float, place: Place, replicas: Replicas = "dense") -> None:
        super().__init__()
        self.place = place
        self.vocab = vocab
        self.tp = place.groups.tp
        self.box = stretch((vocab, hidden), 0, self.tp.position, self.tp.size)
        self.weight = nn.Parameter(place.empty(*self.box.shape))
        self.init_std = init_std
        self.replicas: Replicas = replicas

    def specs(self) -> dict[str, TensorSpec]:
        """The matrix's declaration."""
        shape = (self.vocab, self.box.shape[1])
        init = Normal(std=self.init_std)
        return {"weight": TensorSpec(shape=shape, box=self.box, replicas=self.replicas, init=init, adjacent=1)}

    def embed(self, tokens_T: Tensor, rows: tuple[int, ...] | None = None) -> Tensor:
        """The matrix's rows of my tokens: [rows[position], hidden]. tokens [T] int64, all of them on every rank of tp.

        One reduce-scatter of [T, hidden] over tp; backward gathers the same.
        """
        found = embedding(tokens_T, self.weight, first=self.box.offset[0], vocab=self.vocab)
        return self.place.scatter_sequence(found, _counts(rows, tokens_T))

    def logits(self, hidden_TH: Tensor, rows: tuple[int, ...] | None = None) -> Tensor:
        """Scores of every next token, [T, vocab] float32, all of them on every rank of tp: for few tokens, not for a loss.

        hidden [rows[position], hidden]. Gathers hidden, and then the vocabulary, over tp.
        """
        scores = linear(self.place.gather_sequence(hidden_TH, _counts(rows, hidden_TH)), self.weight)
        if self.tp.size > 1:
            bounds = ends(self.vocab, self.tp.size)
            held = [bounds[i + 1] - bounds[i] for i in range(self.tp.size)]
            scores = all_gather_rows(scores.T.contiguous(), held, self.tp).T.contiguous()
        return scores.float()

    def loss(self, hidden_TH: Tensor, labels_T: Tensor, rows: tuple[int, ...] | None = None) -> Tensor:
        """This rank's share of the cross-entropy: summed over those of its own rows whose label is not -100, float32 scalar.

        hidden [rows[position], hidden]; labels [T] int64, all of them on every rank of tp. The shares of the ranks of tp add
        up to the loss of the T tokens; the outer gradient has to be the same number on all of them. Gathers hidden over tp,
        whose backward reduce-scatters, and all-reduces three numbers per token.
        """
        counts = _counts(rows, hidden_TH)
        cut = VocabularyCut(tp=self.tp, vocab=self.vocab, rows=counts)
        return head_cross_entropy(self.place.gather_sequence(hidden_TH, counts), self.weight, labels_T, cut=cut)


def _counts(rows: tuple[int, ...] | None, held: Tensor) -> tuple[int, ...]:
    return (held.shape[0],) if rows is None else rows
