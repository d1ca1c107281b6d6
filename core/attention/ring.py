"""Attention over sequences that a ring of ranks has cut: keys and values travel, queries and results stay (arXiv 2310.01889).

Every place of the ring holds a chunk from the front of each sequence and its mirror from the back. What a causal mask leaves of
the scores between the queries of one place and the keys of another is then always one rectangle: of an earlier place all see the
front chunk, of a later place the back chunk sees all, and only at home there is a triangle. No masked score is ever computed.

So every other place reads the front chunk of a place, and earlier places alone its back chunk. Fronts go up the ring, all the way
round; backs go down, to place 0. The gradients of a chunk are summed along the way of its keys, every place adding its own, and
from the last one go home: those of a front to the next place up, those of a back in one message from place 0. Never does a chunk or
a sum of gradients go where nobody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.attention.blockwise import block_attention, block_gradients
from core.attention.cut import Block, Cut, Half, Rows, cut_for_ring
from core.kernels.backend import wide_dtype
from core.parallel.groups import Group
from core.parallel.point_to_point import Exchange, Hop, start_hops

# Tags of the first message of each kind: two of keys and three of gradients are under way together.
KEYS, GRADIENTS = 0, 2


class Keys(NamedTuple):
    """Of some tokens: keys of every head [T, G, D], values [T, G, V], and the end that is the same in every head's key [T, S].

    Gradients of these lie in the same form.
    """

    k: Tensor
    v: Tensor
    shared: Tensor

    @property
    def width(self) -> int:
        """How many numbers a token has."""
        return sum(x.shape[1:].numel() for x in self)

    def of(self, rows: Rows) -> Keys:
        """Views of some of the tokens: [T, …] -> [count, tokens, …]."""
        return Keys(*map(rows.of, self))

    def packed(self, rows: Iterable[Rows]) -> Tensor:
        """Some of the tokens as one message."""
        parts = [self.of(some) for some in rows]
        return torch.cat([self.k.new_empty(0), *(x.flatten() for same in zip(*parts, strict=True) for x in same)])

    def unpacked(self, message: Tensor) -> Keys:
        """Views in a message, whose tokens are as wide as mine; of its dtype."""
        shapes = [x.shape[1:] for x in self]
        tokens = message.numel() // self.width
        parts = message.split([tokens * shape.numel() for shape in shapes])
        return Keys(*(part.view(tokens, *shape) for part, shape in zip(parts, shapes, strict=True)))


def whole_keys(k: Tensor, shared: Tensor) -> Tensor:
    """Every head's key with the end that all share: […, G, D] and […, S] to […, G, D + S]."""
    if not shared.shape[-1]:
        return k
    return torch.cat([k, shared.unsqueeze(-2).expand(*k.shape[:-1], -1)], dim=-1)


def ring_attention(
    q_TAD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    lengths: Sequence[int],
    scale: float,
    ring: Group,
    *,
    shared_key_TS: Tensor | None = None,
) -> Tensor:
    """Causal attention within whole sequences for the tokens that my place in the ring holds of them: [T, A, V].

    lengths: of the whole sequences. T: what my place holds, sequence by sequence, which may be none. shared_key: the end of every
    head's key, which k then is without; it travels once for all heads.
    Forward sends the keys and values of a front chunk size - 1 times, and those of the back chunk of place s s times; backward as
    often again, with their gradients, summed in the wide dtype. Each transfer is under way while a block is computed. Zero bytes are
    not sent.
    """
    cut = cut_for_ring(lengths, ring.size)
    held = cut.tokens(ring.position, "front") + cut.tokens(ring.position, "back")
    assert held == q_TAD.shape[0], "the packing is of another batch"
    shared = k_TGD.new_empty(k_TGD.shape[0], 0) if shared_key_TS is None else shared_key_TS
    return _Ring.apply(q_TAD, k_TGD, v_TGV, shared, cut, scale, ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, shared: Tensor, cut: Cut, scale: float, ring: Group
    ) -> Tensor:
        mine, wide = Keys(k, v, shared), wide_dtype(q.dtype)
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
        for arrived in _in_turn(mine, cut, ring):
            for keys, blocks in arrived:
                for block in blocks:
                    rows, seen = block.queries, keys.of(block.keys)
                    whole = whole_keys(seen.k, seen.shared)
                    found = block_attention(rows.of(q), whole, seen.v, scale, causal=block.causal)
                    _merge(rows.of(out), rows.of(lse), *found)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, shared, out, lse)
        ctx.cut, ctx.scale, ctx.ring = cut, scale, ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shared, out, lse = ctx.saved_tensors
        cut, ring, mine = ctx.cut, ctx.ring, Keys(k, v, shared)
        place, wide = ring.position, wide_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        of_queries = _OfQueries(q, out, lse, grads[0], dq)
        home, under_way = mine, None
        ended: list[Tensor] = []
        for step, arrived in enumerate(_in_turn(mine, cut, ring)):
            sums = [_gradients(of_queries, keys, blocks, ctx.scale) for keys, blocks in arrived]
            if step == 0:
                home = mine.unpacked(sums[0])
                continue
            if under_way is not None:
                *before, back = under_way.wait()
                ended.append(back)
                for total, part in zip(sums, before, strict=True):
                    total.add_(part)
            under_way = _pass_on(sums, step, mine.width, cut, ring)
        if under_way is not None:
            front, _, back = under_way.wait()
            _add_chunk(home, mine.unpacked(front), cut, place, "front")
            if place > 0:  # nobody but place 0 itself reads its back chunk
                # The sum of mine came at one step, and nothing at the others.
                _add_chunk(home, mine.unpacked(torch.cat([*ended, back])), cut, place, "back")
        dk, dv, dshared = (total.to(x.dtype) for total, x in zip(home, mine, strict=True))
        return dq.to(q.dtype), dk, dv, dshared, None, None, None


class _OfQueries(NamedTuple):
    """What the backward of any block takes of its queries, and where it adds their gradient."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    dq: Tensor


def _gradients(mine: _OfQueries, keys: Keys, blocks: Iterable[Block], scale: float) -> Tensor:
    """The gradients of some keys by my queries, packed, in the wide dtype; those of the queries are added up."""
    sums = mine.dq.new_zeros(keys.k.shape[0] * keys.width)
    total = keys.unpacked(sums)
    for block in blocks:
        rows, seen, place = block.queries, keys.of(block.keys), total.of(block.keys)
        operands = (rows.of(mine.q), whole_keys(seen.k, seen.shared), seen.v)
        dq, dk, dv = block_gradients(
            rows.of(mine.grad), operands, rows.of(mine.out), rows.of(mine.lse), scale, causal=block.causal
        )
        rows.of(mine.dq).add_(dq)
        own, shared = dk.split([seen.k.shape[-1], seen.shared.shape[-1]], dim=-1)
        place.k.add_(own)
        place.v.add_(dv)
        place.shared.add_(shared.sum(-2))
    return sums


def _in_turn(mine: Keys, cut: Cut, ring: Group) -> Iterator[list[tuple[Keys, Iterator[Block]]]]:
    """Step by step what I hold, with the blocks that need it: first all of my own, then of one place after the other, downwards,
    the front chunk, and of one place after the other, upwards to the last, the back chunk. The next are under way meanwhile."""
    place, last = ring.position, ring.size - 1
    front, back = mine.packed(cut.chunk(place, "front")), mine.packed(cut.chunk(place, "back"))
    for step in range(ring.size):
        coming = None
        if step < last:
            hops = _up(front, step + 1, mine.width, cut, ring), _down(back, step + 1, mine.width, cut, ring)
            coming = start_hops(hops, ring, tag=KEYS)
        if step == 0:
            yield [(mine, cut.home(place))]
        else:
            below, above = (place - step) % ring.size, place + step
            yield [
                (mine.unpacked(front), cut.blocks(place, below, "front")),
                (mine.unpacked(back), cut.blocks(place, above, "back") if above <= last else iter(())),
            ]
        if coming is not None:
            front, back = coming.wait()


def _pass_on(sums: Sequence[Tensor], step: int, width: int, cut: Cut, ring: Group) -> Exchange:
    """Send the gradients of the front and back chunk that I held at `step` the way of the keys, and those of a back chunk that
    were at place 0, which is the last to add to them, home: to place `step`."""
    place = ring.position
    front, back = sums
    # The home of a front's gradients is the next place up from the last that adds to them: one more hop than its keys take.
    returned = cut.tokens(place, "back") * width if place == step else 0
    home = Hop(x=back if place == 0 else back[:0], to=step, elements=returned, source=0)
    hops = _up(front, step + 1, width, cut, ring), _down(back, step + 1, width, cut, ring), home
    return start_hops(hops, ring, tag=GRADIENTS)


def _up(x: Tensor, step: int, width: int, cut: Cut, ring: Group) -> Hop:
    """Of a front chunk to the next place; what comes is of the front `step` places below me."""
    place = ring.position
    coming = cut.tokens((place - step) % ring.size, "front") * width
    return Hop(x=x, to=place + 1, elements=coming, source=place - 1)


def _down(x: Tensor, step: int, width: int, cut: Cut, ring: Group) -> Hop:
    """Of a back chunk to the place before me, if there is one; what comes is of the back `step` places above me, if there is one."""
    place = ring.position
    coming = cut.tokens(place + step, "back") * width if place + step < ring.size else 0
    return Hop(x=x if place else x[:0], to=place - 1, elements=coming, source=place + 1)


def _add_chunk(home: Keys, arrived: Keys, cut: Cut, place: int, half: Half) -> None:
    """Adds the gradients of a chunk of mine to those of all that I hold, in place."""
    for mine, sent in zip(cut.chunk(place, half), cut.travelling(place, half), strict=True):
        for total, part in zip(home.of(mine), arrived.of(sent), strict=True):
            total.add_(part)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds one block to the attention so far, in place: both are means over keys, and exp(lse) is what their weights sum to."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)
