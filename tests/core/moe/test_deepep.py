"""The adapters to packages of kernels, on stand-ins of their interface: the loop over tokens and choices, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.config.mapping import PACKAGES, DispatcherName, ParallelConfig
from core.errors import RequestError
from core.moe.dispatch.deepep import CALLS as DEEPEP_CALLS
from core.moe.dispatch.hybridep import CALLS as HYBRIDEP_CALLS
from core.moe.dispatch.make import make_dispatcher
from core.moe.dispatch.package import load_deep_ep
from core.moe.dispatch.preflight import preflight
from core.moe.router import Routing
from core.parallel.groups import groups_for
from tests.core.moe.kernel_package import Buffer, HybridEPBuffer, installed
from tests.core.moe.test_dispatch import HIDDEN, Moved, Work, moe_of, move, naive, work
from tests.core.shares import place_on
from tests.ranks import Ranks

JOBS = {
    2: [
        work(8, (4, 3)),
        work(8, (0, 5)),
        work(8, (0, 0)),
        work(6, (5, 6), padded=True),
        work(8, (5, 2), only=range(4)),
        work(8, (4, 3), multiple=5),
    ],
    4: [
        work(12, (3, 0, 7, 1)),
        work(8, (2, 2, 5, 2), padded=True, multiple=3),
        work(6, (2, 0, 4, 1), parallel=ParallelConfig(tp=2, ep=2)),
    ],
}


def move_by_package(rank: int, world: int, jobs: Sequence[Work], name: DispatcherName) -> list[Moved]:
    with installed():
        return [move(rank, job, name, groups_for(job.parallel)) for job in jobs]


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("world", [2, 4])
def test_an_adapter_gives_the_outputs_and_all_gradients_of_the_loop(
    ranks: Ranks, name: DispatcherName, world: int
) -> None:
    found = ranks.run(move_by_package, world, JOBS[world], name, timeout_seconds=60.0)
    for i, job in enumerate(JOBS[world]):
        mine = [rank[i] for rank in found]
        *truths, of_experts = naive(job)
        for field, truth in zip(("out", "hidden_gradient", "weights_gradient"), truths, strict=True):
            parts = torch.cat([getattr(moved, field) for moved in mine])
            # The packages carry router weights as float32.
            torch.testing.assert_close(parts, truth, rtol=1e-5, atol=1e-6, msg=lambda m, n=field: f"{n}: {m}")
        for moved in mine:
            for piece_name, piece in moved.experts.items():
                whole = of_experts[piece_name]
                offset, shape = piece.box.offset[0], piece.box.shape[0]
                torch.testing.assert_close(piece.gradient, whole[offset : offset + shape], rtol=1e-5, atol=1e-5)
            assert all(count % job.multiple == 0 for count in moved.counts)
            assert moved.rows.shape == (sum(moved.counts), HIDDEN)


def try_package(rank: int, world: int, name: DispatcherName) -> None:
    with installed():
        job = work(8, (1, 1))
        place = place_on(groups_for(job.parallel), ParallelConfig(ep=2, dispatcher=name))
        preflight(moe_of(job), HIDDEN, place, timeout_seconds=10.0)


@pytest.mark.parametrize("name", PACKAGES)
def test_c7_the_small_exchange_before_training_passes_through_an_adapter(ranks: Ranks, name: DispatcherName) -> None:
    ranks.run(try_package, 2, name)


def try_without(rank: int, world: int, name: DispatcherName) -> None:
    job = work(8, (1, 1))
    place = place_on(groups_for(job.parallel), ParallelConfig(ep=2, dispatcher=name))
    with pytest.raises(RequestError, match=f"parallel.dispatcher={name} needs the package deep_ep"):
        preflight(moe_of(job), HIDDEN, place, timeout_seconds=10.0)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_small_exchange_says_that_a_package_is_missing_as_the_users_mistake(
    ranks: Ranks, name: DispatcherName
) -> None:
    ranks.run(try_without, 2, name)


def use(rank: int, world: int, name: DispatcherName) -> str:
    """What the first dispatch says."""
    job = work(8, (1, 1))
    dispatcher = make_dispatcher(moe_of(job), place_on(groups_for(job.parallel), ParallelConfig(ep=2, dispatcher=name)))
    routing = Routing(
        experts_TK=torch.tensor([[0, 1, 2]]), weights_TK=torch.ones(1, 3), counts_E=torch.zeros(8), balance=None
    )
    with pytest.raises(RequestError) as e:
        dispatcher.dispatch_preprocess(torch.ones(1, HIDDEN), routing)
    return str(e.value)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_not_installed_is_said_with_what_to_install_when_it_is_first_used(
    ranks: Ranks, name: DispatcherName
) -> None:
    for said in ranks.run(use, 2, name):
        assert said.startswith(f"parallel.dispatcher={name} needs the package deep_ep, which cannot be imported here")
        assert "Install DeepEP" in said and "parallel.dispatcher=flex" in said


class OtherBuffer(Buffer):
    """A later interface: weights by another name."""

    def combine(self, x: Any, handle: Any, weights: Any = None) -> tuple:  # type: ignore[override]
        return ()


@pytest.mark.parametrize(
    ("held", "calls", "said"),
    [
        (
            {"Buffer": OtherBuffer},
            DEEPEP_CALLS,
            r"its Buffer\.combine has no parameter topk_weights, but self, x, handle, weights",
        ),
        ({"HybridEPBuffer": HybridEPBuffer}, DEEPEP_CALLS, r"it has no Buffer\."),
        ({"Buffer": Buffer}, HYBRIDEP_CALLS, r"it has no HybridEPBuffer\."),
    ],
)
def test_an_interface_that_is_another_one_is_named_with_what_it_lacks(held: dict, calls: dict, said: str) -> None:
    with installed(**held), pytest.raises(RequestError, match=said):
        load_deep_ep(calls, dispatcher="deepep", install="it")


def processors_of(rank: int, world: int, name: DispatcherName, asked: int | None) -> object:
    """What the package is told of processors when tokens are first dispatched."""
    parallel = ParallelConfig(ep=world, dispatcher=name)
    place = replace(place_on(groups_for(parallel), parallel), dispatcher_sms=asked)
    with installed():
        Buffer.set_num_sms(20)
        preflight(moe_of(work(8, (4, 3))), HIDDEN, place)
        (buffer,) = place.shared.made.values()
        return buffer.num_sms


@pytest.mark.parametrize(("name", "own", "asked"), [("deepep", 20, 24), ("hybridep", (32, 32), (16, 16))])
def test_a_package_takes_as_many_processors_as_it_is_told(
    ranks: Ranks, name: DispatcherName, own: object, asked: object
) -> None:
    number = asked if isinstance(asked, int) else 16
    assert ranks.run(processors_of, 2, name, None) == [own] * 2
    assert ranks.run(processors_of, 2, name, number) == [asked] * 2


def test_both_published_interfaces_fit() -> None:
    with installed() as package:
        for calls in (DEEPEP_CALLS, HYBRIDEP_CALLS):
            assert load_deep_ep(calls, dispatcher="deepep", install="it") is package
