"""Schedules for any numbers of ranks, chunks and microbatches: the published orders, and 10,000 drawn ones proved."""

import random
from itertools import pairwise, product

import pytest

from core.pipeline.prove import faults, peak_live
from core.pipeline.simulate import Costs, simulate
from tests.core.pipeline.drawn import NAMES, TRAINING, computed, made

# p * v * m of a drawn schedule, so that 10,000 proofs take seconds; a few large ones go with them
LARGEST = 100


def sizes() -> list[tuple[int, int, int]]:
    """Up to 16 ranks and any chunks and microbatches whose product is at most LARGEST."""
    pairs = ((p, v) for p in range(1, 17) for v in range(1, LARGEST // p + 1))
    return [(p, v, m) for p, v in pairs for m in range(1, LARGEST // (p * v) + 1)]


def test_ten_thousand_drawn_schedules_are_complete_in_order_and_free_of_deadlock() -> None:
    large = [(8, 4, 20), (7, 3, 16), (8, 4, 1), (5, 4, 19), (8, 3, 13), (8, 1, 60), (13, 2, 11), (1, 6, 50)]
    draw = random.Random(6)
    cases = [(name, *size) for name in NAMES for size in large]
    drawable = sizes()
    cases += [(draw.choice(NAMES), *draw.choice(drawable)) for _ in range(10_000 - len(cases))]
    # what is drawn twice needs no second proof
    distinct = sorted(set(cases))
    assert len(distinct) > 4_500
    for case in distinct:
        assert faults(made(*case)) == (), case


@pytest.mark.parametrize("name", NAMES)
def test_every_small_schedule_is_proved(name: str) -> None:
    for p, v, m in product(range(1, 6), range(1, 4), range(1, 8)):
        assert faults(made(name, p, v, m)) == (), (p, v, m)


def test_1f1b_is_the_published_order() -> None:
    schedule = made("1f1b", 4, 1, 5)
    assert [computed(schedule, rank).replace("0.", "") for rank in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_interleaved_1f1b_is_the_published_order() -> None:
    # figure 4 of arXiv 2104.04473: four ranks, two chunks, eight microbatches
    schedule = made("1f1b", 4, 2, 8)
    assert computed(schedule, 3) == (
        "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0 F0.5 B0.1 F0.6 B0.2 F0.7 B0.3 "
        "F1.4 B1.4 F1.5 B1.5 F1.6 B1.6 F1.7 B1.7 B0.4 B0.5 B0.6 B0.7"
    )
    assert computed(schedule, 0).startswith(
        "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B0.0"[:-5]
    )


def test_gpipe_does_all_forwards_before_any_backward() -> None:
    assert computed(made("gpipe", 2, 2, 3), 1) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2"


def test_weight_gradients_lag_by_the_rank_and_fill_the_flush() -> None:
    schedule = made("zero_bubble", 3, 1, 4)
    assert [computed(schedule, rank).replace("0.", "") for rank in range(3)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_a_schedule_has_its_name_and_sizes() -> None:
    for name in NAMES:
        schedule = made(name, 3, 2, 5)
        assert (schedule.name, schedule.stages, schedule.virtual, schedule.microbatches) == (name, 3, 2, 5)
        assert len(schedule.ranks) == 3


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 1, 1)])
def test_sizes_that_are_not_positive_are_refused(sizes: tuple[int, int, int]) -> None:
    for name in TRAINING:
        with pytest.raises(ValueError, match="all must be positive"):
            made(name, *sizes)


def test_one_rank_has_nothing_to_send() -> None:
    for name, v in product(NAMES, (1, 3)):
        assert not [action for action in made(name, 1, v, 4).ranks[0] if action.kind.startswith(("send", "receive"))]


def test_a_last_group_of_any_size_keeps_the_order_of_the_whole_groups() -> None:
    for name in TRAINING:
        whole, less = made(name, 4, 3, 8), made(name, 4, 3, 6)
        for rank in range(4):
            kept = [word for word in computed(whole, rank).replace("+", " ").split() if word[-1] in "012345"]
            assert computed(less, rank).replace("+", " ").split() == kept


def test_the_activations_that_are_kept_are_those_of_the_closed_forms() -> None:
    for p, v, groups in product(range(1, 8), range(1, 5), range(1, 5)):
        m = p * groups
        behind = [p - 1 - rank for rank in range(p)]
        most = [v * m] * p
        one = [b + 1 if v == 1 else min(2 * b + (v - 1) * p + 1, v * m) for b in behind]
        assert peak_live(made("gpipe", p, v, m)) == tuple(most)
        assert peak_live(made("1f1b", p, v, m)) == tuple(min(n, v * m) for n in one)
        assert peak_live(made("combined", p, v, m)) == tuple(min(2 * b + (v - 1) * p + 2, v * m) for b in behind)
        assert max(peak_live(made("zero_bubble", p, v, m))) <= max(one)


def test_interleaved_1f1b_keeps_what_the_reference_counted_for_four_ranks_of_four_chunks() -> None:
    assert peak_live(made("1f1b", 4, 4, 32)) == (19, 17, 15, 13)


def test_halves_of_combined_actions_are_of_different_microbatches_and_of_neighbours_never_wait() -> None:
    for p, v, groups in product(range(1, 7), range(1, 4), range(2, 5)):
        schedule = made("combined", p, v, p * groups)
        timeline = simulate(schedule, Costs(forward=1, backward=2, overlap=0.25))
        for rank in timeline.ranks:
            pairs = [timed for timed in rank if timed.action.kind == "combined"]
            # one combined action after the other, without a gap, though each is a single piece for its neighbours
            assert all(b.begin == a.end for a, b in pairwise(pairs))
            assert all(timed.action.microbatch != timed.action.backward_microbatch for timed in pairs)


def test_combined_actions_are_most_of_a_long_run_and_every_backward_of_one_rank_but_the_first_warm_up() -> None:
    for p, v, m in ((4, 1, 40), (4, 2, 40), (3, 3, 41)):
        schedule = made("combined", p, v, m)
        for rank in range(p):
            pairs = sum(action.kind == "combined" for action in schedule.ranks[rank])
            assert pairs >= v * m - (2 * (p - 1 - rank) + (v - 1) * p + 1) - 2 * v * (-m % p)
