"""Causal attention over packed sequences: which kernel, and how sequences are handed to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.packing import Packing
from core.kernels.backend import product_dtype


def causal_attention(q_TAD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packing: Packing, scale: float) -> Tensor:
    """softmax(scale * q k^T) v within each sequence, no token seeing a later one: [T, A, V].

    q: [T, A, D]; k: [T, G, D]; v: [T, G, V]; A heads in order share G key/value heads, A / G each. Torch's fused attention
    over a batch where all sequences have one length, sequence by sequence otherwise.
    """
    out = attend(*attention_operands(q_TAD, k_TGD, v_TGV), packing, scale)
    return out[..., : v_TGV.shape[2]].to(q_TAD.dtype)


def attention_operands(q_TAD: Tensor, k_TGD: Tensor, v_TGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `attend` takes: all in the dtype of products, and v widened to [T, G, D].

    The fused CPU and GPU kernels want one head size for all three: values are widened by zeros, which add nothing.
    """
    product = product_dtype(q_TAD.dtype, q_TAD.device)
    if v_TGV.shape[2] < q_TAD.shape[2]:
        v_TGV = F.pad(v_TGV, (0, q_TAD.shape[2] - v_TGV.shape[2]))
    return q_TAD.to(product), k_TGD.to(product), v_TGV.to(product)


def attend(q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, scale: float) -> Tensor:
    """`causal_attention` of its operands: [T, A, D] in their dtype. Saved are they, the result, and a number for each of its rows."""
    assert sum(packing.lengths) == q_TAD.shape[0], "the packing is of another batch"
    if q_TAD.shape[0] == 0:
        return q_TAD.new_zeros(0, q_TAD.shape[1], v_TGD.shape[2]) + 0.0 * (q_TAD.sum() + k_TGD.sum() + v_TGD.sum())
    if packing.uniform:
        return _batch(q_TAD, k_TGD, v_TGD, packing.lengths[0], scale)
    lengths = list(packing.lengths)
    pieces = zip(q_TAD.split(lengths), k_TGD.split(lengths), v_TGD.split(lengths), lengths, strict=True)
    return torch.cat([_batch(q, k, v, length, scale) for q, k, v, length in pieces])


def causal_attention_reference(q_TAD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packing: Packing, scale: float) -> Tensor:
    """The definition of `causal_attention`: the whole [T, T] matrix of each head, with a mask."""
    share = q_TAD.shape[1] // k_TGD.shape[1]
    k, v = k_TGD.repeat_interleave(share, 1), v_TGV.repeat_interleave(share, 1)
    lengths = torch.tensor(packing.lengths, device=q_TAD.device)
    sequence = torch.repeat_interleave(torch.arange(len(packing.lengths), device=q_TAD.device), lengths)
    order = torch.arange(q_TAD.shape[0], device=q_TAD.device)
    seen = (sequence[:, None] == sequence[None, :]) & (order[:, None] >= order[None, :])
    logits = torch.einsum("tad,sad->ats", q_TAD, k) * scale
    return torch.einsum("ats,sad->tad", logits.masked_fill(~seen, float("-inf")).softmax(-1), v)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's fused attention of [batch, heads, tokens, size]."""
    if q.is_meta:
        # Torch would fall back to the definition there, which keeps whole matrices of scores; a plan asks for what a GPU keeps.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _batch(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """Attention over sequences of `length` tokens each, behind one another."""
    heads = q.shape[1]
    q, k, v = (x.view(-1, length, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != heads:
        k, v = k.repeat_interleave(heads // k.shape[1], 1), v.repeat_interleave(heads // v.shape[1], 1)
    out = _fused(q, k, v, scale)
    return out.transpose(1, 2).reshape(-1, heads, out.shape[-1])
