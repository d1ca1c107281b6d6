"""Output head and cross-entropy in one, in pieces of tokens: the logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.run import IGNORE
from core.kernels.backend import product_dtype, wide_dtype

# Logits that exist at a time: enough tokens for fast products, little beside the model.
_CHUNK_BYTES = 64 << 20


def head_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], float32 scalar; label -100 counts nothing.

    Forward computes the gradients as well, for an outer gradient of 1, since they need the same logits.
    """
    if not torch.is_grad_enabled():
        return _over_chunks(hidden_TH, weight_VH, labels_T, None)
    return _HeadCrossEntropy.apply(hidden_TH, weight_VH, labels_T)


def head_cross_entropy_reference(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """The definition of `head_cross_entropy`."""
    logits = F.linear(hidden_TH, weight_VH)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(wide, labels_T, ignore_index=IGNORE, reduction="sum")


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = wide_dtype(hidden.dtype)
        grads = (hidden.new_empty(hidden.shape), weight.new_zeros(weight.shape, dtype=wide))
        loss = _over_chunks(hidden, weight, labels, grads)
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        # Rounding the factor itself to bfloat16 would scale the whole model's gradient by up to 0.2 percent.
        return (grad_hidden * scale[None]).to(grad_hidden.dtype), (grad_weight * scale).to(ctx.weight_dtype), None


def _over_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, grads: tuple[Tensor, Tensor] | None) -> Tensor:
    """The summed loss; where `grads` is given, the gradients of hidden are written to it and those of the weight added."""
    wide, product = wide_dtype(hidden.dtype), product_dtype(hidden.dtype, hidden.device)
    loss = hidden.new_zeros((), dtype=wide)
    matrix = weight.to(product)
    chunk = max(64, _CHUNK_BYTES // (weight.shape[0] * loss.element_size()))
    for start in range(0, hidden.shape[0], chunk):
        piece = slice(start, start + chunk)
        rows, target = hidden[piece].to(product), labels[piece]
        valid = target != IGNORE
        index = torch.where(valid, target, 0)[:, None]
        logits = (rows @ matrix.T).to(hidden.dtype).to(wide)
        largest = logits.amax(-1, keepdim=True)
        of_label = logits.gather(1, index) - largest
        exponentials = logits.sub_(largest).exp_()
        total = exponentials.sum(-1, keepdim=True)
        loss += ((total.log() - of_label)[:, 0] * valid).sum()
        if grads is None:
            continue
        probability = exponentials.mul_(valid[:, None] / total)
        probability.scatter_add_(1, index, -valid[:, None].to(wide))
        grad = probability.to(product)
        grads[0][piece] = grad @ matrix
        if grads[1].dtype == product:
            grads[1].addmm_(grad.T, rows)
        else:
            grads[1].add_(grad.T @ rows)
    return loss
