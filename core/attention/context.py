"""Context parallelism: attention over sequences whose tokens lie on several ranks, in three ways behind one function.

cp is folded into `ring` and `heads` (core/attention/packing.py says which tokens lie where). Ranks of `heads` trade heads for
tokens, which costs least while heads last; the places of `ring` pass keys and values on, behind the computation, for any number
of heads. A group of one rank in either is that way left out; with both, heads are traded inside and keys travel outside.
"""

from __future__ import annotations

from torch import Tensor

from core.attention.heads import gather_heads, gather_tokens, token_order
from core.attention.packing import Packing
from core.attention.ring import ring_attention, whole_keys
from core.attention.softmax import causal_attention
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
) -> Tensor:
    """softmax(scale * q k^T) v within each whole sequence, no token seeing a later one, for my own tokens: [T, A, V].

    q: [T, A, D]; k: [T, G, D]; v: [T, G, V]; A heads in order share G key/value heads, A / G each. shared_key: [T, S], the end of
    every head's key; k is then [T, G, D - S]. It travels once for all heads, and its gradient is summed over them. T: the tokens of
    packing.index_T, which differ in number between ranks and may be none; every rank takes part all the same, forward and
    backward. One all-to-all over `heads` before and one after, each way; `ring` as in `ring_attention`. With one rank in
    both it is `causal_attention`.
    Raises ValueError where heads.size divides not A, or neither divides G nor is a multiple of it.
    """
    assert packing.index_T.shape[0] == q_TAD.shape[0], "the packing is of another batch"
    if heads.size == 1:
        return _over_ring(q_TAD, k_TGD, v_TGV, shared_key, packing, scale, ring)
    order = token_order(packing.lengths, ring, heads, q_TAD.device)
    q, k, v, shared = gather_tokens(q_TAD, k_TGD, v_TGV, order, heads, shared_key_TS=shared_key)
    return gather_heads(_over_ring(q, k, v, shared, packing, scale, ring), order, heads)


def _over_ring(
    q: Tensor, k: Tensor, v: Tensor, shared: Tensor | None, packing: Packing, scale: float, ring: Group
) -> Tensor:
    """The attention of all tokens that my place in the ring holds."""
    if ring.size > 1:
        return ring_attention(q, k, v, packing.lengths, scale, ring, shared_key_TS=shared)
    return causal_attention(q, k if shared is None else whole_keys(k, shared), v, packing, scale)
