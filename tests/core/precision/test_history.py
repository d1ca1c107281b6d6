"""What delayed scaling remembers: the largest of every role and step, newest first, and nothing of steps that are not to count."""

from __future__ import annotations

import pytest
import torch

from core.parallel.groups import one_rank
from core.precision.history import AmaxHistory, Role, forget, remember
from core.state.box import Box

CPU = torch.device("cpu")


def history(steps: int = 3) -> AmaxHistory:
    return AmaxHistory(steps, one_rank(), CPU)


def see(of: AmaxHistory, role: Role, number: float, *, margin: int = 0, note: bool = True) -> float:
    return float(of.amax(role, torch.tensor([[number]]), margin, note=note))


def end(of: AmaxHistory) -> None:
    remember([of], one_rank())


def test_the_largest_of_a_step_comes_first_and_the_oldest_falls_out() -> None:
    kept = history()
    for numbers in ((1.0, 7.0), (2.0,), (3.0, 5.0, 4.0), (6.0,)):
        for number in numbers:
            see(kept, "input", number)
        end(kept)
    assert kept.history.tolist() == [[6.0, 5.0, 2.0], [0.0] * 3, [0.0] * 3]


def test_what_was_measured_stands_until_something_is_remembered_and_the_largest_then() -> None:
    kept = history()
    assert see(kept, "gradient", 3.0) == 3.0 and see(kept, "gradient", 0.5) == 0.5
    end(kept)
    assert see(kept, "gradient", 100.0) == 3.0
    assert see(kept, "gradient", 1.0, margin=2) == 12.0
    assert see(kept, "input", 8.0) == 8.0  # each role by itself
    end(kept)
    assert see(kept, "gradient", 1.0) == 100.0


def test_what_is_only_looked_at_is_not_remembered() -> None:
    kept = history()
    see(kept, "weight", 9.0, note=False)
    see(kept, "weight", 2.0)
    end(kept)
    assert kept.history[1].tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_number_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    kept = history()
    see(kept, "gradient", 3.0)
    end(kept)
    see(kept, "gradient", bad)
    end(kept)
    assert kept.history[2].tolist() == [0.0, 3.0, 0.0]
    assert see(kept, "gradient", 1.0) == 3.0


def test_a_step_that_updated_nothing_is_forgotten() -> None:
    kept = history()
    see(kept, "input", 3.0)
    end(kept)
    see(kept, "input", 1e30)
    forget([kept])
    see(kept, "input", 2.0)
    end(kept)
    assert kept.history[0].tolist() == [2.0, 3.0, 0.0]


def test_every_expert_has_its_own_and_one_without_rows_keeps_what_it_had() -> None:
    kept = AmaxHistory(2, one_rank(), CPU, experts=6, held=Box(offset=(2, 0), shape=(3, 4)))
    assert kept.declared.shape == (6, 3, 2) and kept.declared.box == Box(offset=(2, 0, 0), shape=(3, 3, 2))
    kept.amax("input", torch.tensor([1.0, 2.0, 4.0]), 0, note=True)
    remember([kept], one_rank())
    kept.amax("input", torch.tensor([5.0, 0.0, 1.0]), 0, note=True)
    remember([kept], one_rank())
    assert kept.history[:, 0].tolist() == [[5.0, 1.0], [0.0, 2.0], [1.0, 4.0]]
    assert kept.amax("input", torch.tensor([9.0, 9.0, 9.0]), 0, note=False).tolist() == [5.0, 2.0, 4.0]


def test_no_histories_are_remembered_without_a_collective() -> None:
    remember([], one_rank())
