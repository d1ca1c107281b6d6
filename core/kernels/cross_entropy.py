"""Output head and cross-entropy in one, in pieces of tokens: the logits of all tokens never exist at once, and where tp cuts the
vocabulary those of the whole vocabulary never exist on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.run import IGNORE
from core.kernels.backend import kernels_backend, product_dtype, wide_dtype
from core.kernels.embedding import refuse_outside
from core.parallel.collectives import all_reduce_max, all_reduce_sum
from core.parallel.groups import Group
from core.state.box import ends

# Logits that exist at a time: enough tokens for fast products, little beside the model. A GPU needs more of them before a product
# takes longer than reading the head and adding to its gradient, which every chunk does anew.
_CHUNK_BYTES = 64 << 20
_CHUNK_BYTES_OF_GPU = 512 << 20
# Where the label of a row is on another rank, or counts nothing.
_ELSEWHERE = -1


@dataclass(frozen=True, kw_only=True)
class VocabularyCut:
    """How the ranks of tp share a head: each holds a stretch of the vocabulary and counts the loss of a stretch of the tokens.

    vocab: rows of the whole [vocab, hidden] matrix. rows: tokens whose loss each rank counts, in the order of the ranks.
    """

    tp: Group
    vocab: int
    rows: tuple[int, ...]

    @property
    def held(self) -> range:
        """The vocabulary that this rank holds: `stretch((vocab, hidden), 0, position, size)`."""
        bounds = ends(self.vocab, self.tp.size)
        return range(bounds[self.tp.position], bounds[self.tp.position + 1])

    def chunks(self, logit_bytes: int, chunk_bytes: int) -> Iterator[tuple[slice, slice]]:
        """Tokens that are taken at a time, and which of those are counted here.

        As many chunks on every rank, since all meet in each: the largest stretch of the vocabulary decides, not this rank's.
        """
        widest = max(1, -(-self.vocab // self.tp.size))
        step = max(64, chunk_bytes // (widest * logit_bytes))
        first = sum(self.rows[: self.tp.position])
        last = first + self.rows[self.tp.position]
        for start in range(0, sum(self.rows), step):
            yield slice(start, start + step), slice(max(0, first - start), max(0, last - start))


def head_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, *, cut: VocabularyCut | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], float32 scalar; label -100 counts nothing.

    With a cut: hidden and labels of all tokens, equal on all ranks of tp, and the rows `cut.held` of the weight; the sum is over
    this rank's own `cut.rows`, so that the shares of all ranks add up to the whole. Every rank of tp calls it with as many
    tokens: per chunk of them two all-reduces over tp, of one and of two numbers per token.
    Forward computes the gradients as well, since they need the same logits, for an outer gradient of 1: those of the sum of all
    ranks' shares, which all ranks have to scale alike. The weight's is complete; hidden's is the part that comes through
    this rank's vocabulary, and the sum over tp of those parts is the gradient.
    Raises ValueError where the shapes are not what the cut says; a label outside the vocabulary is a RuntimeError.
    """
    if cut is None:
        alone = Group(ranks=(0,), position=0, handle=None)
        cut = VocabularyCut(tp=alone, vocab=weight_VH.shape[0], rows=(hidden_TH.shape[0],))
    _check(hidden_TH, weight_VH, labels_T, cut)
    refuse_outside(torch.where(labels_T != IGNORE, labels_T, 0), cut.vocab)
    if not torch.is_grad_enabled():
        return _over_chunks(hidden_TH, weight_VH, labels_T, cut, None)
    return _HeadCrossEntropy.apply(hidden_TH, weight_VH, labels_T, cut)


def head_cross_entropy_reference(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """The definition of `head_cross_entropy` without a cut, and of the sum of all ranks' shares with one."""
    logits = F.linear(hidden_TH, weight_VH)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(wide, labels_T, ignore_index=IGNORE, reduction="sum")


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, cut: VocabularyCut) -> None:
    """ValueError where an operand is not placed as `cut` says: a whole matrix under a cut would count its vocabulary twice."""
    held, tokens = cut.held, sum(cut.rows)
    if weight.shape[0] != len(held):
        raise ValueError(
            f"a head of {weight.shape[0]} rows is not the stretch [{held.start}, {held.stop}) of a vocabulary of {cut.vocab} "
            f"that rank {cut.tp.position} of {cut.tp.size} holds"
        )
    if len(cut.rows) != cut.tp.size or min(cut.rows) < 0:
        raise ValueError(f"rows={cut.rows} must be {cut.tp.size} counts, one per rank of tp")
    if hidden.shape[0] != tokens or labels.shape[0] != tokens:
        raise ValueError(
            f"rows={cut.rows} are {tokens} tokens, but hidden has {hidden.shape[0]} and labels {labels.shape[0]}"
        )


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, cut: VocabularyCut) -> Tensor:
        wide = wide_dtype(hidden.dtype)
        grads = (hidden.new_empty(hidden.shape), weight.new_zeros(weight.shape, dtype=wide))
        loss = _over_chunks(hidden, weight, labels, cut, grads)
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        # Rounding the factor itself to bfloat16 would scale the whole model's gradient by up to 0.2 percent.
        of_hidden = (grad_hidden * scale[None]).to(grad_hidden.dtype)
        return of_hidden, (grad_weight * scale).to(ctx.weight_dtype), None, None


def _over_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, cut: VocabularyCut, grads: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The summed loss; where `grads` is given, the gradients of hidden are written to it and those of the weight added."""
    wide, product = wide_dtype(hidden.dtype), product_dtype(hidden.dtype, hidden.device)
    loss = hidden.new_zeros((), dtype=wide)
    matrix, held = weight.to(product), cut.held
    by_kernel = wide == torch.float32 and kernels_backend(hidden.device) == "triton"
    over_rows = _rows_by_kernel if by_kernel else _rows_by_reference
    chunk_bytes = _CHUNK_BYTES if hidden.device.type == "cpu" else _CHUNK_BYTES_OF_GPU
    for piece, counted in cut.chunks(loss.element_size(), chunk_bytes):
        rows, target = hidden[piece].to(product), labels[piece]
        valid = target != IGNORE
        here = valid & (target >= held.start) & (target < held.stop)
        label = torch.where(here, target - held.start, _ELSEWHERE)
        logits = (rows @ matrix.T).to(hidden.dtype)
        per_row, probability = over_rows(logits, label, valid, cut.tp, gradient=grads is not None)
        loss += per_row[counted].sum()
        if grads is None or probability is None:
            continue
        grad = probability.to(product)
        grads[0][piece] = grad @ matrix
        if grads[1].dtype == product:
            grads[1].addmm_(grad.T, rows)
        else:
            grads[1].add_(grad.T @ rows)
    return loss


def _rows_by_reference(
    logits_CV: Tensor, label_C: Tensor, valid_C: Tensor, tp: Group, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of every row [C], zero where not valid, and with `gradient` that of the logits [C, V]: softmax less one at the label.

    label_C: the column of the label, -1 where it is not among mine.
    """
    here, index = (label_C >= 0)[:, None], label_C.clamp(min=0)[:, None]
    exponentials, total, of_label = _normalised(logits_CV.to(wide_dtype(logits_CV.dtype)), index, here, tp)
    loss = (total.log() - of_label)[:, 0] * valid_C
    if not gradient:
        return loss, None
    probability = exponentials.mul_(valid_C[:, None] / total)
    if probability.shape[1]:
        probability.scatter_add_(1, index, -here.to(probability.dtype))
    return loss, probability


def _rows_by_kernel(
    logits_CV: Tensor, label_C: Tensor, valid_C: Tensor, tp: Group, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """`_rows_by_reference`, with the same all-reduces; the gradient takes the place and the dtype of the logits."""
    from core.kernels.triton.cross_entropy import gradient_, loss_and_gradient_, row_sums

    if tp.size == 1:
        return loss_and_gradient_(logits_CV, label_C, valid_C, gradient=gradient), logits_CV if gradient else None
    largest, total, of_label = row_sums(logits_CV, label_C)
    top = all_reduce_max(largest[:, None], tp)
    shares = [(total * (largest - top[:, 0]).exp()), torch.where(label_C >= 0, of_label - top[:, 0], 0)]
    both = all_reduce_sum(torch.stack(shares, dim=-1), tp)
    total, of_label = both.unbind(-1)
    if gradient:
        gradient_(logits_CV, label_C, valid_C, top[:, 0].contiguous(), total.contiguous())
    return (total.log() - of_label) * valid_C, logits_CV if gradient else None


def _normalised(logits: Tensor, index: Tensor, here: Tensor, tp: Group) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits - largest) of my vocabulary [C, V], in place, and of the whole one its sum [C, 1] and the label's logit - largest.

    index, here: [C, 1], the column of each label, and whether it is among mine. A rank without vocabulary only takes part.
    """
    if logits.shape[1]:
        largest = all_reduce_max(logits.amax(-1, keepdim=True), tp)
        of_label = torch.where(here, logits.gather(1, index) - largest, 0)
    else:
        largest = all_reduce_max(logits.new_full(here.shape, -torch.inf), tp)
        of_label = torch.zeros_like(largest)
    exponentials = logits.sub_(largest).exp_()
    both = all_reduce_sum(torch.cat([exponentials.sum(-1, keepdim=True), of_label], dim=-1), tp)
    return exponentials, both[:, :1], both[:, 1:]
