"""Times of schedules: the bubble is the closed form on equal costs, and small cases are what one draws by hand."""

import math
from itertools import pairwise, product

import pytest

from core.pipeline.action import Action
from core.pipeline.simulate import Costs, simulate
from tests.core.pipeline.drawn import TRAINING, made, with_rank

SIZES = tuple((p, v, p * groups) for p, v, groups in product((1, 2, 3, 5, 8), (1, 2, 3, 4), (1, 2, 5)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "combined"])
def test_the_bubble_on_equal_costs_is_p_minus_1_over_v_times_m(name: str) -> None:
    for p, v, m in SIZES:
        for costs in (Costs(), Costs(forward=1.0, backward=1.0), Costs(forward=0.25, backward=0.75)):
            assert simulate(made(name, p, v, m), costs).bubble == pytest.approx((p - 1) / (v * m), abs=1e-12), (p, v, m)


def test_plain_1f1b_and_gpipe_have_their_bubble_for_any_number_of_microbatches() -> None:
    for name, p, m in product(("gpipe", "1f1b"), range(1, 9), range(1, 21)):
        assert simulate(made(name, p, 1, m), Costs()).bubble == pytest.approx((p - 1) / m, abs=1e-12)


def test_zero_bubble_waits_only_for_what_weight_gradients_cannot_fill() -> None:
    # arXiv 2401.10241 table 2: (p - 1) (T_F + T_B - T_W), with the input gradient as T_B
    for p, v, m in SIZES:
        for f, i, w in ((1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 2.0, 1.0)):
            costs = Costs(forward=f, input_gradient=i, weight_gradient=w)
            waiting = (p - 1) * (f + i - w)
            assert simulate(made("zero_bubble", p, v, m), costs).total == pytest.approx(v * m * (f + i + w) + waiting)


def test_zero_bubble_has_less_bubble_than_1f1b_for_any_sizes() -> None:
    for p, v, m in product(range(2, 7), range(1, 4), range(1, 14)):
        zero, one = (simulate(made(name, p, v, m), Costs()).bubble for name in ("zero_bubble", "1f1b"))
        assert zero < one, (p, v, m)


def test_a_last_group_that_is_smaller_never_takes_longer_than_a_whole_one() -> None:
    for name, p, v, m in product(TRAINING, (3, 4), (2, 3), range(1, 10)):
        whole = -(-m // p) * p
        assert simulate(made(name, p, v, m), Costs()).total <= simulate(made(name, p, v, whole), Costs()).total


def test_two_ranks_and_two_microbatches_are_timed_as_drawn_by_hand() -> None:
    costs = Costs(forward=(1.0, 2.0), backward=(3.0, 4.0), transfer=0.5)
    timeline = simulate(made("1f1b", 2, 1, 2), costs)
    compute = [[(t.begin, t.end) for t in rank if t.action.kind in ("forward", "backward")] for rank in timeline.ranks]
    # rank 1: F0 from 1.5, B0, F1, B1; rank 0: F0, F1, B0 half a second after B0 of rank 1, B1 likewise
    assert compute[1] == [(1.5, 3.5), (3.5, 7.5), (7.5, 9.5), (9.5, 13.5)]
    assert compute[0] == [(0.0, 1.0), (1.0, 2.0), (8.0, 11.0), (14.0, 17.0)]
    assert timeline.total == 17.0
    assert (timeline.busy(0), timeline.busy(1)) == (8.0, 12.0)
    assert timeline.bubble == pytest.approx((2 * 17 - 20) / 20)


def test_costs_of_a_part_follow_it_to_its_rank_and_chunk() -> None:
    timeline = simulate(made("1f1b", 2, 2, 2), Costs(forward=(1.0, 2.0, 3.0, 4.0), backward=(5.0, 6.0, 7.0, 8.0)))
    for rank, timed in ((r, t) for r in range(2) for t in timeline.ranks[r]):
        base = {"forward": 1, "backward": 5}.get(timed.action.kind)
        if base is not None:
            assert timed.end - timed.begin == base + 2 * timed.action.chunk + rank


def test_a_combined_action_saves_its_share_of_both_halves() -> None:
    for timed in simulate(made("combined", 2, 1, 6), Costs(forward=1, backward=3, overlap=0.25)).ranks[1]:
        if timed.action.kind == "combined":
            assert timed.end - timed.begin == 3.0
    plain, saved = (simulate(made("combined", 4, 2, 40), Costs(overlap=share)).total for share in (0.0, 0.3))
    assert saved < 0.8 * plain


def test_the_actions_of_a_rank_follow_each_other_and_a_receive_ends_when_it_has_arrived() -> None:
    for name in TRAINING:
        timeline = simulate(made(name, 3, 2, 6), Costs(transfer=0.1))
        for rank in timeline.ranks:
            assert rank[0].begin == 0
            assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(rank))
        assert timeline.total > simulate(made(name, 3, 2, 6), Costs()).total


def test_nothing_that_costs_nothing_has_a_bubble() -> None:
    timeline = simulate(made("1f1b", 3, 1, 2), Costs(forward=0.0, backward=0.0))
    assert (timeline.total, timeline.bubble) == (0.0, 0.0)


def test_a_rank_that_computes_nothing_only_waits() -> None:
    timeline = simulate(made("gpipe", 2, 1, 3), Costs(forward=(0.0, 1.0), backward=(0.0, 2.0)))
    assert (timeline.bubble_of(0), timeline.bubble_of(1)) == (math.inf, 0.0)
    assert timeline.bubble == 1.0


def test_a_deadlock_and_costs_for_other_parts_are_refused() -> None:
    schedule = made("1f1b", 2, 1, 2)
    kept = [action for action in schedule.ranks[0] if action.kind != "send_activation"]
    with pytest.raises(ValueError, match="1f1b: rank 0 waits for ever"):
        simulate(with_rank(schedule, 0, kept), Costs())
    with pytest.raises(ValueError, match="3 costs for 2 parts"):
        simulate(schedule, Costs(forward=(1.0, 2.0, 3.0)))
    with pytest.raises(ValueError, match="leads past the end"):
        simulate(with_rank(schedule, 0, [Action(kind="send_gradient", chunk=0, microbatch=0)]), Costs())


def test_a_combined_action_hides_a_share_of_its_exchanges_as_far_as_the_rest_lasts() -> None:
    some = Costs(forward=3.0, backward=6.0, exchanged_forward=1.0, exchanged_backward=2.0, hidden=0.5)
    assert some.combined(0, 0) == 9.0 - 0.5 * 3.0
    most = Costs(forward=3.0, backward=(6.0, 7.0), exchanged_forward=3.0, exchanged_backward=(5.0, 7.0), hidden=1.0)
    assert most.combined(0, 0) == 8.0
    assert most.combined(0, 1) == 10.0
    p, v, m = 3, 2, 6
    timeline = simulate(made("combined", p, v, m), some)
    pairs = [sum(timed.action.kind == "combined" for timed in rank) for rank in timeline.ranks]
    assert [timeline.busy(rank) for rank in range(p)] == [pytest.approx(v * m * 9.0 - 1.5 * count) for count in pairs]
    with pytest.raises(ValueError, match="2 costs for 6 parts"):
        simulate(made("combined", p, v, m), Costs(exchanged_backward=(1.0, 2.0)))
