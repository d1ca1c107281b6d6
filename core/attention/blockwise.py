"""Attention of some queries to a block of the keys, and its gradient: what a ring merges into attention to all keys.

The result of a block comes with the log of the sum of its exponentials (lse), by which blocks are weighted against one another
(arXiv 2310.01889). The backward of a block takes the lse and the result of *all* blocks: with these the weights of its keys among
all keys are known without seeing the other blocks. Weights are right to the last digit of the lse: its size times the rounding of
the wide dtype.

Shape letters beside the legend: B sequences, Q queries and S keys of each; A heads in order share G key/value heads; V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import product_dtype, wide_dtype

BlockBackend = Literal["cpu_flash", "cuda_flash", "plain"]

aten = torch.ops.aten


def block_backend(dtype: torch.dtype, device: torch.device) -> BlockBackend:
    """Which kernel computes a block: torch's fused ones where there is one that tells the lse, else the definition. On the meta
    device the GPU's, whatever the dtype: a plan asks for shapes, and the definition's are whole matrices of scores."""
    if device.type == "cpu":
        return "cpu_flash"
    if device.type == "meta":
        return "cuda_flash"
    return "cuda_flash" if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) else "plain"


def block_attention(
    q_BQAD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the keys of the block, and lse: [B, Q, A, V] and [B, Q, A], both in the wide dtype.

    causal: query i sees keys 0 to i, and Q = S. At least one query and one key.
    """
    kernel, operands = _prepare(q_BQAD, k_BSGD, v_BSGV)
    out, lse = kernel.forward(*operands, scale, causal)
    wide = wide_dtype(q_BQAD.dtype)
    return out.transpose(1, 2)[..., : v_BSGV.shape[-1]].to(wide), lse.transpose(1, 2).to(wide)


def block_gradients(
    grad_BQAV: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    out_BQAV: Tensor,
    lse_BQA: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's share of the gradients of its operands q, k and v, in their shapes and the wide dtype.

    grad, out, lse: of the attention to all keys, not of this block alone.
    """
    q, k, v = operands
    kernel, (q_heads, k_heads, v_heads) = _prepare(q, k, v)
    grad, out = (_heads_first(x, 1, q_heads.shape[-1], q_heads.dtype) for x in (grad_BQAV, out_BQAV))
    lse = lse_BQA.transpose(1, 2).contiguous()
    dq, dk, dv = kernel.backward(grad, q_heads, k_heads, v_heads, out, lse, scale, causal)
    wide = wide_dtype(q.dtype)
    return _as_operand(dq, q, wide), _as_operand(dk, k, wide), _as_operand(dv, v, wide)


class _Kernel(NamedTuple):
    """Forward: (q, k, v, scale, causal) -> (out, lse). Backward: (grad, q, k, v, out, lse, scale, causal) -> (dq, dk, dv).

    All of one head size W, as many key/value heads as heads, heads first: [B, A, Q, W], [B, A, S, W]; lse [B, A, Q].
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[_Kernel, list[Tensor]]:
    """The kernel, and the operands as it wants them."""
    name = block_backend(q.dtype, q.device)
    # Zeros behind a head add nothing to a logit; those behind a value come out as zeros and are cut off. The fused kernels want
    # one head size for all three, the GPU's a multiple of eight.
    width = max(q.shape[-1], v.shape[-1])
    if name == "cuda_flash":
        width += -width % 8
    dtype = wide_dtype(q.dtype) if name == "plain" else product_dtype(q.dtype, q.device)
    share = q.shape[2] // k.shape[2]
    return _KERNELS[name], [_heads_first(x, n, width, dtype) for x, n in ((q, 1), (k, share), (v, share))]


def _heads_first(x: Tensor, share: int, width: int, dtype: torch.dtype) -> Tensor:
    """[B, n, heads, size] to [B, heads * share, n, width] in `dtype`."""
    x = x.to(dtype)
    if share > 1:
        x = x.repeat_interleave(share, 2)
    return F.pad(x, (0, width - x.shape[-1])).transpose(1, 2)


def _as_operand(gradient: Tensor, operand: Tensor, wide: torch.dtype) -> Tensor:
    """[B, A, n, W] to the operand's shape: without the padding, summed over the heads that shared a key/value head."""
    gradient = gradient.transpose(1, 2)[..., : operand.shape[-1]].to(wide)
    heads = operand.shape[2]
    if gradient.shape[2] == heads:
        return gradient
    return gradient.unflatten(2, (heads, gradient.shape[2] // heads)).sum(3)


def _logits(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    logits = q @ k.transpose(-1, -2) * scale
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(later, float("-inf"))
    return logits


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition."""
    logits = _logits(q, k, scale, causal)
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp() @ v, lse


def _plain_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition. `lse` and `out` of all keys make the weights, and the softmax's own term, those of the whole attention."""
    weights = (_logits(q, k, scale, causal) - lse[..., None]).exp()
    by_logit = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return by_logit @ k, by_logit.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def _cuda_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Without cumulative lengths the kernel reads none; without dropout it reads no state of a random generator.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, state, state[:0], scale=scale
    )


_KERNELS = {
    "plain": _Kernel(_plain, _plain_gradients),
    "cpu_flash": _Kernel(_cpu, _cpu_gradients),
    "cuda_flash": _Kernel(_cuda, _cuda_gradients),
}
