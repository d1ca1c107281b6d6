"""The pool of ranks itself: results, failures of every kind, and recovery after each."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankDiedError, RankRaisedError, Ranks, RanksHungError

Point = namedtuple("Point", ["x", "y"])


def _sum_of_ranks(rank: int, world: int, factor: float) -> tuple[int, int, float]:
    x = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def _echo(rank: int, world: int, *values: object) -> object:
    return values


def _of_this_module(rank: int, world: int, point: Point) -> Point:
    return Point(point.x + rank, point.y)


def _graph(rank: int, world: int) -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def _raise_on(rank: int, world: int, guilty: int) -> None:
    if rank == guilty:
        raise ValueError(f"guilty is {guilty}")
    dist.barrier()


def _raise_everywhere(rank: int, world: int) -> None:
    assert rank < 0


def _exit_on(rank: int, world: int, guilty: int) -> None:
    if rank == guilty:
        print("last words", flush=True)
        os._exit(41)
    dist.barrier()


def _sleep_on(rank: int, world: int, sleepy: int) -> int:
    while rank == sleepy:
        time.sleep(0.1)
    return rank


def _wait_for_nobody(rank: int, world: int) -> None:
    if rank > 0:
        dist.barrier()


def _process(rank: int, world: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def _unpicklable(rank: int, world: int) -> object:
    return lambda: rank


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_run_sees_exactly_the_world_that_it_asked_for(ranks: Ranks, world: int) -> None:
    expected = 0.5 * sum(range(1, world + 1))
    assert ranks.run(_sum_of_ranks, world, 0.5) == [(rank, world, expected) for rank in range(world)]


def test_runs_of_changing_worlds_follow_each_other_in_the_same_processes(ranks: Ranks) -> None:
    before = ranks.run(_process, 4)
    for world in (4, 1, 3, 2, 4, 2):
        assert len(ranks.run(_sum_of_ranks, world, 1.0)) == world
    assert ranks.run(_process, 4) == before
    assert [threads for _, threads in before] == [1] * 4
    assert len({process for process, _ in before}) == 4


def test_only_as_many_ranks_are_started_as_the_largest_run_so_far_asked_for() -> None:
    pool = Ranks()
    try:
        two = pool.run(_process, 2)
        assert len(pool._workers) == 2
        three = pool.run(_process, 3)
        assert len(pool._workers) == 3 and three[:2] == two
        assert pool.run(_process, 1) == three[:1]
        assert len(pool._workers) == 3 and pool.run(_process, 3) == three
        assert pool.run(_sum_of_ranks, 3, 1.0) == [(rank, 3, 6.0) for rank in range(3)]
    finally:
        pool.close()


def test_a_failure_replaces_every_rank_also_those_that_took_no_part() -> None:
    pool = Ranks()
    try:
        before = {process for process, _ in pool.run(_process, 3)}
        with pytest.raises(RankRaisedError):
            pool.run(_raise_everywhere, 2)
        assert not pool._workers
        assert not before & {process for process, _ in pool.run(_process, 3)}
    finally:
        pool.close()


@pytest.mark.parametrize("world", [0, 9])
def test_a_world_that_the_pool_does_not_have_is_refused(ranks: Ranks, world: int) -> None:
    with pytest.raises(ValueError, match=f"world={world}"):
        ranks.run(_echo, world)


def test_a_function_inside_a_function_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="top of its module"):
        ranks.run(lambda rank, world: rank, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_tensors_travel_unchanged_in_both_directions(ranks: Ranks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.arange(35).reshape(5, 7)[: shape[0] if shape else 1] - 11).to(dtype)
    x = x if shape else x[0, 0]
    (((back, nested),),) = (ranks.run(_echo, 1, x, {"transposed": x.t()}),)
    assert back.dtype == dtype and back.shape == x.shape
    assert torch.equal(back.to(torch.float64), x.to(torch.float64))
    assert torch.equal(nested["transposed"].to(torch.float64), x.t().to(torch.float64))


def test_results_are_detached_from_the_graph_and_writable(ranks: Ranks) -> None:
    (x,) = ranks.run(_graph, 1)
    assert not x.requires_grad
    assert torch.equal(x.add_(1), torch.full((3,), 3.0))


def test_classes_of_the_test_module_travel_too(ranks: Ranks) -> None:
    assert ranks.run(_of_this_module, 2, Point(3, 4)) == [Point(3, 4), Point(4, 4)]


@pytest.mark.parametrize("guilty", [0, 2])
def test_an_exception_on_one_rank_names_it_at_once_though_the_others_hang(ranks: Ranks, guilty: int) -> None:
    ranks.run(_echo, 3)
    start = time.monotonic()
    with pytest.raises(
        RankRaisedError, match=f"rank {guilty} raised(.|\n)*in _raise_on(.|\n)*ValueError: guilty is {guilty}"
    ) as e:
        ranks.run(_raise_on, 3, guilty)
    assert e.value.ranks[0] == guilty
    assert time.monotonic() - start < 10
    assert len(ranks.run(_sum_of_ranks, 4, 1.0)) == 4


def test_an_exception_on_every_rank_names_every_rank(ranks: Ranks) -> None:
    with pytest.raises(RankRaisedError) as e:
        ranks.run(_raise_everywhere, 3)
    assert sorted(e.value.ranks) == [0, 1, 2]
    assert "assert rank < 0" in str(e.value)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(ranks: Ranks) -> None:
    with pytest.raises(RankRaisedError, match="rank 0 raised"):
        ranks.run(_unpicklable, 1)


def test_a_rank_that_dies_is_named_with_its_exit_code_and_last_words(ranks: Ranks) -> None:
    with pytest.raises(RankDiedError, match=r"rank 1 died with exit code 41(.|\n)*last words") as e:
        ranks.run(_exit_on, 3, 1)
    assert e.value.ranks[0] == 1
    assert len(ranks.run(_sum_of_ranks, 4, 1.0)) == 4


def test_a_rank_that_hangs_in_python_is_named_with_its_stack(ranks: Ranks) -> None:
    ranks.run(_echo, 3)
    with pytest.raises(RanksHungError, match=r"ranks \[1\] of a world of 3(.|\n)*in _sleep_on") as e:
        ranks.run(_sleep_on, 3, 1, timeout_seconds=1.0)
    assert e.value.ranks == (1,)
    assert ranks.run(_sleep_on, 3, 7) == [0, 1, 2]


def test_ranks_that_hang_in_a_collective_are_named_with_their_stacks(ranks: Ranks) -> None:
    ranks.run(_echo, 3)
    with pytest.raises(RanksHungError, match=r"ranks \[1, 2\] of a world of 3(.|\n)*in _wait_for_nobody"):
        ranks.run(_wait_for_nobody, 3, timeout_seconds=1.0)
    assert len(ranks.run(_sum_of_ranks, 2, 1.0)) == 2


def test_a_closed_pool_leaves_no_process_and_no_file_behind() -> None:
    pool = Ranks()
    processes = [process for process, _ in pool.run(_process, 4)]
    folder = pool._folder
    assert folder is not None and folder.exists()
    pool.close()
    assert not folder.exists()
    end = time.monotonic() + 5
    while any(Path(f"/proc/{p}").exists() for p in processes) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [p for p in processes if Path(f"/proc/{p}").exists()]
