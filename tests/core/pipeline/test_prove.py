"""Broken schedules of every kind are caught with the rank and the action; an independent judge agrees on drawn ones."""

import random
from collections import defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest

from core.pipeline.action import Action, Kind, Schedule
from core.pipeline.prove import faults, peak_live, sentence
from core.pipeline.schedule import FORWARD_ONLY
from core.pipeline.transfers import peer
from tests.core.pipeline.drawn import NAMES, TRAINING, made, with_rank


def found(schedule: Schedule) -> str:
    return "\n".join(faults(schedule))


def place(schedule: Schedule, rank: int, kind: Kind, microbatch: int, chunk: int = 0) -> int:
    """Where in a rank's list an action stands."""
    actions = schedule.ranks[rank]
    return next(i for i, a in enumerate(actions) if (a.kind, a.chunk, a.microbatch) == (kind, chunk, microbatch))


def dropped(schedule: Schedule, rank: int, at: int) -> Schedule:
    actions = schedule.ranks[rank]
    return with_rank(schedule, rank, [*actions[:at], *actions[at + 1 :]])


def swapped(schedule: Schedule, rank: int, first: int, second: int) -> Schedule:
    actions = list(schedule.ranks[rank])
    actions[first], actions[second] = actions[second], actions[first]
    return with_rank(schedule, rank, actions)


def changed(schedule: Schedule, rank: int, at: int, **fields: int) -> Schedule:
    actions = list(schedule.ranks[rank])
    actions[at] = replace(actions[at], **fields)  # type: ignore[arg-type]
    return with_rank(schedule, rank, actions)


def test_a_backward_before_its_forward_is_caught() -> None:
    schedule = made("1f1b", 2, 1, 3)
    f, b = place(schedule, 1, "forward", 1), place(schedule, 1, "backward", 1)
    text = found(swapped(schedule, 1, f, b))
    assert f"rank 1, action {f} (backward of microbatch 1 in chunk 0): the forward of the same is not done" in text


def test_a_forward_before_its_activation_has_arrived_is_caught() -> None:
    schedule = made("gpipe", 2, 1, 2)
    at = place(schedule, 1, "receive_activation", 1)
    text = found(swapped(schedule, 1, at, at + 1))
    assert text == f"rank 1, action {at} (forward of microbatch 1 in chunk 0): the activation has not arrived"


def test_a_backward_before_its_gradient_has_arrived_is_caught() -> None:
    schedule = made("1f1b", 3, 1, 2)
    at = place(schedule, 1, "receive_gradient", 0)
    assert found(swapped(schedule, 1, at, at + 1)).startswith(
        f"rank 1, action {at} (backward of microbatch 0 in chunk 0): the gradient has not arrived"
    )


def test_a_sending_before_the_result_is_there_is_caught() -> None:
    for kind, rank in (("send_activation", 0), ("send_gradient", 1)):
        schedule = made("1f1b", 2, 1, 2)
        at = place(schedule, rank, kind, 1)  # type: ignore[arg-type]
        text = found(swapped(schedule, rank, at, at - 1))
        assert f"rank {rank}, action {at - 1} (sending of the " in text
        assert "of microbatch 1 in chunk 0): what it sends is not there" in text


def test_a_dropped_send_is_caught_as_missing_and_as_a_wait_without_end() -> None:
    schedule = made("1f1b", 3, 1, 2)
    text = found(dropped(schedule, 1, place(schedule, 1, "send_activation", 1)))
    assert "rank 1: the sending of the activation of microbatch 1 in chunk 0 is missing" in text
    assert "rank 2, action 4 (receiving of the activation of microbatch 1 in chunk 0) waits for rank 1" in text


def test_a_rank_that_waits_for_one_that_has_ended_says_so() -> None:
    schedule = made(FORWARD_ONLY, 2, 1, 2)
    text = found(dropped(schedule, 0, place(schedule, 0, "send_activation", 1)))
    assert text.splitlines()[1:] == [
        "rank 1, action 2 (receiving of the activation of microbatch 1 in chunk 0) waits for rank 0, "
        "which has ended without sending it"
    ]


def test_a_dropped_receive_is_caught() -> None:
    schedule = made("1f1b", 2, 1, 2)
    text = found(dropped(schedule, 0, place(schedule, 0, "receive_gradient", 1)))
    assert "rank 0: the receiving of the gradient of microbatch 1 in chunk 0 is missing" in text
    assert "(backward of microbatch 1 in chunk 0): the gradient has not arrived" in text


def test_a_duplicated_backward_is_caught() -> None:
    schedule = made("1f1b", 1, 1, 2)
    text = found(with_rank(schedule, 0, [*schedule.ranks[0], Action(kind="backward", chunk=0, microbatch=1)]))
    assert text == "rank 0: the backward of microbatch 1 in chunk 0 is done 2 times"


def test_one_backward_twice_instead_of_another_is_caught() -> None:
    schedule = made("1f1b", 1, 1, 2)
    text = found(changed(schedule, 0, place(schedule, 0, "backward", 1), microbatch=0))
    assert "rank 0: the backward of microbatch 0 in chunk 0 is done 2 times" in text
    assert "rank 0: the backward of microbatch 1 in chunk 0 is missing" in text


def test_a_weight_gradient_before_its_input_gradient_is_caught() -> None:
    schedule = made("zero_bubble", 1, 1, 2)
    at = place(schedule, 0, "input_gradient", 1)
    text = found(swapped(schedule, 0, at, at + 1))
    assert text == (
        f"rank 0, action {at} (weight gradient of microbatch 1 in chunk 0): the input gradient of the same is not done"
    )


def test_a_gradient_both_whole_and_in_halves_is_caught() -> None:
    schedule = made("zero_bubble", 1, 1, 1)
    text = found(with_rank(schedule, 0, [*schedule.ranks[0], Action(kind="backward", chunk=0, microbatch=0)]))
    assert "rank 0: the input gradient of microbatch 0 in chunk 0 has no place in the schedule" in text


def test_a_weight_gradient_without_its_input_gradient_is_caught() -> None:
    schedule = made("zero_bubble", 1, 1, 1)
    assert "the input gradient of microbatch 0 in chunk 0 is missing" in found(dropped(schedule, 0, 1))
    assert "the weight gradient of microbatch 0 in chunk 0 is missing" in found(dropped(schedule, 0, 2))


def test_the_backward_of_any_part_may_be_whole_where_others_are_in_halves() -> None:
    schedule = made("zero_bubble", 2, 1, 2)
    actions = [a for a in schedule.ranks[0] if a.kind != "weight_gradient"]
    whole = [replace(a, kind="backward") if a.kind == "input_gradient" else a for a in actions]
    assert faults(with_rank(schedule, 0, whole)) == ()


def test_a_wrong_microbatch_in_a_receive_is_caught_with_what_was_sent() -> None:
    schedule = made("1f1b", 2, 2, 2)
    at = place(schedule, 1, "receive_activation", 1)
    text = found(changed(schedule, 1, at, microbatch=0))
    assert (
        f"rank 1, action {at} (receiving of the activation of microbatch 0 in chunk 0): "
        "what rank 0 sent is the activation of microbatch 1 for chunk 0"
    ) in text


def test_receives_in_another_order_than_the_sends_are_caught() -> None:
    schedule = made("gpipe", 2, 1, 2)
    first, second = place(schedule, 1, "receive_activation", 0), place(schedule, 1, "receive_activation", 1)
    actions = [schedule.ranks[1][i] for i in (first, second)]
    rest = [a for a in schedule.ranks[1] if a not in actions]
    assert faults(with_rank(schedule, 1, [*actions, *rest])) == ()
    text = found(with_rank(schedule, 1, [*reversed(actions), *rest]))
    assert text.count("what rank 0 sent is the activation of microbatch") == 2


def test_a_circle_of_waiting_ranks_is_caught_and_named_once() -> None:
    schedule = made("1f1b", 3, 1, 1)
    actions = schedule.ranks[1]
    backward_first = [a for a in actions if "gradient" in a.kind or a.kind == "backward"]
    forward_after = [a for a in actions if a not in backward_first]
    waits = [line for line in faults(with_rank(schedule, 1, [*backward_first, *forward_after])) if "waits" in line]
    assert waits == [
        "rank 1, action 0 (receiving of the gradient of microbatch 0 in chunk 0) waits for rank 2; "
        "rank 2, action 0 (receiving of the activation of microbatch 0 in chunk 0) waits for rank 1"
    ]


def test_the_interleaved_order_with_a_last_group_of_one_deadlocks_and_is_caught() -> None:
    # the reason for which orders are made for whole groups: eight ranks, nine microbatches, groups of eight and of one
    p, v, m = 8, 3, 9
    forwards = [(c, j) for group in (range(8), range(8, 9)) for c in range(v) for j in group]
    whole = made("1f1b", p, v, m)
    ranks = []
    for rank in range(p):
        ahead = 2 * (p - 1 - rank) + (v - 1) * p
        order = [("forward", pair) for pair in forwards[:ahead]]
        for k, (chunk, j) in enumerate(forwards):
            order += [("forward", pair) for pair in forwards[ahead + k : ahead + k + 1]]
            order.append(("backward", (v - 1 - chunk, j)))
        around: dict[tuple[str, tuple[int, int]], list[Action]] = defaultdict(list)
        for action in whole.ranks[rank]:
            kind = "forward" if action.kind.endswith(("activation", "forward")) else "backward"
            around[kind, (action.chunk, action.microbatch)].append(action)
        ranks.append(tuple(action for step in order for action in around[step]))
    text = found(replace(whole, ranks=tuple(ranks)))
    assert text.count("waits for rank") >= 2 and "missing" not in text
    assert faults(whole) == ()


def test_halves_of_a_combined_action_that_depend_on_each_other_are_caught() -> None:
    schedule = made("combined", 1, 1, 2)
    at = next(i for i, a in enumerate(schedule.ranks[0]) if a.kind == "combined")
    text = found(changed(schedule, 0, at, backward_microbatch=1))
    assert (
        f"rank 0, action {at} (forward of microbatch 1 in chunk 0, combined with the backward of microbatch 1 in chunk 0): "
        "its halves are both of microbatch 1, and so depend on each other"
    ) in text


def test_a_combined_action_that_is_no_more_ahead_than_plain_1f1b_is_caught() -> None:
    # the last rank without its extra warm-up microbatch
    actions = [
        Action(kind="combined", chunk=0, microbatch=j, backward_chunk=0, backward_microbatch=j) for j in range(3)
    ]
    text = found(Schedule(name="combined", stages=1, virtual=1, microbatches=3, ranks=(tuple(actions),)))
    assert text.count("depend on each other") == 3 and text.count("the forward of the same is not done") == 3


def test_a_combined_action_without_a_second_half_and_a_plain_one_with_it_are_caught() -> None:
    schedule = made("combined", 1, 1, 2)
    assert "action 0 (forward of microbatch 0 in chunk 0): only a combined action has a second half" in found(
        changed(schedule, 0, 0, backward_chunk=0)
    )
    lone = Action(kind="combined", chunk=0, microbatch=1)
    text = found(with_rank(schedule, 0, [schedule.ranks[0][0], lone, schedule.ranks[0][2]]))
    assert "action 1 (forward of microbatch 1 in chunk 0, combined with the backward of microbatch None" in text


@pytest.mark.parametrize("fields", [{"microbatch": 2}, {"microbatch": -1}, {"chunk": 1}])
def test_a_microbatch_or_chunk_that_does_not_exist_is_caught(fields: dict[str, int]) -> None:
    text = found(changed(made("1f1b", 2, 1, 2), 1, 1, **fields))
    assert "rank 1, action 1 (forward" in text and "there is no such chunk or microbatch" in text


def test_a_list_too_few_or_too_many_is_caught() -> None:
    schedule = made("1f1b", 2, 1, 2)
    assert found(replace(schedule, stages=3)).startswith("1f1b: lists of 2 ranks for 3 ranks")
    assert found(replace(schedule, microbatches=3)).count("microbatch 2 in chunk 0 is missing") == 8


def test_a_transfer_to_the_same_rank_or_past_the_end_is_caught() -> None:
    for rank, kind in (
        (1, "send_activation"),
        (0, "receive_activation"),
        (1, "receive_gradient"),
        (0, "send_gradient"),
    ):
        schedule = made("1f1b", 2, 1, 1)
        more = Action(kind=kind, chunk=0, microbatch=0)  # type: ignore[arg-type]
        text = found(with_rank(schedule, rank, [*schedule.ranks[rank], more]))
        assert f"rank {rank}: the {sentence(more)} has no place in the schedule" == text


def test_validation_has_no_backward_and_training_has() -> None:
    schedule = made(FORWARD_ONLY, 2, 1, 2)
    assert found(replace(schedule, name="1f1b")).count("is missing") == 8
    text = found(replace(made("1f1b", 1, 1, 1), name=FORWARD_ONLY))
    assert text == "rank 0: the backward of microbatch 0 in chunk 0 has no place in the schedule"


@pytest.mark.parametrize("name", NAMES)
def test_any_action_that_is_dropped_doubled_or_about_another_microbatch_is_caught(name: str) -> None:
    schedule = made(name, 3, 2, 3)
    for rank, actions in enumerate(schedule.ranks):
        for at, action in enumerate(actions):
            assert faults(dropped(schedule, rank, at)), (rank, at)
            assert faults(with_rank(schedule, rank, [*actions[: at + 1], *actions[at:]])), (rank, at)
            assert faults(changed(schedule, rank, at, microbatch=(action.microbatch + 1) % 3)), (rank, at)
            assert faults(changed(schedule, rank, at, chunk=1 - action.chunk)), (rank, at)


def judged_good(schedule: Schedule) -> bool:
    """Order and deadlock by a graph: program order and the k-th send to the k-th receive of a channel form no circle."""
    graph: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    sends: dict[tuple[int, int, str], list[tuple[tuple[int, int], Action]]] = defaultdict(list)
    receives: dict[tuple[int, int, str], list[tuple[tuple[int, int], Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        seen: dict[tuple[str, int, int], int] = {}
        for at, a in enumerate(actions):
            graph[rank, at] |= {(rank, at - 1)} if at else set()
            what = a.kind.partition("_")[2]
            if a.kind.startswith("send"):
                sends[rank, peer(a, rank, schedule), what].append(((rank, at), a))
            if a.kind.startswith("receive"):
                receives[peer(a, rank, schedule), rank, what].append(((rank, at), a))
            if not all(need in seen for need in needs(schedule, rank, a)):
                return False
            seen[a.kind, a.chunk, a.microbatch] = at
    for channel, sent in sends.items():
        for (source, a), (target, b) in zip(sent, receives[channel], strict=True):
            wraps = (a.kind == "send_activation" and channel[0] == schedule.stages - 1) - (
                a.kind == "send_gradient" and channel[0] == 0
            )
            if (a.chunk + wraps, a.microbatch) != (b.chunk, b.microbatch):
                return False
            graph[target].add(source)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def needs(schedule: Schedule, rank: int, a: Action) -> list[tuple[str, int, int]]:
    """What must stand before an action in its own rank's list; more than one rank, no combined actions."""
    first, last = (rank, a.chunk) == (0, 0), (rank, a.chunk) == (schedule.stages - 1, schedule.virtual - 1)
    back = "input_gradient" if schedule.name == "zero_bubble" else "backward"
    kinds = {
        "forward": [] if first else ["receive_activation"],
        "backward": ["forward", *([] if last else ["receive_gradient"])],
        "input_gradient": ["forward", *([] if last else ["receive_gradient"])],
        "weight_gradient": ["input_gradient"],
        "send_activation": ["forward"],
        "send_gradient": [back],
    }
    return [(kind, a.chunk, a.microbatch) for kind in kinds.get(a.kind, [])]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", FORWARD_ONLY])
def test_the_verdict_on_swapped_actions_is_that_of_an_independent_judge(name: str) -> None:
    draw = random.Random(8)
    good = 0
    for _ in range(250):
        p, v, m = draw.choice(((2, 1, 3), (2, 2, 2), (3, 1, 4), (3, 2, 3), (4, 1, 3)))
        schedule = made(name, p, v, m)
        for _ in range(draw.choice((1, 1, 2))):
            rank = draw.randrange(p)
            first = draw.randrange(len(schedule.ranks[rank]) - 1)
            second = min(first + draw.choice((1, 1, 1, 2, 5)), len(schedule.ranks[rank]) - 1)
            schedule = swapped(schedule, rank, first, second)
        assert (faults(schedule) == ()) == judged_good(schedule)
        good += judged_good(schedule)
    assert 10 < good < 240


def test_live_microbatches_count_until_the_weight_gradient() -> None:
    kinds = ("forward", "forward", "input_gradient", "input_gradient", "forward", "weight_gradient", "weight_gradient")
    microbatches = (0, 1, 0, 1, 2, 0, 1)
    actions = tuple(Action(kind=k, chunk=0, microbatch=j) for k, j in zip(kinds, microbatches, strict=True))  # type: ignore[arg-type]
    whole = tuple(Action(kind=k, chunk=0, microbatch=0) for k in ("forward", "backward", "forward"))  # type: ignore[arg-type]
    assert peak_live(Schedule(name="x", stages=2, virtual=1, microbatches=3, ranks=(actions, whole))) == (3, 1)


def test_every_training_schedule_leaves_nothing_alive() -> None:
    for name in TRAINING:
        for rank in made(name, 3, 2, 4).ranks:
            ends = sum(a.kind in ("backward", "weight_gradient", "combined") for a in rank)
            assert ends == sum(a.kind in ("forward", "combined") for a in rank)
