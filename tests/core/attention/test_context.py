"""Context parallelism: the ranks' rows and gradients against the definition on one rank, in float64, and what it sends and computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from core.attention import ring as ring_module
from core.attention.context import context_attention
from core.attention.heads import check_heads
from core.attention.packing import packing_of
from core.attention.ring import cut_for_ring
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
# Query heads, key/value heads, head size, value size, by the ranks that exchange heads: more, as many and fewer than heads.
SHAPES = {
    1: [(1, 1, 4, 4), (4, 2, 5, 3), (3, 1, 3, 7)],
    2: [(4, 2, 5, 3), (4, 1, 3, 7), (4, 4, 5, 5), (8, 4, 1, 1)],
    3: [(6, 3, 5, 3), (3, 1, 3, 7)],
    4: [(4, 2, 5, 3), (8, 1, 3, 7), (8, 8, 5, 3), (4, 4, 1, 1)],
}

Case = tuple[tuple[int, ...], tuple[int, ...]]


def operands(lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of whole sequences, and the gradient of the result."""
    heads, shared, size, value = shape
    sizes = ((heads, size), (shared, size), (shared, value), (heads, value))
    return [draw(i, sum(lengths), *s, dtype=dtype) for i, s in enumerate(sizes)]


def truth(lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The definition over the whole sequences: its result, and the gradients of q, k and v."""
    *qkv, grad = (x.double() for x in operands(lengths, shape, dtype))
    if not lengths:
        return [torch.zeros_like(x) for x in (grad, *qkv)]
    leaves = [leaf(x) for x in qkv]
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    out = causal_attention_reference(*leaves, packing_of(cu, sum(lengths), CPU), SCALE)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


class _Run:
    """One rank's part of context attention in a (ring, heads) mapping of the world."""

    def __init__(self, world: int, heads: int, meter: Meter | None = None) -> None:
        self.groups = groups_for(ParallelConfig(cp=world, cp_alltoall=heads), meter=meter)

    def forward(self, lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
        packing = packing_of(cu, sum(lengths), CPU, self.groups)
        *qkv, grad = (x[packing.index_T] for x in operands(lengths, shape, dtype))
        leaves = [leaf(x) for x in qkv]
        out = context_attention(*leaves, packing, SCALE, ring=self.groups.ring, heads=self.groups.heads)
        return packing.index_T, leaves, out, grad

    def both(self, lengths: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """The tokens held, their rows of the result, and their rows of the three gradients."""
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
    return [torch.cat([part[i] for part in parts])[order.argsort()] for i in range(1, 5)]


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
    lengths, shape = (61, 40), (4, 2, 5, 3)
    parts = ranks.run(_native_or_widened, 4, 1, backend, (lengths, shape))
    for got, exact in zip(_joined(parts, 101), truth(lengths, shape, torch.bfloat16), strict=True):
        near(got, exact, units=4)


def _twice(rank: int, world: int, heads: int, case: Case) -> bool:
    run = _Run(world, heads)
    first, second = (run.both(*case, torch.float32) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_two_runs_give_the_same_bits(ranks: Ranks, heads: int) -> None:
    assert all(ranks.run(_twice, 4, heads, ((37, 3, 3), (4, 2, 5, 3))))


def test_one_rank_alone_is_plain_causal_attention_bit_for_bit() -> None:
    groups = one_rank()
    packing = packing_of(torch.tensor([0, 3, 4, 9]), 9, CPU, groups)
    *qkv, _ = operands((3, 1, 5), (4, 2, 5, 3), torch.float32)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ring_sends_keys_and_values_once_to_every_other_rank_and_again_with_their_gradients(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    mine, (_, shared, size, value) = 6, (4, 2, 5, 3)
    elements = (world - 1) * mine * shared * (size + value)
    # 6 is even, so that both chunks of every rank are equal: the sequences are 6 tokens per rank.
    case = ((mine * world,), (4, shared, size, value))
    for forward, both in ranks.run(_sent, world, 1, case, dtype):
        assert forward == {("ring", "send"): elements * dtype.itemsize}
        assert both == {("ring", "send"): 2 * elements * dtype.itemsize + elements * 4}  # gradients in float32


@pytest.mark.parametrize(
    ("world", "shape"), [(2, (4, 2, 5, 3)), (3, (6, 3, 5, 3)), (4, (8, 4, 5, 3)), (4, (8, 2, 5, 3))]
)
def test_exchanging_heads_sends_what_the_other_ranks_need_and_no_byte_more(
    ranks: Ranks, world: int, shape: tuple[int, ...]
) -> None:
    heads, shared, size, value = shape
    mine = 5
    # A key/value head goes to each rank whose queries read it, which are more than one where heads are fewer than ranks.
    widths = heads * size + max(shared, world) * (size + value) + heads * value
    one_way = mine * widths * (world - 1) // world * 4
    for forward, both in ranks.run(_sent, world, world, ((mine * world,), shape), torch.float32):
        assert forward == {("heads", "all_to_all"): one_way}
        assert both == {("heads", "all_to_all"): 2 * one_way}


def test_a_hierarchy_sends_heads_inside_and_keys_of_fewer_heads_outside(ranks: Ranks) -> None:
    mine, (heads, shared, size, value) = 4, (4, 2, 5, 3)
    inside = mine * (heads * (size + value) + shared * (size + value)) // 2 * 4
    outside = 2 * mine * (shared // 2) * (size + value) * 4
    for forward, both in ranks.run(_sent, 4, 2, ((16,), (heads, shared, size, value)), torch.float32):
        assert forward == {("heads", "all_to_all"): inside, ("ring", "send"): outside}
        assert both == {("heads", "all_to_all"): 2 * inside, ("ring", "send"): 3 * outside}


def test_ranks_send_only_the_tokens_they_hold(ranks: Ranks) -> None:
    # One token, which the chunk that mirrors the first holds: its key goes from place 0 to 1 and 2, forward and backward, and the
    # sum of its gradients, which begins at place 1, home over 2. Nobody sends anything else, and nobody waits for nothing.
    told = ranks.run(_sent, 3, 1, ((1,), (1, 1, 2, 2)), torch.float32)
    hop = (2 + 2) * 4
    assert [both.get(("ring", "send"), 0) for _, both in told] == [2 * hop, 3 * hop, hop]


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
    told = ranks.run(_scores, world, heads, (lengths, (4, 2, 5, 3)))
    for name in ("forward", "backward"):
        assert sum(of_rank.get(name, 0) for of_rank in told) == needed


def test_the_ring_shares_the_scores_evenly_where_chunks_are_equal(ranks: Ranks) -> None:
    told = ranks.run(_scores, 4, 1, ((24, 24), (4, 2, 5, 3)))
    assert {of_rank["forward"] for of_rank in told} == {2 * 4 * (24 * 25 // 2) // 4}


def _events(rank: int, world: int) -> list[str]:
    told: list[str] = []
    shift, block = ring_module.ring_shift, ring_module.block_attention

    def started(*args: Any, **named: Any) -> Any:
        told.append("start")
        return shift(*args, **named)

    def computed(*args: Any, **named: Any) -> Any:
        told.append("block")
        return block(*args, **named)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ring_module, "ring_shift", started)
        monkeypatch.setattr(ring_module, "block_attention", computed)
        _Run(world, 1).forward((12,), (1, 1, 2, 2), torch.float32)
    return told


def test_the_next_keys_are_under_way_before_a_block_is_computed(ranks: Ranks) -> None:
    assert ranks.run(_events, 3) == [["start", "block", "start", "block", "block"]] * 3


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
    assert sum(cut.tokens) == sum(lengths)
    groups = {place: _held(lengths, place, size) for place in range(size)}
    seen: Counter[tuple[int, int]] = Counter()
    for place in range(size):
        for source in range(size):
            for block in cut.blocks(place, source):
                queries, keys = (
                    rows.of(torch.tensor(groups[at])) for rows, at in ((block.queries, place), (block.keys, source))
                )
                for of_query, of_key in zip(queries.tolist(), keys.tolist(), strict=True):
                    pairs = [(q, k) for q in of_query for k in of_key if not block.causal or k <= q]
                    seen.update(pairs)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    wanted = [(a + i, a + j) for a, n in zip(starts, lengths, strict=True) for i in range(n) for j in range(i + 1)]
    assert seen == Counter(wanted)


def _held(lengths: tuple[int, ...], place: int, size: int) -> list[int]:
    """Tokens of the microbatch that a place holds, by the published rule: chunks `place` and its mirror of 2 * size."""
    found: list[int] = []
    begin = 0
    for n in lengths:
        for chunk in (place, 2 * size - 1 - place):
            found += range(begin + n * chunk // (2 * size), begin + n * (chunk + 1) // (2 * size))
        begin += n
    return found
