"""Context parallelism: attention over sequences whose tokens lie on several ranks, in three ways behind one function.

cp is folded into `ring` and `heads` (core/attention/packing.py says which tokens lie where). Ranks of `heads` trade heads for
tokens, which costs least while heads last; the places of `ring` pass keys and values on, behind the computation, for any number
of heads. A group of one rank in either is that way left out; with both, heads are traded inside and keys travel outside.
"""

from __future__ import annotations

from torch import Tensor

from core.attention.heads import gather_heads, gather_tokens, token_order
from core.attention.packing import Packing
from core.attention.ring import ring_attention
from core.attention.softmax import causal_attention
from core.parallel.groups import Group


def context_attention(
    q_TAD: Tensor, k_TGD: Tensor, v_TGV: Tensor, packing: Packing, scale: float, *, ring: Group, heads: Group
) -> Tensor:
    """softmax(scale * q k^T) v within each whole sequence, no token seeing a later one, for my own tokens: [T, A, V].

    q: [T, A, D]; k: [T, G, D]; v: [T, G, V]; A heads in order share G key/value heads, A / G each. T: the tokens of
    packing.index_T, which differ in number between ranks and may be none; every rank takes part all the same, forward and
    backward. One all-to-all over `heads` before and one after, each way; `ring` as in `ring_attention`. With one rank in
    both it is `causal_attention`.
    Raises ValueError where heads.size divides not A, or neither divides G nor is a multiple of it.
    """
    assert packing.index_T.shape[0] == q_TAD.shape[0], "the packing is of another batch"
    if heads.size == 1:
        return _over_ring(q_TAD, k_TGD, v_TGV, packing, scale, ring)
    order = token_order(packing.lengths, ring, heads, q_TAD.device)
    q, k, v = gather_tokens(q_TAD, k_TGD, v_TGV, order, heads)
    return gather_heads(_over_ring(q, k, v, packing, scale, ring), order, heads)


def _over_ring(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, ring: Group) -> Tensor:
    """The attention of all tokens that my place in the ring holds."""
    if ring.size == 1:
        return causal_attention(q, k, v, packing, scale)
    return ring_attention(q, k, v, packing.lengths, scale, ring)
