"""Context parallelism: attention over sequences whose tokens lie on several ranks, in three ways behind one function.

cp is folded into `ring` and `heads` (core/attention/packing.py says which tokens lie where). Ranks of `heads` trade heads for
tokens, which costs least while heads last; the places of `ring` pass keys and values on, behind the computation, for any number
of heads. A group of one rank in either is that way left out; with both, heads are traded inside and keys travel outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.attention.heads import TokenOrder, gather_heads, gather_tokens, token_order
from core.attention.packing import Packing
from core.attention.ring import ring_attention, whole_keys
from core.attention.softmax import attend, attention_operands
from core.memory.recompute import recompute
from core.parallel.groups import Group


def context_attention(
    q_TAD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    packing: Packing,
    scale: float,
    *,
    ring: Group,
    heads: Group,
    shared_key: Tensor | None = None,
    again: bool = False,
) -> Tensor:
    """softmax(scale * q k^T) v within each whole sequence, no token seeing a later one, for my own tokens: [T, A, V].

    q: [T, A, D]; k: [T, G, D]; v: [T, G, V]; A heads in order share G key/value heads, A / G each. shared_key: [T, S], the end of
    every head's key; k is then [T, G, D - S]. It travels once for all heads, and its gradient is summed over them. T: the tokens of
    packing.index_T, which differ in number between ranks and may be none; every rank takes part all the same, forward and
    backward. One all-to-all over `heads` before and one after, each way; `ring` as in `ring_attention`. With one rank in
    both it is `causal_attention`.
    again: in the backward all but the exchange of heads is made again from what that brought.
    Raises ValueError where heads.size divides not A, or neither divides G nor is a multiple of it.
    """
    assert packing.index_T.shape[0] == q_TAD.shape[0], "the packing is of another batch"
    form = (v_TGV.shape[-1], v_TGV.dtype)
    steps = ContextAttention(packing, scale, ring=ring, heads=heads, values=form)
    shared = () if shared_key is None else (shared_key,)
    arrived = steps.arrive(q_TAD, k_TGD, v_TGV, *shared)
    return steps.home(recompute(steps.whole, *arrived) if again else steps.whole(*arrived))


class ContextAttention:
    """`context_attention` of one batch in steps, for whoever makes one of them again. values: head size and dtype of v."""

    def __init__(
        self, packing: Packing, scale: float, *, ring: Group, heads: Group, values: tuple[int, torch.dtype]
    ) -> None:
        self.packing, self.scale, self.ring, self.heads, self.values = packing, scale, ring, heads, values
        self.order: TokenOrder | None = None
        if heads.size > 1:
            self.order = token_order(packing.lengths, ring, heads, packing.index_T.device)

    def arrive(self, q: Tensor, k: Tensor, v: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """The same of the tokens and heads that my place in the ring computes. One all-to-all over `heads`."""
        if self.order is None:
            return q, k, v, *shared
        q, k, v, key = gather_tokens(q, k, v, self.order, self.heads, shared_key_TS=shared[0] if shared else None)
        return (q, k, v) if key is None else (q, k, v, key)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """What the attention itself takes and keeps."""
        if self.ring.size > 1:
            return q, k, v, *shared
        return attention_operands(q, whole_keys(k, shared[0]) if shared else k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *shared: Tensor) -> Tensor:
        """The attention of `operands`."""
        if self.ring.size > 1:
            key = shared[0] if shared else None
            return ring_attention(q, k, v, self.packing.lengths, self.scale, self.ring, shared_key_TS=key)
        size, dtype = self.values
        return attend(q, k, v, self.packing, self.scale)[..., :size].to(dtype)

    def whole(self, *arrived: Tensor) -> Tensor:
        """The attention of what has arrived."""
        return self.attend(*self.operands(*arrived))

    def home(self, out: Tensor) -> Tensor:
        """All heads of my own tokens: [T, A, V]. One all-to-all over `heads`."""
        return out if self.order is None else gather_heads(out, self.order, self.heads)
