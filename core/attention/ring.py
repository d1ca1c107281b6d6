"""Attention over sequences that a ring of ranks has cut: keys and values travel, queries and results stay (arXiv 2310.01889).

Every place of the ring holds a chunk from the front of each sequence and its mirror from the back. What a causal mask leaves of
the scores between the queries of one place and the keys of another is then always one rectangle: of an earlier place all see the
front chunk, of a later place the back chunk sees all, and only at home there is a triangle. No masked score is ever computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from core.attention.blockwise import block_attention, block_gradients
from core.attention.packing import held_pieces
from core.kernels.backend import wide_dtype
from core.parallel.groups import Group
from core.parallel.point_to_point import Shift, ring_shift

KEYS, GRADIENTS = 0, 1  # tags of the two messages that are under way together in the backward


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Of `count` sequences behind one another, `length` tokens of each held from row `begin` on: those `inside` each."""

    begin: int
    count: int
    length: int
    inside: slice

    @property
    def tokens(self) -> int:
        """How many of each sequence."""
        return len(range(*self.inside.indices(self.length)))

    def of(self, x: Tensor) -> Tensor:
        """A view of them in a tensor of tokens: [T, …] -> [count, tokens, …]."""
        return x[self.begin : self.begin + self.count * self.length].unflatten(0, (self.count, self.length))[
            :, self.inside
        ]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A rectangle of scores, or a triangle, in each of some sequences of one length: queries of one place, keys of another."""

    queries: Rows
    keys: Rows
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What every place of a ring of `size` holds. runs: for each run of sequences of one length their number, and by place the
    (front, back) tokens held of each. tokens: by place, of all sequences."""

    size: int
    runs: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    tokens: tuple[int, ...]

    def blocks(self, place: int, source: int) -> Iterator[Block]:
        """What the queries of `place` need of the keys of `source`, run by run; empty blocks left out."""
        query_row = key_row = 0
        for count, held in self.runs:
            (front, back), (source_front, source_back) = held[place], held[source]
            queries = slice(front if source > place else 0, front + back)
            keys = slice(0, source_front if source < place else source_front + source_back)
            block = Block(
                queries=Rows(begin=query_row, count=count, length=front + back, inside=queries),
                keys=Rows(begin=key_row, count=count, length=source_front + source_back, inside=keys),
                causal=source == place,
            )
            if block.queries.tokens and block.keys.tokens:
                yield block
            query_row += count * (front + back)
            key_row += count * (source_front + source_back)


def cut_for_ring(lengths: Sequence[int], size: int) -> Cut:
    """How a ring of `size` places cuts sequences of these lengths; every place knows it of all others."""
    runs = []
    for length, same in groupby(lengths):
        runs.append((len(tuple(same)), tuple(_front_and_back(length, place, size) for place in range(size))))
    tokens = tuple(sum(count * sum(held[place]) for count, held in runs) for place in range(size))
    return Cut(size=size, runs=tuple(runs), tokens=tokens)


def ring_attention(
    q_TAD: Tensor, k_TGD: Tensor, v_TGV: Tensor, lengths: Sequence[int], scale: float, ring: Group
) -> Tensor:
    """Causal attention within whole sequences for the tokens that my place in the ring holds of them: [T, A, V].

    lengths: of the whole sequences. T: what my place holds, sequence by sequence, which may be none.
    Forward sends k and v to the next place size - 1 times; backward as often again, with the gradients of k and v of the place
    whose keys they are, summed in the wide dtype. Each transfer is under way while a block is computed. Zero bytes are not sent.
    """
    cut = cut_for_ring(lengths, ring.size)
    assert cut.tokens[ring.position] == q_TAD.shape[0], "the packing is of another batch"
    return _Ring.apply(q_TAD, k_TGD, v_TGV, cut, scale, ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cut: Cut, scale: float, ring: Group) -> Tensor:
        wide = wide_dtype(q.dtype)
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
        for source, keys, values in _in_turn(k, v, cut, ring):
            for block in cut.blocks(ring.position, source):
                rows, seen = block.queries, block.keys
                found = block_attention(rows.of(q), seen.of(keys), seen.of(values), scale, causal=block.causal)
                _merge(rows.of(out), rows.of(lse), *found)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.cut, ctx.scale, ctx.ring = cut, scale, ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        cut, ring, wide = ctx.cut, ctx.ring, wide_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        home = k.new_empty(0, dtype=wide)
        under_way: Shift | None = None
        for source, keys, values in _in_turn(k, v, cut, ring):
            flat = keys.new_zeros(keys.numel() + values.numel(), dtype=wide)
            dk, dv = _unpacked(flat, k, v)
            for block in cut.blocks(ring.position, source):
                rows, seen = block.queries, block.keys
                operands = (rows.of(q), seen.of(keys), seen.of(values))
                of_block = block_gradients(
                    rows.of(grads[0]), operands, rows.of(out), rows.of(lse), ctx.scale, causal=block.causal
                )
                for total, part in zip((rows.of(dq), seen.of(dk), seen.of(dv)), of_block, strict=True):
                    total.add_(part)
            if source == ring.position:
                home = flat
                continue
            # The sum of a place's gradients starts at the place behind it, goes the way of its keys, and ends at home.
            if under_way is not None:
                flat += under_way.wait()
            under_way = ring_shift(flat, _elements(cut, source - 1, k, v), ring, tag=GRADIENTS)
        if under_way is not None:
            home += under_way.wait()
        dk, dv = _unpacked(home, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _in_turn(k: Tensor, v: Tensor, cut: Cut, ring: Group) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(place, its keys, its values) of every place: mine, then backwards round the ring; the next are under way meanwhile."""
    held = torch.cat([k.flatten(), v.flatten()])
    for step in range(ring.size):
        source = (ring.position - step) % ring.size
        coming = None
        if step < ring.size - 1:
            coming = ring_shift(held, _elements(cut, source - 1, k, v), ring, tag=KEYS)
        yield source, *_unpacked(held, k, v)
        if coming is not None:
            held = coming.wait()


def _elements(cut: Cut, place: int, k: Tensor, v: Tensor) -> int:
    """How many numbers the keys and values of a place are; -1 is the last place."""
    return cut.tokens[place % cut.size] * (k.shape[1] * k.shape[2] + v.shape[1] * v.shape[2])


def _unpacked(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values in one message, which may be of another place: rows shaped like those of k and v."""
    width = k.shape[1] * k.shape[2]
    tokens = flat.numel() // (width + v.shape[1] * v.shape[2])
    keys, values = flat[: tokens * width], flat[tokens * width :]
    return keys.view(tokens, *k.shape[1:]), values.view(tokens, *v.shape[1:])


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds one block to the attention so far, in place: both are means over keys, and exp(lse) is what their weights sum to."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _front_and_back(length: int, place: int, size: int) -> tuple[int, int]:
    """The tokens that a place holds of a sequence: of its first half, and of its second."""
    pieces = held_pieces(length, (place, size), (0, 1))
    front = sum(stop - start for start, stop in pieces if stop <= length // 2)
    return front, sum(stop - start for start, stop in pieces) - front
