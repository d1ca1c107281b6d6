"""Collectives over rows: values and gradients against one process that holds every rank's tensors, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.baton import Baton
from core.parallel.collectives import (
    all_gather,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    all_to_all,
    all_to_all_equal,
    reduce_scatter,
    reduce_scatter_rows,
    start_all_to_all,
)
from core.parallel.groups import Group, one_rank
from core.parallel.meter import Meter
from tests.ranks import Ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
COUNTS: dict[int, list[tuple[int, ...]]] = {
    1: [(3,)],
    2: [(3, 0), (2, 5)],
    3: [(1, 0, 4), (0, 0, 0)],
    4: [(7, 1, 0, 2), (3, 3, 3, 3)],
}
# [sender][receiver] rows: uneven, with a rank that sends nothing, one that gets nothing, and nothing at all.
SENDS: dict[int, list[tuple[tuple[int, ...], ...]]] = {
    1: [((3,),)],
    2: [((1, 2), (0, 5)), ((0, 4), (0, 0))],
    3: [((0, 2, 1), (0, 0, 0), (5, 0, 0)), ((0, 0, 0),) * 3],
    4: [((1, 0, 3, 2), (0, 0, 0, 7), (2, 2, 2, 2), (0, 1, 0, 0))],
}


def _world_group(rank: int, world: int) -> Group:
    return Group(ranks=tuple(range(world)), position=rank, handle=dist.group.WORLD if world > 1 else None)


def _integers(seed: int, rows: int, dtype: torch.dtype, tail: tuple[int, ...] = (3, 2)) -> Tensor:
    """Small whole numbers: every sum of them is exact in each dtype, so results are compared bit by bit."""
    numbers = np.random.default_rng(seed).integers(-7, 8, size=(rows, *tail))
    return torch.from_numpy(numbers).to(dtype)


def _differentiate(y: Tensor, x: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient of x under an output gradient drawn from `seed`."""
    if not x.requires_grad:
        return y, None
    (gradient,) = torch.autograd.grad(y, x, _integers(seed, y.shape[0], y.dtype))
    return y, gradient


def _inputs(seed: int, rows: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [_integers(seed + rank, count, dtype) for rank, count in enumerate(rows)]


def _gather_on(
    rank: int, world: int, counts: tuple[int, ...], dtype: torch.dtype, even: bool
) -> tuple[Tensor, Tensor | None]:
    x = _inputs(0, counts, dtype)[rank].requires_grad_(dtype.is_floating_point)
    group = _world_group(rank, world)
    y = all_gather(x, group) if even else all_gather_rows(x, counts, group)
    return _differentiate(y, x, 100 + rank)


def _scatter_on(
    rank: int, world: int, counts: tuple[int, ...], dtype: torch.dtype, even: bool
) -> tuple[Tensor, Tensor | None]:
    x = _integers(rank, sum(counts), dtype).requires_grad_(dtype.is_floating_point)
    group = _world_group(rank, world)
    y = reduce_scatter(x, group) if even else reduce_scatter_rows(x, counts, group)
    return _differentiate(y, x, 100 + rank)


def _exchange_on(
    rank: int, world: int, sends: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    x = _inputs(0, [sum(row) for row in sends], dtype)[rank].requires_grad_(dtype.is_floating_point)
    y = all_to_all(x, sends[rank], [row[rank] for row in sends], _world_group(rank, world))
    return _differentiate(y, x, 100 + rank)


def _same(found: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.to(torch.float64).numpy(), expected)


def _cases(world: int) -> list[tuple[tuple[int, ...], bool]]:
    """Rows per rank, and whether they go through the call that expects equally many."""
    return [*((counts, False) for counts in COUNTS[world]), ((5,) * world, True), ((0,) * world, True)]


def _numpy(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    return [tensor.to(torch.float64).numpy() for tensor in tensors]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gathered_rows_are_all_rows_and_their_gradient_is_the_sum_of_all_ranks(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    for counts, even in _cases(world):
        found = ranks.run(_gather_on, world, counts, dtype, even)
        gradients = _numpy([_integers(100 + rank, sum(counts), dtype) for rank in range(world)])
        starts = np.cumsum((0, *counts))
        for rank, (y, gradient) in enumerate(found):
            _same(y, np.concatenate(_numpy(_inputs(0, counts, dtype))), dtype)
            if gradient is not None:
                _same(gradient, np.sum(gradients, axis=0)[starts[rank] : starts[rank + 1]], dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_scattered_rows_are_the_sum_of_all_ranks_and_their_gradient_is_everyones(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    for counts, even in _cases(world):
        found = ranks.run(_scatter_on, world, counts, dtype, even)
        inputs = _numpy([_integers(rank, sum(counts), dtype) for rank in range(world)])
        gradients = _numpy([_integers(100 + rank, count, dtype) for rank, count in enumerate(counts)])
        starts = np.cumsum((0, *counts))
        for rank, (y, gradient) in enumerate(found):
            _same(y, np.sum(inputs, axis=0)[starts[rank] : starts[rank + 1]], dtype)
            if gradient is not None:
                _same(gradient, np.concatenate(gradients), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exchanged_rows_arrive_in_the_order_of_ranks_and_their_gradients_travel_back(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    for sends in SENDS[world]:
        received = [sum(row[rank] for row in sends) for rank in range(world)]
        inputs = _numpy(_inputs(0, [sum(row) for row in sends], dtype))
        gradients = _numpy([_integers(100 + rank, received[rank], dtype) for rank in range(world)])
        for rank, (y, gradient) in enumerate(ranks.run(_exchange_on, world, sends, dtype)):
            expected, expected_gradient = [], []
            for other in range(world):
                start = sum(sends[other][:rank])
                expected.append(inputs[other][start : start + sends[other][rank]])
                start = sum(row[other] for row in sends[:rank])
                expected_gradient.append(gradients[other][start : start + sends[rank][other]])
            _same(y, np.concatenate(expected), dtype)
            if gradient is not None:
                _same(gradient, np.concatenate(expected_gradient), dtype)


def _equal_parts_on(rank: int, world: int, rows: int) -> tuple[Tensor, int]:
    meter = Meter()
    group = replace(_world_group(rank, world), axis="ep", meter=meter)
    numbers = torch.arange(world * rows * 2).view(world * rows, 2) + 1000 * rank
    return all_to_all_equal(numbers.T.contiguous().T, group), meter.by_axis().get("ep", 0)


@pytest.mark.parametrize(("world", "rows"), [(1, 3), (2, 0), (3, 1), (4, 2)])
def test_equal_parts_arrive_in_the_order_of_ranks_and_are_counted(ranks: Ranks, world: int, rows: int) -> None:
    everything = np.arange(world * rows * 2).reshape(world, rows, 2)
    for rank, (arrived, sent_bytes) in enumerate(ranks.run(_equal_parts_on, world, rows)):
        expected = np.concatenate([everything[rank] + 1000 * sender for sender in range(world)])
        assert arrived.tolist() == expected.tolist()
        assert sent_bytes == (world - 1) * rows * 2 * 8


def _scaled_path(rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A nonlinear path through every collective: its loss on this rank and the gradient of this rank's input."""
    group = _world_group(rank, world)
    x = torch.from_numpy(np.random.default_rng(rank).normal(size=(2, 3))).to(dtype).requires_grad_()
    everyone = all_gather(x.sin(), group)
    mixed = reduce_scatter(everyone * (rank + 1), group)
    swapped = all_to_all(mixed.exp(), [1, 1], [1, 1], group)
    loss = (all_gather_rows(swapped, [2, 2], group) ** 2).sum() * (rank + 0.5)
    loss.backward()
    assert x.grad is not None
    return loss, x.grad


def test_gradients_through_every_collective_in_turn_equal_finite_differences(ranks: Ranks) -> None:
    inputs = [np.random.default_rng(rank).normal(size=(2, 3)) for rank in range(2)]

    def total(x: list[np.ndarray]) -> float:
        mixed = np.exp(np.sin(np.concatenate(x)) * 3)  # the ranks' factors 1 and 2
        swapped = mixed[[0, 2, 1, 3]]
        return float((swapped**2).sum() * (0.5 + 1.5))

    for rank, (_, gradient) in enumerate(ranks.run(_scaled_path, 2, torch.float64)):
        expected = np.zeros((2, 3))
        for i in np.ndindex(2, 3):
            moved = [[a.copy() for a in inputs] for _ in range(2)]
            moved[0][rank][i] += 1e-6
            moved[1][rank][i] -= 1e-6
            expected[i] = (total(moved[0]) - total(moved[1])) / 2e-6
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6, atol=1e-6)


def _bfloat16_sum(rank: int, world: int) -> Tensor:
    x = torch.tensor([[256.0], [1.0], [1.0]][rank]).to(torch.bfloat16).repeat(3).unsqueeze(1)
    return reduce_scatter(x, _world_group(rank, world))


def test_a_bfloat16_sum_is_rounded_once_and_not_after_each_rank(ranks: Ranks) -> None:
    # 256 + 1 is 256 in bfloat16, twice over; the true sum 258 is a bfloat16.
    assert [y.item() for y in ranks.run(_bfloat16_sum, 3)] == [258.0] * 3


def _reduce_on(rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _integers(rank, 5, dtype)[:, ::2]
    return x, all_reduce_sum(x, _world_group(rank, world))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("world", [1, 3])
def test_a_reduced_sum_is_a_new_tensor_equal_on_all_ranks(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    inputs = _numpy([_integers(rank, 5, dtype)[:, ::2] for rank in range(world)])
    for rank, (x, total) in enumerate(ranks.run(_reduce_on, world, dtype)):
        _same(x, inputs[rank], dtype)
        _same(total, np.sum(inputs, axis=0), dtype)


def _largest_on(rank: int, world: int, dtype: torch.dtype, meter: Meter) -> tuple[Tensor, Tensor, Meter]:
    x = _integers(rank, 5, dtype)[:, ::2]
    return x, all_reduce_max(x, replace(_world_group(rank, world), axis="tp", meter=meter)), meter


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("world", [1, 3])
def test_a_reduced_maximum_is_elementwise_a_new_tensor_and_counted(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    inputs = _numpy([_integers(rank, 5, dtype)[:, ::2] for rank in range(world)])
    for rank, (x, largest, meter) in enumerate(ranks.run(_largest_on, world, dtype, Meter())):
        _same(x, inputs[rank], dtype)
        _same(largest, np.max(inputs, axis=0), dtype)
        assert meter.by_axis() == ({"tp": 2 * 2 * x.numel() * dtype.itemsize // 3} if world > 1 else {})


def _in_pairs(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Two groups at once, {0, 2} and {1, 3}: positions in a group are not ranks in the world."""
    handles = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    group = Group(ranks=(rank % 2, rank % 2 + 2), position=rank // 2, handle=handles[rank % 2])
    x = torch.full((rank + 1, 1), float(rank))
    counts = [r + 1 for r in group.ranks]
    gathered = all_gather_rows(x, counts, group)
    return gathered, reduce_scatter_rows(gathered, counts, group)


def test_groups_inside_a_world_communicate_apart(ranks: Ranks) -> None:
    for rank, (gathered, back) in enumerate(ranks.run(_in_pairs, 4)):
        low = rank % 2
        assert gathered.flatten().tolist() == [float(low)] * (low + 1) + [float(low + 2)] * (low + 3)
        assert back.flatten().tolist() == [2.0 * rank] * (rank + 1)


def _rows_on_one_rank_only(rank: int, world: int) -> list[int]:
    """Fault C1: rank 1 has no rows at any time, and takes part in everything."""
    group = _world_group(rank, world)
    x = torch.ones(4 if rank == 0 else 0, 3, requires_grad=True)
    y = all_to_all(x, [4, 0] if rank == 0 else [0, 0], [4, 0] if rank == 0 else [0, 0], group)
    z = all_gather_rows(y * 2, [4, 0], group)
    reduce_scatter_rows(z, [4, 0], group).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 4.0))
    return list(x.grad.shape)


def test_a_rank_without_rows_takes_part_and_gets_a_gradient_of_its_shape(ranks: Ranks) -> None:
    assert ranks.run(_rows_on_one_rank_only, 2, timeout_seconds=10) == [[4, 3], [0, 3]]


def _metered(rank: int, world: int) -> dict[str, dict[tuple[str, str], int]]:
    told = {}
    for name in ("all_to_all", "all_gather", "all_gather_rows", "reduce_scatter", "all_reduce"):
        meter = Meter()
        group = replace(_world_group(rank, world), axis="dp", meter=meter)
        x = torch.ones(6, 5, dtype=torch.bfloat16, requires_grad=True)
        if name == "all_to_all":
            all_to_all(x, [1, 2, 3], [1 + 0 * rank + rank] * 3, group).sum().backward()
        elif name == "all_gather":
            all_gather(x, group).sum().backward()
        elif name == "all_gather_rows":
            rows = x[: rank + 1]
            all_gather_rows(rows, [1, 2, 3], group).sum().backward()
        elif name == "reduce_scatter":
            reduce_scatter(x, group).sum().backward()
        else:
            all_reduce_sum(x, group)
        told[name] = dict(meter.sent_bytes)
    return told


def test_a_meter_counts_what_leaves_this_rank_forward_and_backward(ranks: Ranks) -> None:
    row = 5 * 2
    for rank, told in enumerate(ranks.run(_metered, 3)):
        mine = rank + 1
        gather, scatter = ("dp", "all_gather"), ("dp", "reduce_scatter")
        assert told["all_to_all"] == {("dp", "all_to_all"): (6 - mine) * row + 2 * mine * row}
        assert told["all_gather"] == {gather: 2 * 6 * row, scatter: 2 * 6 * row}
        assert told["all_gather_rows"] == {gather: 2 * mine * row, scatter: (6 - mine) * row}
        assert told["reduce_scatter"] == {scatter: 4 * row, gather: 2 * 2 * row}
        assert told["all_reduce"] == {("dp", "all_reduce"): 2 * 2 * 6 * row // 3}


def test_a_group_of_one_rank_needs_no_torch_distributed_and_counts_nothing() -> None:
    assert not dist.is_initialized()
    meter = Meter()
    alone = one_rank(meter).ep
    x = torch.ones(3, 2, requires_grad=True)
    assert all_gather(x, alone) is x
    assert all_gather_rows(x, [3], alone) is x
    assert reduce_scatter(x, alone) is x
    assert reduce_scatter_rows(x, [3], alone) is x
    assert all_to_all(x, [3], [3], alone) is x
    assert all_to_all_equal(x, alone) is x
    total = all_reduce_sum(x, alone)
    assert torch.equal(total, x) and not total.requires_grad and total.data_ptr() != x.data_ptr()
    assert not meter.sent_bytes


def test_rows_that_disagree_with_their_counts_are_refused_before_anything_is_sent() -> None:
    pair = Group(ranks=(0, 1), position=0, handle=None)
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"send_rows=\(1, 1\) are 2 rows, not 3"):
        all_to_all(x, [1, 1], [1, 0], pair)
    with pytest.raises(ValueError, match="sends 1 rows to itself but receives 2"):
        all_to_all(x, [1, 2], [2, 0], pair)
    with pytest.raises(ValueError, match=r"receive_rows=\(3,\) must be 2 counts"):
        all_to_all(x, [3, 0], [3], pair)
    with pytest.raises(ValueError, match=r"send_rows=\(4, -1\) must be 2 counts"):
        all_to_all(x, [4, -1], [4, 0], pair)
    with pytest.raises(ValueError, match=r"counts=\(2, 3\) give rank 0 2 rows, not 3"):
        all_gather_rows(x, [2, 3], pair)
    with pytest.raises(ValueError, match=r"counts=\(2, 3\) are 5 rows, not 3"):
        reduce_scatter_rows(x, [2, 3], pair)
    with pytest.raises(ValueError, match="3 rows do not divide into equal parts for 2 ranks"):
        all_to_all_equal(x, pair)
    with pytest.raises(ValueError, match="3 rows do not divide into equal parts for 2 ranks"):
        reduce_scatter(x, pair)
    with pytest.raises(ValueError, match="without dimensions"):
        all_gather_rows(torch.tensor(1.0), [1, 1], pair)


class _Logged(torch.autograd.Function):
    """Twice its input; its log says when it was computed."""

    @staticmethod
    def forward(ctx, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        log.append("computed")
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.log.append("computed")
        return 2 * gradient, None


@dataclass
class _WaitLog(Baton):
    """Stands where a wait gives way to other work, and writes that one began."""

    log: list[str] = field(default_factory=list)

    def give_way(self) -> None:
        self.log.append("wait")


def _computed_meanwhile(rank: int, world: int) -> tuple[list[str], list[str], list[float], list[float]]:
    log: list[str] = []
    group = replace(_world_group(rank, world), baton=_WaitLog(log=log))
    x = torch.tensor([[10.0 * rank], [10.0 * rank + 1]], requires_grad=True)
    sent = start_all_to_all(3 * x, [1, 1], [1, 1], group)
    other = _Logged.apply(x, log)
    arrived = sent.finish()
    forward, log[:] = list(log), []
    (arrived * torch.tensor([[1.0], [5.0]]) + other).sum().backward()
    assert x.grad is not None
    return forward, log, arrived.flatten().tolist(), x.grad.flatten().tolist()


def test_what_is_computed_between_begin_and_finish_comes_before_the_wait_forward_and_backward(ranks: Ranks) -> None:
    for rank, (forward, backward, arrived, gradient) in enumerate(ranks.run(_computed_meanwhile, 2)):
        assert forward == ["computed", "wait"]
        assert backward == ["computed", "wait"]
        assert arrived == [3.0 * rank, 30.0 + 3 * rank]
        # what I sent to rank p came to p's row `rank`, which counts 1 or 5 times
        assert gradient == [3.0 * (1, 5)[rank] + 2] * 2
