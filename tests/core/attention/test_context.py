"""Context parallelism: the ranks' rows and gradients against the definition on one rank, in float64, and what it sends and computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from core.attention import ring as ring_module
from core.attention.context import context_attention
from core.attention.cut import Block, Cut, Half, cut_for_ring
from core.attention.heads import check_heads
from core.attention.packing import packing_of
from core.attention.softmax import causal_attention, causal_attention_reference
from core.config.mapping import ParallelConfig
from core.parallel.groups import groups_for, one_rank
from core.parallel.meter import Meter
from tests.core.numbers import BACKENDS, draw, gradients, leaf, near, use_backend
from tests.ranks import Ranks

SCALE = 0.37
CPU = torch.device("cpu")
# (ring, heads)
WAYS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
# One sequence; fewer tokens than ranks; sequences shorter than twice the ring between longer ones; none; equal ones; runs of them.
PACKINGS = [(13,), (1,), (7, 1, 2, 11), (), (5, 5, 5), (3, 3, 8, 1, 1), (24,)]
# Query heads, key/value heads, head size, value size, and how much of the end of a key all heads share (0: there is no such end), by
# the ranks that exchange heads: more, as many and fewer than heads.
SHAPES = {
    1: [(1, 1, 4, 4, 0), (4, 2, 5, 3, 0), (3, 1, 3, 7, 0), (3, 3, 5, 3, 2), (4, 2, 5, 3, 1)],
    2: [(4, 2, 5, 3, 0), (4, 1, 3, 7, 0), (4, 4, 5, 5, 0), (8, 4, 1, 1, 0), (4, 4, 5, 3, 2), (4, 1, 5, 3, 1)],
    3: [(6, 3, 5, 3, 0), (3, 1, 3, 7, 0), (3, 3, 5, 3, 2)],
    4: [(4, 2, 5, 3, 0), (8, 1, 3, 7, 0), (8, 8, 5, 3, 0), (4, 4, 1, 1, 0), (4, 4, 5, 3, 2), (4, 2, 5, 3, 1)],
}

Case = tuple[tuple[int, ...], tuple[int, ...]]


def operands(lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The gradient of the result, then q, k and v of whole sequences, and the end that all keys share where there is one."""
    heads, kv, size, value, shared = shape
    sizes = [(heads, value), (heads, size), (kv, size - shared), (kv, value)] + [(shared,)] * (shared > 0)
    return [draw(i, sum(lengths), *s, dtype=dtype) for i, s in enumerate(sizes)]


def truth(lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The definition over the whole sequences: its result, and the gradients of q, k, v and of what keys share."""
    grad, *inputs = (x.double() for x in operands(lengths, shape, dtype))
    if not lengths:
        return [torch.zeros_like(x) for x in (grad, *inputs)]
    q, k, v, *shared = leaves = [leaf(x) for x in inputs]
    whole = torch.stack([torch.cat([head, *shared], 1) for head in k.unbind(1)], 1)
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    out = causal_attention_reference(q, whole, v, packing_of(cu, sum(lengths), CPU), SCALE)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


class _Run:
    """One rank's part of context attention in a (ring, heads) mapping of the world."""

    def __init__(self, world: int, heads: int, meter: Meter | None = None) -> None:
        self.groups = groups_for(ParallelConfig(cp=world, cp_alltoall=heads), meter=meter)

    def forward(self, lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
        packing = packing_of(cu, sum(lengths), CPU, self.groups)
        grad, *inputs = (x[packing.index_T] for x in operands(lengths, shape, dtype))
        q, k, v, *shared = leaves = [leaf(x) for x in inputs]
        groups, shared_key = self.groups, shared[0] if shared else None
        out = context_attention(q, k, v, packing, SCALE, ring=groups.ring, heads=groups.heads, shared_key=shared_key)
        return packing.index_T, leaves, out, grad

    def both(self, lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """The tokens held, their rows of the result, and their rows of the gradients."""
        index, leaves, out, grad = self.forward(lengths, shape, dtype)
        out.backward(grad)
        assert all(x.grad is not None and x.grad.dtype == dtype for x in leaves)
        return [index, out.detach(), *(x.grad for x in leaves)]


def _all_cases(rank: int, world: int, heads: int, dtype: torch.dtype, cases: list[Case]) -> list[list[Tensor]]:
    run = _Run(world, heads)
    return [run.both(lengths, shape, dtype) for lengths, shape in cases]


def _joined(parts: list[list[Tensor]], tokens: int) -> list[Tensor]:
    """The rows of all ranks in the order of the microbatch; each token is held once."""
    order = torch.cat([part[0] for part in parts])
    assert sorted(order.tolist()) == list(range(tokens))
    return [torch.cat([part[i] for part in parts])[order.argsort()] for i in range(1, len(parts[0]))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_rank_gets_its_tokens_rows_of_the_whole_attention_and_of_its_gradients(
    ranks: Ranks, way: tuple[int, int], dtype: torch.dtype
) -> None:
    ring, heads = way
    packings = PACKINGS if dtype == torch.float64 else PACKINGS[2:4]
    cases = [(lengths, shape) for lengths in packings for shape in SHAPES[heads]]
    found = ranks.run(_all_cases, ring * heads, heads, dtype, cases)
    for number, (lengths, shape) in enumerate(cases):
        ours = _joined([of_rank[number] for of_rank in found], sum(lengths))
        for got, exact in zip(ours, truth(lengths, shape, dtype), strict=True):
            near(got, exact, units=4 if dtype == torch.bfloat16 else 32, least=1.0)
            assert got.dtype == dtype


def _native_or_widened(rank: int, world: int, heads: int, backend: str, case: Case) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_backend(monkeypatch, backend)
        return _Run(world, heads).both(*case, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_within_its_own_rounding_whatever_the_processor_multiplies(ranks: Ranks, backend: str) -> None:
    lengths, shape = (61, 40), (4, 2, 5, 3, 2)
    parts = ranks.run(_native_or_widened, 4, 1, backend, (lengths, shape))
    for got, exact in zip(_joined(parts, 101), truth(lengths, shape, torch.bfloat16), strict=True):
        near(got, exact, units=4)


def _twice(rank: int, world: int, heads: int, case: Case) -> bool:
    run = _Run(world, heads)
    first, second = (run.both(*case, torch.float32) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_two_runs_give_the_same_bits(ranks: Ranks, heads: int) -> None:
    assert all(ranks.run(_twice, 4, heads, ((37, 3, 3), (4, 2, 5, 3, 2))))


def test_one_rank_alone_is_plain_causal_attention_bit_for_bit() -> None:
    groups = one_rank()
    packing = packing_of(torch.tensor([0, 3, 4, 9]), 9, CPU, groups)
    _, *qkv = operands((3, 1, 5), (4, 2, 5, 3, 0), torch.float32)
    ours = gradients(lambda *x: context_attention(*x, packing, SCALE, ring=groups.ring, heads=groups.heads), qkv)
    for got, plain in zip(ours, gradients(lambda *x: causal_attention(*x, packing, SCALE), qkv), strict=True):
        assert torch.equal(got, plain)


def _large_logits(rank: int, world: int) -> list[Tensor]:
    """The logits of tokens 2 and 7 are far above all others, and that of 7 far above that of 2."""
    groups = groups_for(ParallelConfig(cp=world))
    packing = packing_of(None, 9, CPU, groups)
    k = torch.zeros(9, 1, 2)
    k[2], k[7] = 1e4, 2e4
    q, v = torch.full((9, 1, 2), 1e3), torch.arange(9.0)[:, None, None].expand(-1, 1, 2)
    leaves = [leaf(x[packing.index_T]) for x in (q, k, v)]
    out = context_attention(*leaves, packing, 1.0, ring=groups.ring, heads=groups.heads)
    out.sum().backward()
    return [packing.index_T, out, leaves[2].grad]  # type: ignore[list-item]


def test_large_logits_pick_their_tokens_across_ranks_without_overflow(ranks: Ranks) -> None:
    for index, out, gradient in ranks.run(_large_logits, 3):
        # Before token 2 all earlier keys weigh the same.
        assert out[:, 0, 0].tolist() == [t / 2 if t < 2 else 2.0 if t < 7 else 7.0 for t in index.tolist()]
        weights = {0: 1.5, 1: 0.5, 2: 5.0, 7: 2.0}
        assert gradient[:, 0, 0].tolist() == [weights.get(t, 0.0) for t in index.tolist()]


# What is sent


def _sent(
    rank: int, world: int, heads: int, case: Case, dtype: torch.dtype
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Bytes of the forward, and of the forward and backward."""
    meter = Meter()
    _, _, out, grad = _Run(world, heads, meter).forward(*case, dtype)
    forward = dict(meter.sent_bytes)
    out.backward(grad)
    return forward, dict(meter.sent_bytes)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ring_sends_a_front_chunk_to_every_other_rank_a_back_chunk_to_earlier_ones_and_both_again_with_gradients(
    ranks: Ranks, world: int, dtype: torch.dtype, shared: int
) -> None:
    chunk, (_, kv, size, value, _) = 3, (4, 2, 5, 3, shared)
    width = kv * (size - shared + value) + shared  # what heads share is sent once
    case = ((2 * chunk * world,), (4, kv, size, value, shared))
    for place, (forward, both) in enumerate(ranks.run(_sent, world, 1, case, dtype)):
        # A back chunk leaves its own place and all below it but place 0; its gradients all places below it, from the highest on.
        backs, sums = (world - place if place else 0), world - 1 - place
        keys = chunk * width * (world - 1 + backs)
        assert forward.get(("ring", "send"), 0) == keys * dtype.itemsize
        of_gradients = chunk * width * (world - 1 + sums) * 4  # in float32
        assert both == {("ring", "send"): 2 * keys * dtype.itemsize + of_gradients}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equal_chunks_cost_a_quarter_less_than_sending_everything_everywhere(ranks: Ranks, world: int) -> None:
    lengths, (_, kv, size, value, _) = (8 * world, 2 * world), (4, 2, 5, 3, 0)
    told = ranks.run(_sent, world, 1, (lengths, (4, kv, size, value, 0)), torch.float32)
    everywhere = 3 * (world - 1) * sum(lengths) * kv * (size + value) * 4
    assert sum(both["ring", "send"] for _, both in told) == everywhere * 3 // 4


@pytest.mark.parametrize(
    ("world", "shape"),
    [
        (2, (4, 2, 5, 3, 0)),
        (3, (6, 3, 5, 3, 0)),
        (4, (8, 4, 5, 3, 0)),
        (4, (8, 2, 5, 3, 0)),
        (2, (4, 4, 5, 3, 2)),
        (4, (4, 2, 5, 3, 1)),
    ],
)
def test_exchanging_heads_sends_what_the_other_ranks_need_and_no_byte_more(
    ranks: Ranks, world: int, shape: tuple[int, ...]
) -> None:
    heads, kv, size, value, shared = shape
    mine = 5
    # A key/value head goes to each rank whose queries read it, which are more than one where heads are fewer than ranks; what keys
    # share goes to each of the others once.
    widths = heads * size + max(kv, world) * (size - shared + value) + heads * value + world * shared
    one_way = mine * widths * (world - 1) // world * 4
    for forward, both in ranks.run(_sent, world, world, ((mine * world,), shape), torch.float32):
        assert forward == {("heads", "all_to_all"): one_way}
        assert both == {("heads", "all_to_all"): 2 * one_way}


def test_a_hierarchy_sends_heads_inside_and_keys_of_fewer_heads_outside(ranks: Ranks) -> None:
    mine, (heads, kv, size, value, shared) = 4, (4, 2, 5, 3, 2)
    inside = mine * (heads * (size + value) + kv * (size - shared + value) + 2 * shared) // 2 * 4
    chunk = mine * (kv // 2 * (size - shared + value) + shared) * 4  # of both ranks that exchange heads
    told = ranks.run(_sent, 4, 2, ((16,), (heads, kv, size, value, shared)), torch.float32)
    for rank, (forward, both) in enumerate(told):
        # Place 0 sends its front up, and later the gradients of both chunks of place 1; place 1 both chunks, and those of one.
        keys, sums = (1, 2) if rank < 2 else (2, 1)
        assert forward == {("heads", "all_to_all"): inside, ("ring", "send"): keys * chunk}
        assert both == {("heads", "all_to_all"): 2 * inside, ("ring", "send"): (2 * keys + sums) * chunk}


def test_ranks_send_only_the_tokens_they_hold_and_only_to_those_who_read_them(ranks: Ranks) -> None:
    hop = (2 + 2) * 4
    # One token, which the chunk that mirrors the first holds, as place 0 does: no other place reads it.
    told = ranks.run(_sent, 3, 1, ((1,), (1, 1, 2, 2, 0)), torch.float32)
    assert [both.get(("ring", "send"), 0) for _, both in told] == [0, 0, 0]
    # Three tokens: a front at place 1, backs at places 2 and 0. The front goes 1, 2, 0, the back 2, 1, 0, each forward and backward.
    # Their gradients go 2, 0, 1 and 1, 0, 2. Nobody sends anything else, and nobody waits for nothing.
    told = ranks.run(_sent, 3, 1, ((3,), (1, 1, 2, 2, 0)), torch.float32)
    assert [both.get(("ring", "send"), 0) for _, both in told] == [2 * hop, 5 * hop, 5 * hop]


# What is computed, and when


def _scores(rank: int, world: int, heads: int, case: Case) -> dict[str, int]:
    """Score elements that the blocks of the forward and of the backward have, per head and sequence; a triangle with its diagonal."""
    counted: Counter[str] = Counter()
    forward, backward = ring_module.block_attention, ring_module.block_gradients

    def add(name: str, q: Tensor, k: Tensor, causal: bool) -> None:
        rows, columns = q.shape[1], k.shape[1]
        assert not causal or rows == columns
        counted[name] += q.shape[0] * q.shape[2] * (rows * (rows + 1) // 2 if causal else rows * columns)

    def counting(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Any:
        add("forward", q, k, causal)
        return forward(q, k, v, scale, causal=causal)

    def counting_back(grad: Tensor, qkv: Any, out: Tensor, lse: Tensor, scale: float, *, causal: bool) -> Any:
        add("backward", qkv[0], qkv[1], causal)
        return backward(grad, qkv, out, lse, scale, causal=causal)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ring_module, "block_attention", counting)
        monkeypatch.setattr(ring_module, "block_gradients", counting_back)
        _Run(world, heads).both(*case, torch.float32)
    return dict(counted)


@pytest.mark.parametrize(("world", "heads"), [(2, 1), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("lengths", [(13,), (24, 7, 1), (5, 5, 5)])
def test_the_scores_computed_are_those_that_the_mask_leaves_and_no_more(
    ranks: Ranks, world: int, heads: int, lengths: tuple[int, ...]
) -> None:
    needed = 4 * sum(n * (n + 1) // 2 for n in lengths)
    told = ranks.run(_scores, world, heads, (lengths, (4, 2, 5, 3, 0)))
    for name in ("forward", "backward"):
        assert sum(of_rank.get(name, 0) for of_rank in told) == needed


def test_the_ring_shares_the_scores_evenly_where_chunks_are_equal(ranks: Ranks) -> None:
    told = ranks.run(_scores, 4, 1, ((24, 24), (4, 2, 5, 3, 0)))
    assert {of_rank["forward"] for of_rank in told} == {2 * 4 * (24 * 25 // 2) // 4}


def _events(rank: int, world: int) -> list[str]:
    told: list[str] = []
    start, block = ring_module.start_hops, ring_module.block_attention

    def started(*args: Any, **named: Any) -> Any:
        told.append("start")
        return start(*args, **named)

    def computed(*args: Any, **named: Any) -> Any:
        told.append("block")
        return block(*args, **named)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ring_module, "start_hops", started)
        monkeypatch.setattr(ring_module, "block_attention", computed)
        _Run(world, 1).forward((12,), (1, 1, 2, 2, 0), torch.float32)
    return told


def test_the_next_keys_are_under_way_before_a_block_is_computed(ranks: Ranks) -> None:
    later_backs = [(1, 1), (1, 0), (0, 0)]  # of the second step and the third; a front comes at each
    for told, (second, third) in zip(ranks.run(_events, 3), later_backs, strict=True):
        blocks = ["block"] * (1 + second)
        assert told == ["start", "block", "start", *blocks, *["block"] * (1 + third)]


# What is refused


@pytest.mark.parametrize(
    ("heads", "shared", "over", "message"),
    [
        (6, 2, 4, "6 query heads do not divide over the 4 ranks"),
        (6, 3, 2, "3 key/value heads cannot be shared by the 2 ranks"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused_by_name(heads: int, shared: int, over: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_heads(heads, shared, over)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [(13, 1, 1), (), (2,), (8, 8, 3)])
def test_a_cut_holds_every_token_once_and_blocks_are_those_a_mask_leaves(size: int, lengths: tuple[int, ...]) -> None:
    cut = cut_for_ring(lengths, size)
    halves: tuple[Half, Half] = ("front", "back")
    assert sum(cut.tokens(place, half) for place in range(size) for half in halves) == sum(lengths)
    held = {place: torch.tensor(_held(lengths, place, size, halves)) for place in range(size)}
    seen: Counter[tuple[int, int]] = Counter()
    for place in range(size):
        for source in range(size):
            for half in halves:
                travels = torch.tensor(_held(lengths, source, size, (half,)))
                for block in _blocks(cut, place, source, half):
                    queries, keys = (
                        block.queries.of(held[place]),
                        block.keys.of(held[place] if block.causal else travels),
                    )
                    for of_query, of_key in zip(queries.tolist(), keys.tolist(), strict=True):
                        seen.update((q, k) for q in of_query for k in of_key if not block.causal or k <= q)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    wanted = [(a + i, a + j) for a, n in zip(starts, lengths, strict=True) for i in range(n) for j in range(i + 1)]
    assert seen == Counter(wanted)


@pytest.mark.parametrize("half", ["front", "back"])
def test_a_chunk_lies_among_all_of_its_place_where_it_was_taken_from(half: Half) -> None:
    lengths, size = (13, 13, 1, 8), 3
    cut = cut_for_ring(lengths, size)
    for place in range(size):
        mine, chunk = (torch.tensor(_held(lengths, place, size, halves)) for halves in (("front", "back"), (half,)))
        for own, sent in zip(cut.chunk(place, half), cut.travelling(place, half), strict=True):
            assert own.of(mine).tolist() == sent.of(chunk).tolist()


def _blocks(cut: Cut, place: int, source: int, half: Half) -> list[Block]:
    if source == place:
        return list(cut.home(place)) if half == "front" else []
    # An earlier place's back chunk is not to be asked for.
    return [] if source < place and half == "back" else list(cut.blocks(place, source, half))


def _held(lengths: tuple[int, ...], place: int, size: int, halves: tuple[Half, ...]) -> list[int]:
    """Tokens of the microbatch that a place holds in some of its chunks, by the published rule: `place` and its mirror of 2 * size."""
    found: list[int] = []
    begin = 0
    for n in lengths:
        for half in halves:
            chunk = place if half == "front" else 2 * size - 1 - place
            found += range(begin + n * chunk // (2 * size), begin + n * (chunk + 1) // (2 * size))
        begin += n
    return found
