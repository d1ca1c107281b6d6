"""When gradients and parameters travel: during backward and forward, in one order on all ranks, each byte once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim import distributed
from core.optim.buckets import Slot
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import Group, groups_for, one_rank
from core.parallel.meter import Meter
from core.parallel.pending import Pending, start_all_gather, start_reduce_scatter
from tests.core.numbers import near
from tests.core.optim.trees import (
    SMALL_BUCKET,
    Piece,
    Tree,
    assembled,
    backward,
    gradient,
    pieces_of,
    share,
    trained,
)
from tests.ranks import Ranks

CONFIG = OptimizerConfig(learning_rate=0.1, eps=1e-3, clip_norm=None)
MIXED = {"": torch.float32, "matrix": torch.bfloat16, "norm": torch.bfloat16}
# In the order of backward, for parameters of two or more copies in buckets of SMALL_BUCKET bytes.
BUCKETS = [
    ("layers.0.experts",),
    ("layers.0.whole",),
    ("layers.0.matrix",),
    ("layers.0.norm", "layers.0.scale"),
    ("embedding.weight",),
]
Event = tuple[str, ...]


@contextmanager
def recorded(optimizer: ChainedOptimizer) -> Iterator[list[Event]]:
    """Notes, in order, every gradient that autograd completes and every sum over copies that starts, by its bucket's names."""
    events: list[Event] = []
    of = {bucket.gradients.data_ptr(): bucket for bucket in optimizer.buckets}

    def noted(flat: Tensor, group: Group) -> Pending:
        events.append(("start", *(slot.name for slot in of[flat.data_ptr()].slots)))
        return start_reduce_scatter(flat, group)

    handles = [
        slot.entry.tensor.register_hook(lambda _, name=slot.name: events.append(("gradient", name)))
        for bucket in optimizer.buckets
        for slot in bucket.slots
    ]
    distributed.start_reduce_scatter = noted
    try:
        yield events
    finally:
        distributed.start_reduce_scatter = start_reduce_scatter
        for handle in handles:
            handle.remove()


def starts(events: Sequence[Event]) -> list[Event]:
    return [event[1:] for event in events if event[0] == "start"]


def _order(rank: int, world: int, rotate: bool) -> tuple[list[Event], list[Event], list[Piece]]:
    """Events of two microbatches during backward and in reduce; autograd takes the parameters in another order on each rank."""
    groups = groups_for(ParallelConfig())
    model = Tree(groups)
    optimizer = ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET)
    entries = trained(model)
    names = list(entries)
    order = names[rank:] + names[:rank] if rotate else names
    with recorded(optimizer) as events:
        optimizer.begin(2)
        for m in range(2):
            backward({n: share(0, m, n, e.spec, groups) for n, e in entries.items()}, entries, order)
            optimizer.accumulate()
        during = list(events)
        optimizer.reduce()
    optimizer.step(0.1, optimizer.gradient_norm())
    optimizer.wait_all()
    return during, events[len(during) :], pieces_of(model, groups)


@pytest.mark.parametrize("world", [1, 2])
def test_sums_start_during_the_last_backward_as_soon_as_their_gradients_are_there(ranks: Ranks, world: int) -> None:
    for during, after, _ in ranks.run(_order, world, False):
        first, second = during[:6], during[6:]  # the first microbatch has six gradients and starts nothing
        assert {event[0] for event in first} == {"gradient"}
        if world > 1:
            assert starts(second) == [*BUCKETS] and starts(after) == []
        for i, event in enumerate(second):
            if event[0] == "start":
                assert all(("gradient", name) in second[:i] for name in event[1:])
        # Nothing idles: the first sum starts with four gradients still to come.
        start = next(i for i, event in enumerate(second) if event[0] == "start")
        assert sum(event[0] == "gradient" for event in second[start:]) >= 3


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_order_of_sums_is_one_on_all_ranks_whatever_the_order_of_their_gradients(ranks: Ranks, world: int) -> None:
    told = ranks.run(_order, world, True)
    assert len({str([e for e in during if e[0] == "gradient"]) for during, _, _ in told}) == world
    for during, after, _ in told:
        assert starts(during) + starts(after) == [*BUCKETS]
    found = assembled([pieces for _, _, pieces in told])
    plain = assembled([pieces for _, _, pieces in ranks.run(_order, world, False)])
    for name, tensor in found.items():
        assert torch.equal(tensor, plain[name])


def _traffic(rank: int, world: int, ep: int, dtypes: dict[str, torch.dtype]) -> tuple[dict, dict, list[tuple]]:
    """Bytes of one step by axis and collective: in reduce and norm, and in the step; every bucket's axis, ranks and sizes."""
    meter = Meter()
    groups = groups_for(ParallelConfig(ep=ep), meter=meter)
    model = Tree(groups, dtypes)
    optimizer = ChainedOptimizer(model, CONFIG, groups)
    optimizer.begin(1)
    entries = trained(model)
    backward({n: share(0, 0, n, e.spec, groups) for n, e in entries.items()}, entries)
    optimizer.reduce()
    norm = optimizer.gradient_norm()
    sums = dict(meter.sent_bytes)
    meter.sent_bytes.clear()
    optimizer.step(0.1, norm)
    optimizer.wait_all()
    sizes = [
        (
            b.group.axis,
            b.group.size,
            b.parameters.numel(),
            b.parameters.nbytes,
            sum(s.gradient.numel() for s in b.slots),
        )
        for b in optimizer.buckets
    ]
    return sums, dict(meter.sent_bytes), sizes


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_a_step_sends_gradients_once_parameters_once_and_one_number(ranks: Ranks, world: int, ep: int) -> None:
    for dtypes in ({"": torch.float32}, MIXED):
        for sums, gathers, sizes in ranks.run(_traffic, world, ep, dtypes):
            expected_sums, expected_gathers = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
            if world > 1:
                expected_sums["world", "all_reduce"] = 2 * (world - 1) * 8 // world
            for axis, n, elements, parameter_bytes, used in sizes:
                assert n == (world // ep if axis == "edp" else world)
                if n > 1:  # gradients travel in float32, whatever the parameters are
                    expected_sums[axis, "reduce_scatter"] += (n - 1) * 4 * elements // n
                    expected_gathers[axis, "all_gather"] += (n - 1) * parameter_bytes // n
                assert used <= elements < used + 32 * (2 + n)  # the ends cost little
            assert (sums, gathers) == (expected_sums, expected_gathers)


def _waits(rank: int, world: int) -> list[tuple[str, list[str]]]:
    """After each wait, the parameters that are still on their way."""
    groups = groups_for(ParallelConfig())
    model = Tree(groups)
    optimizer = ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET)
    optimizer.reduce()
    optimizer.step(0.1, 0.0)
    told: list[tuple[str, list[str]]] = []
    for prefix in ("", "layers.0.w", "layers.0.whole", "embedding", "", "layers.0"):
        if prefix or told:
            optimizer.wait_for(prefix)
        told.append((prefix, [slot.name for bucket in optimizer.gathering._pending for slot in bucket.slots]))
    return told


def test_waiting_for_a_module_waits_for_the_buckets_that_hold_its_parameters_and_no_others(ranks: Ranks) -> None:
    forward = [name for bucket in reversed(BUCKETS) for name in bucket]
    for told in ranks.run(_waits, 2):
        expected = [
            ("", forward),
            ("layers.0.w", forward),  # no module and no parameter: the beginning of a name is not enough
            ("layers.0.whole", [name for name in forward if name != "layers.0.whole"]),
            ("embedding", ["layers.0.norm", "layers.0.scale", "layers.0.matrix", "layers.0.experts"]),
            ("", []),
            ("layers.0", []),
        ]
        assert told == expected


def fresh() -> tuple[Tree, ChainedOptimizer]:
    model = Tree()
    return model, ChainedOptimizer(model, CONFIG, one_rank(), bucket_bytes=SMALL_BUCKET)


def ones(model: Tree, *names: str) -> None:
    backward({name: torch.ones(model.get_parameter(name).shape) for name in names}, trained(model))


def test_a_backward_outside_a_step_leaves_its_gradients_to_whoever_asked_for_them() -> None:
    model, optimizer = fresh()
    norm = model.get_parameter("layers.0.norm")
    ones(model, "layers.0.norm")
    assert norm.grad is not None
    norm.grad = None
    optimizer.begin(1)
    ones(model, "layers.0.norm")
    assert norm.grad is None
    optimizer.reduce()
    ones(model, "layers.0.norm")
    assert norm.grad is not None
    assert optimizer.gradient_norm() == pytest.approx(7**0.5)


def test_gradients_computed_by_hand_count_as_a_pass() -> None:
    """As a schedule does that puts weight gradients off: autograd gives none for them."""
    model, optimizer = fresh()
    experts, norm = (model.get_parameter(f"layers.0.{name}") for name in ("experts", "norm"))
    with recorded(optimizer) as events:
        optimizer.begin({"layers.0.experts": 2, "layers.0.norm": 1})
        ones(model, "layers.0.norm", "layers.0.experts")
        optimizer.accumulate()
        assert starts(events) == []
        experts.grad = torch.full_like(experts, 2.0)
        optimizer.accumulate()
        assert ("layers.0.experts",) in starts(events) and experts.grad is None
        optimizer.reduce()
    assert optimizer.gradient_norm() == pytest.approx((9 * 180 + 7) ** 0.5)
    assert norm.grad is None


def test_a_parameter_that_was_not_named_is_not_waited_for() -> None:
    model, optimizer = fresh()
    with recorded(optimizer) as events:
        optimizer.begin({"layers.0.norm": 1})
        early = starts(events)
        ones(model, "layers.0.norm")
        assert len(starts(events)) == len(optimizer.buckets)
    assert early and all("layers.0.norm" not in names for names in early)
    optimizer.reduce()
    assert optimizer.gradient_norm() == pytest.approx(7**0.5)


def test_more_passes_than_were_told_are_our_mistake() -> None:
    model, optimizer = fresh()
    optimizer.begin(1)
    ones(model, "layers.0.norm")
    with pytest.raises(AssertionError, match=r"layers\.0\.norm: reached by more backward passes"):
        ones(model, "layers.0.norm")


def test_unknown_names_and_a_step_within_a_step_are_our_mistakes() -> None:
    model, optimizer = fresh()
    with pytest.raises(AssertionError, match=r"not trained here: .*layers\.0\.bias"):
        optimizer.begin({"layers.0.bias": 1})
    optimizer.begin(1)
    ones(model, "layers.0.norm")
    with pytest.raises(AssertionError, match="in the middle of a step"):
        optimizer.begin(1)


def _fewer_than_told(rank: int, world: int) -> list[Piece]:
    """Rank 1 was told of passes that never come: its sums start in reduce, and are the same."""
    groups = groups_for(ParallelConfig())
    model = Tree(groups)
    optimizer = ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET)
    entries = trained(model)
    optimizer.begin(1 + rank)
    backward({n: share(0, 0, n, e.spec, groups) for n, e in entries.items()}, entries)
    optimizer.accumulate()
    optimizer.reduce()
    return [
        (slot.name, slot.entry.spec.shape, slot.entry.spec.box, summed)
        for bucket in optimizer.buckets
        for slot, summed in zip(bucket.slots, gathered(bucket.gradients, bucket.group, bucket.slots), strict=True)
    ]


def gathered(flat: Tensor, group: Group, slots: Sequence[Slot]) -> list[Tensor]:
    """The summed gradients of a bucket's parameters, whole."""
    whole = start_all_gather(flat.clone(), group).wait()
    return [whole[slot.start : slot.stop].view(slot.gradient.shape) for slot in slots]


def test_fewer_passes_than_were_told_only_start_later(ranks: Ranks) -> None:
    found = assembled(ranks.run(_fewer_than_told, 2))
    for name, entry in trained(Tree()).items():
        near(found[name], gradient(0, 0, name, entry.spec), units=4)


def test_buckets_that_are_summed_are_let_go_while_backward_still_runs() -> None:
    """Each sum under way holds a second buffer."""
    model, optimizer = fresh()
    optimizer.begin(1)
    ones(model, *(name for name in trained(model) if name != "embedding.weight"))
    assert optimizer.reduction._started > 0 and not optimizer.reduction._pending


def test_parameters_are_gathered_in_the_order_of_forward() -> None:
    dense, embedding, expert = (replace(one_rank().replicas, ranks=(0, 1), axis=axis) for axis in ("a", "b", "c"))
    groups = replace(one_rank(), adjacent={1: dense}, embedding=embedding, edp=expert)
    model = Tree()
    optimizer = ChainedOptimizer(model, CONFIG, groups, bucket_bytes=SMALL_BUCKET)
    found = [[slot.name for slot in bucket.slots] for bucket in optimizer.gathering.buckets]
    assert found == [list(bucket) for bucket in reversed(BUCKETS)]
