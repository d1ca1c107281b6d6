"""Heads for sequence and back (arXiv 2309.14509): each rank trades most heads of its own tokens for all tokens of a few heads.

Shape letters beside the legend: T my tokens, N the tokens of all ranks of the group; A query and G key/value heads, a and g of
them on one rank; D and V head sizes of keys and values, S of the end that all keys share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.attention.packing import held_tokens
from core.parallel.collectives import all_to_all
from core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class TokenOrder:
    """How the tokens of a group that exchanges heads lie: as they arrive, rank by rank, and as attention reads them, by sequence.

    counts: tokens of every rank. from_ranks_N: int64, where the N tokens in order of sequence lie in the order of ranks;
    to_ranks_N: the reverse. Both None where the two orders are the same.
    """

    counts: tuple[int, ...]
    from_ranks_N: Tensor | None
    to_ranks_N: Tensor | None


def token_order(lengths: Sequence[int], ring: Group, heads: Group, device: torch.device) -> TokenOrder:
    """The order of the tokens of my place in the ring, from the lengths of the whole sequences alone; nothing is communicated."""
    place = (ring.position, ring.size)
    held = [[held_tokens(n, place, (rank, heads.size)) for n in lengths] for rank in range(heads.size)]
    counts = tuple(sum(of_rank) for of_rank in held)
    if len(lengths) < 2:
        return TokenOrder(counts=counts, from_ranks_N=None, to_ranks_N=None)
    sizes_RS = torch.tensor(held)  # [ranks, sequences]
    starts_RS = (sizes_RS.flatten().cumsum(0) - sizes_RS.flatten()).view_as(sizes_RS)
    sizes, starts = sizes_RS.T.flatten(), starts_RS.T.flatten()  # by sequence
    moved = starts - (sizes.cumsum(0) - sizes)
    from_ranks = torch.arange(sum(counts)) + moved.repeat_interleave(sizes)
    to_ranks = torch.empty_like(from_ranks)
    to_ranks[from_ranks] = torch.arange(sum(counts))
    return TokenOrder(counts=counts, from_ranks_N=from_ranks.to(device), to_ranks_N=to_ranks.to(device))


def check_heads(query_heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ValueError where `ranks` ranks cannot exchange heads: they must divide the query heads, and divide the key/value
    heads or be a multiple of them."""
    if query_heads % ranks:
        raise ValueError(f"{query_heads} query heads do not divide over the {ranks} ranks that exchange heads")
    if kv_heads % ranks and ranks % kv_heads:
        rule = "they must be a multiple of the ranks or divide them"
        raise ValueError(
            f"{kv_heads} key/value heads cannot be shared by the {ranks} ranks that exchange heads: {rule}"
        )


def gather_tokens(
    q_TAD: Tensor, k_TGD: Tensor, v_TGV: Tensor, order: TokenOrder, heads: Group, *, shared_key_TS: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """All tokens of the group, by sequence, of the heads that are mine: [N, a, D], [N, g, D], [N, g, V], and the shared key [N, S].

    a = A / ranks. g = G / ranks, or 1 where there are more ranks than key/value heads: then several ranks get the same head,
    and its gradient is the sum over them. The key that all heads share goes to every rank once, and its gradient is the sum over
    the ranks. One all-to-all forward, of all together, and one backward.
    """
    ranks, tokens = heads.size, q_TAD.shape[0]
    assert order.counts[heads.position] == tokens, "the packing is of another batch"
    check_heads(q_TAD.shape[1], k_TGD.shape[1], ranks)
    if k_TGD.shape[1] < ranks:
        k_TGD, v_TGV = (x.repeat_interleave(ranks // x.shape[1], 1) for x in (k_TGD, v_TGV))
    shapes = [(x.shape[1] // ranks, x.shape[2]) for x in (q_TAD, k_TGD, v_TGV)]
    widths = [of_mine * size for of_mine, size in shapes]
    parts = [x.reshape(tokens, ranks, width) for x, width in zip((q_TAD, k_TGD, v_TGV), widths, strict=True)]
    if shared_key_TS is not None:
        widths.append(shared_key_TS.shape[1])
        parts.append(shared_key_TS[:, None].expand(-1, ranks, -1))
    rows = torch.cat([x.transpose(0, 1) for x in parts], -1).flatten(0, 1)
    arrived = _reorder(all_to_all(rows, (tokens,) * ranks, order.counts, heads), order.from_ranks_N, order.to_ranks_N)
    q, k, v, *shared = arrived.split(widths, 1)
    q, k, v = (x.unflatten(1, shape) for x, shape in zip((q, k, v), shapes, strict=True))
    return q, k, v, shared[0] if shared else None


def gather_heads(out_NaV: Tensor, order: TokenOrder, heads: Group) -> Tensor:
    """All heads of my own tokens: [N, a, V], by sequence, to [T, A, V]. One all-to-all forward and one backward."""
    ranks, tokens = heads.size, order.counts[heads.position]
    of_mine, size = out_NaV.shape[1:]
    rows = _reorder(out_NaV, order.to_ranks_N, order.from_ranks_N)
    arrived = all_to_all(rows, order.counts, (tokens,) * ranks, heads)
    return arrived.view(ranks, tokens, of_mine, size).transpose(0, 1).reshape(tokens, ranks * of_mine, size)


def _reorder(x: Tensor, index: Tensor | None, back: Tensor | None) -> Tensor:
    """The rows at `index`, a permutation that `back` reverses."""
    return x if index is None else _Reorder.apply(x, index, back)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None
