"""Two pieces of work that share a baton: whose turn it is, how they end, and their collectives on real ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.parallel.baton import Baton
from core.parallel.collectives import all_to_all
from core.parallel.groups import make_groups
from core.parallel.mesh import fold
from tests.ranks import Ranks


class Talk:
    """Lines that two pieces of work write between giving way."""

    def __init__(self) -> None:
        self.baton = Baton()
        self.lines: list[str] = []

    def say(self, name: str, lines: int) -> None:
        for i in range(lines):
            if i:
                self.baton.give_way()
            self.lines.append(f"{name}{i}")
            time.sleep(0.002)  # time for the other to break in, which it must not
            self.lines.append(f"{name}{i}.")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (3, 3, "a0 b0 a1 b1 a2 b2"),
        (1, 4, "a0 b0 b1 b2 b3"),
        (4, 1, "a0 b0 a1 a2 a3"),
        (2, 3, "a0 b0 a1 b1 b2"),
        (0, 2, "b0 b1"),
        (2, 0, "a0 a1"),
        (0, 0, ""),
    ],
)
def test_turns_change_only_where_work_gives_way_or_ends(first: int, second: int, expected: str) -> None:
    talk = Talk()
    talk.baton.together(lambda: talk.say("a", first), lambda: talk.say("b", second))
    assert talk.lines == [line for word in expected.split() for line in (word, f"{word}.")]


def test_a_baton_serves_again_after_it_has_served() -> None:
    talk = Talk()
    for _ in range(3):
        talk.baton.together(lambda: talk.say("a", 2), lambda: talk.say("b", 2))
    assert [line for line in talk.lines if "." not in line] == ["a0", "b0", "a1", "b1"] * 3


def test_giving_way_returns_at_once_where_nothing_runs_together() -> None:
    baton = Baton()
    baton.give_way()
    baton.together(lambda: None, lambda: None)
    baton.give_way()


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_exception_surfaces_after_the_other_has_ended(guilty: int) -> None:
    talk = Talk()

    def fail() -> None:
        talk.say("x", 2)
        raise ValueError("the guilty one")

    def work() -> None:
        talk.say("w", 5)

    with pytest.raises(ValueError, match="the guilty one"):
        talk.baton.together(*((fail, work) if guilty == 0 else (work, fail)))
    assert talk.lines[-1] == "w4." and talk.lines.count("x1.") == 1
    talk.baton.give_way()  # nobody waits for a turn any more
    assert not [thread for thread in threading.enumerate() if thread.name == "combined"]


def test_an_interrupt_that_comes_while_the_second_waits_for_its_first_turn_ends_both() -> None:
    baton, ended = Baton(), []

    def first() -> None:
        while "wait_for" not in _functions_of_main_thread():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        baton.give_way()
        ended.append("first")

    # A shell that starts a test run in the background has it ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            baton.together(first, lambda: ended.append("second"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["first"]
    assert not [thread for thread in threading.enumerate() if thread.name == "combined"]


def _functions_of_main_thread() -> set[str]:
    names, frame = set(), sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def exchange(rank: int, world: int) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]], list[str]]:
    """Two functions of three all-to-alls each, one forward only and one with its backward, on one group at a time."""
    baton = Baton()
    group = make_groups(fold(ParallelConfig(), world), rank, baton=baton).dp
    results: dict[str, list[Tensor]] = {"a": [], "b": []}
    gradients: dict[str, list[Tensor]] = {"a": [], "b": []}
    order: list[str] = []

    def work(name: str, factor: float) -> None:
        for i in range(3):
            x = torch.full((world * 2, 3), factor * (10 * i + rank + 1)).requires_grad_()
            x.data += torch.arange(world).repeat_interleave(2)[:, None] / 4
            order.append(f"{name}{i}")
            y = all_to_all(x, [2] * world, [2] * world, group)
            results[name].append(y.detach().clone())
            (y * (rank + 1)).sum().backward()
            assert x.grad is not None
            gradients[name].append(x.grad.clone())

    baton.together(lambda: work("a", 1.0), lambda: work("b", -100.0))
    return results, gradients, order


def test_collectives_of_both_on_one_group_meet_their_own_on_the_other_rank(ranks: Ranks) -> None:
    for world in (2, 3):
        found = ranks.run(exchange, world, timeout_seconds=20.0)
        assert all(order == found[0][2] for _, _, order in found), "the order of collectives must be that of all ranks"
        assert found[0][2][:2] == ["a0", "b0"] and sorted(found[0][2]) == ["a0", "a1", "a2", "b0", "b1", "b2"]
        for rank, (results, gradients, _) in enumerate(found):
            for name, factor in (("a", 1.0), ("b", -100.0)):
                for i in range(3):
                    rows = [factor * (10 * i + peer + 1) + rank / 4 for peer in range(world) for _ in range(2)]
                    assert torch.equal(results[name][i], torch.tensor(rows)[:, None].expand(-1, 3)), (world, name, i)
                    back = torch.arange(1.0, world + 1).repeat_interleave(2)[:, None].expand(-1, 3)
                    assert torch.equal(gradients[name][i], back), (world, name, i)
