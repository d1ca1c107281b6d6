"""Masters as remainders beside bfloat16 parameters, and states in host memory: the same numbers as float32 masters on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from core.config.mapping import ParallelConfig
from core.config.precision import PrecisionConfig
from core.config.run import OptimizerConfig
from core.optim import adam as adam_module
from core.optim.buckets import BUCKET_BYTES, Bucket
from core.optim.chained import ChainedOptimizer
from core.optim.formats import Formats, formats_of
from core.optim.kept import BLOCK, pieces, share_on_host
from core.optim.masters import Remainder
from core.parallel.groups import groups_for, one_rank
from core.state.inventory import Entry
from tests.core.numbers import draw
from tests.core.optim.trees import SMALL_BUCKET, Piece, Tree, assembled, pieces_of, trained
from tests.ranks import Ranks

BFLOAT16, FLOAT16, FLOAT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.25, beta1=0.9, beta2=0.95, eps=1e-3, clip_norm=1.0)
PLAIN, REMAINDER = Formats(), Formats(masters="remainder")


def shown(formats: Formats) -> str:
    return f"{formats.moments}, {formats.masters}, {formats.on_host}"


def train(optimizer: ChainedOptimizer, entries: dict[str, Entry], steps: range) -> None:
    """Updates by gradients whose sums over copies bfloat16 holds exactly, so that no mapping rounds them."""
    for step in steps:
        optimizer.begin(1)
        for name, entry in entries.items():
            exact = (draw(step + len(name), *entry.spec.shape) * 3).round()[entry.spec.box.slices]
            copies = next(bucket.group for bucket in optimizer.buckets for slot in bucket.slots if slot.name == name)
            share = exact * copies.size if copies.position == 0 else -exact
            entry.tensor.grad = share.to(entry.tensor.dtype)
        optimizer.accumulate()
        optimizer.reduce()
        optimizer.step(0.05, 3.0)
    optimizer.wait_all()


def made(
    formats: Formats,
    dtype: torch.dtype = BFLOAT16,
    parallel: ParallelConfig | None = None,
    bucket_bytes: int = SMALL_BUCKET,
) -> tuple[ChainedOptimizer, Tree]:
    """An optimizer over this rank's share of the tree, by default of several buckets."""
    groups = one_rank() if parallel is None else groups_for(parallel)
    model = Tree(groups, {"": dtype})
    return ChainedOptimizer(model, CONFIG, groups, bucket_bytes=bucket_bytes, formats=formats), model


def state_of(optimizer: ChainedOptimizer) -> dict[str, Tensor]:
    return assembled([[(p.name, p.shape, p.box, p.data.clone()) for p in optimizer.state()]])


def same(found: dict[str, Tensor], expected: dict[str, Tensor], kinds: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert kinds not in name or torch.equal(found[name], tensor), name


# ----------------------------------------------------------------------------------------------------------- remainders


def test_every_float32_is_a_bfloat16_and_a_remainder_and_comes_back() -> None:
    bits = torch.from_numpy(np.random.default_rng(5).integers(-(2**31), 2**31, 100_000, dtype=np.int64)).to(torch.int32)
    value = bits.view(torch.float32)
    value = torch.cat([value[value.isfinite()], torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38, 1.0, 1 + 2.0**-8])])
    parameters = torch.zeros(value.numel(), dtype=BFLOAT16)
    kept = Remainder(parameters)
    numbers, each = [kept.parts[0].here], (0, value.numel())
    kept.settle(numbers, each, value)
    assert torch.equal(kept.widen(numbers, each).view(torch.int32), value.view(torch.int32))
    ties = (value.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(parameters[~ties].view(torch.int16), value[~ties].to(BFLOAT16).view(torch.int16))
    # One tie was put in; it goes away from zero, to an odd last bit.
    assert bool(ties[-1]) and float(parameters[-1]) == 1 + 2.0**-7
    assert kept.parts[0].here.nbytes == 2 * value.numel()


@pytest.mark.parametrize("moments", [None, BFLOAT16, FLOAT16, FLOAT8], ids=str)
def test_masters_are_those_of_float32_masters_bit_by_bit(moments: torch.dtype | None) -> None:
    (plain, model), (low, other) = (made(replace(f, moments=moments)) for f in (PLAIN, REMAINDER))
    for step in range(12):
        for optimizer, tree in ((plain, model), (low, other)):
            train(optimizer, trained(tree), range(step, step + 1))
        same(state_of(low), state_of(plain))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.dtype == its.dtype == BFLOAT16
    device = [tensor for tensor in low.adam.tensors()[0] if tensor.dtype == torch.int16]
    assert sum(t.numel() for t in device) == sum(b.parameters.numel() for b in low.buckets)
    assert not any(isinstance(bucket.master, Tensor) for bucket in low.buckets)


def _run(rank: int, world: int, parallel: ParallelConfig, formats: Formats) -> tuple[list[Piece], list[Piece]]:
    optimizer, model = made(formats, parallel=parallel)
    train(optimizer, trained(model), range(6))
    state = [(p.name, p.shape, p.box, p.data.clone()) for p in optimizer.state()]
    return pieces_of(model, optimizer.groups), state


@pytest.mark.parametrize(
    ("formats", "worlds"),
    [
        (REMAINDER, ((2, ParallelConfig(ep=2)), (3, ParallelConfig()), (4, ParallelConfig(tp=2, ep=2)))),
        (Formats(moments=FLOAT16, masters="remainder"), ((2, ParallelConfig()), (3, ParallelConfig()))),
        (Formats(moments=FLOAT8, seed=3), ((2, ParallelConfig()), (3, ParallelConfig()))),
        (Formats(moments=FLOAT8, on_host=0.5, seed=3), ((2, ParallelConfig()),)),
    ],
    ids=["remainder", "float16 and remainder", "float8", "float8, half on the host"],
)
def test_every_mapping_makes_the_same_bits(
    ranks: Ranks, formats: Formats, worlds: tuple[tuple[int, ParallelConfig], ...]
) -> None:
    """Of moments under scales: every mapping that cuts no block of 128, as dp does not; what a rank holds of a tensor is whole here."""
    found = []
    for world, parallel in ((1, ParallelConfig()), *worlds):
        told = ranks.run(_run, world, parallel, formats)
        found.append(assembled([pieces for pieces, _ in told]) | assembled([state for _, state in told]))
    for other in found[1:]:
        same(other, found[0])


# ---------------------------------------------------------------------------------------------------------- on the host

STORED = [
    Formats(),
    Formats(moments=BFLOAT16),
    Formats(moments=FLOAT16),
    Formats(moments=FLOAT8, masters="remainder", gradients=BFLOAT16),
]


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
@pytest.mark.parametrize("formats", STORED, ids=shown)
def test_states_on_the_host_are_updated_as_those_on_the_device(
    formats: Formats, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(adam_module._PIECES, "cpu", BLOCK)  # several pieces
    if dtype == torch.float32:
        formats = replace(formats, gradients=None, masters="float32")
    found = []
    for share in (0.0, 0.7, 1.0):
        optimizer, model = made(replace(formats, on_host=share), dtype, bucket_bytes=BUCKET_BYTES)
        train(optimizer, trained(model), range(5))
        here, there = optimizer.adam.tensors()
        found.append((state_of(optimizer), {n: e.tensor.clone() for n, e in trained(model).items()}))
        moved = sum(tensor.nbytes for tensor in there)
        assert (moved > 0) is (share > 0)
        if share == 1.0:
            assert sum(tensor.numel() for tensor in here) == len(optimizer.buckets), "counts of steps alone"
    for state, parameters in found[1:]:
        same(state, found[0][0])
        same(parameters, found[0][1])


def test_a_share_is_whole_blocks_and_a_piece_lies_on_one_side() -> None:
    assert [share_on_host(1000, share) for share in (0.0, 0.1, 0.5, 1.0)] == [0, 0, 384, 1000]
    assert pieces(1000, 384, 256) == [(0, 256), (256, 384), (384, 640), (640, 896), (896, 1000)]
    assert pieces(1000, 1000, 600) == [(0, 600), (600, 1000)] and pieces(0, 0, 5) == []


def test_what_lies_on_the_host_is_pinned_nowhere_but_beside_a_gpu_and_takes_what_it_says() -> None:
    optimizer, _ = made(Formats(moments=FLOAT8, on_host=1.0))
    _, there = optimizer.adam.tensors()
    elements = sum(bucket.parameters.numel() for bucket in optimizer.buckets)
    assert sum(tensor.nbytes for tensor in there) == elements * (4 + 1 + 1) + 2 * elements // BLOCK
    assert not any(tensor.is_pinned() for tensor in there)


# ---------------------------------------------------------------------------------------- into a checkpoint, and out of it

EVERY = [
    *STORED[2:],
    Formats(moments=FLOAT8, seed=3),
    Formats(masters="remainder"),
    Formats(on_host=0.6),
    Formats(moments=FLOAT16, masters="remainder", on_host=1.0),
]


@pytest.mark.parametrize("formats", EVERY, ids=shown)
def test_what_is_loaded_goes_on_as_if_it_had_not_stopped(formats: Formats) -> None:
    (whole_run, model), (first, half), (second, other) = (made(formats) for _ in range(3))
    train(whole_run, trained(model), range(8))
    train(first, trained(half), range(4))
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.fill_(9.0)
    train(second, trained(other), range(50, 52))
    _carry(first, second, half, other)
    second.set_steps(4)
    same(state_of(second), state_of(first))
    train(second, trained(other), range(4, 8))
    same(state_of(second), state_of(whole_run))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)


def _carry(source: ChainedOptimizer, target: ChainedOptimizer, model: Tree, other: Tree) -> None:
    """What a checkpoint carries: parameters first, then whatever `state` shows, by value."""
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.copy_(mine)
    saved, pieces = {p.name: p.data.clone() for p in source.state()}, target.state()
    for piece in pieces:
        piece.data.copy_(saved[piece.name])
    target.restore(pieces)


def _resumed(
    rank: int, world: int, formats: Formats, saved: dict[str, Tensor], model_state: dict[str, Tensor]
) -> tuple[list[Piece], list[Piece]]:
    """Three more steps from whole tensors, on any number of ranks."""
    optimizer, model = made(formats, parallel=ParallelConfig())
    with torch.no_grad():
        for name, entry in trained(model).items():
            entry.tensor.copy_(model_state[name][entry.spec.box.slices])
    pieces = optimizer.state()
    for piece in pieces:
        piece.data.copy_(saved[piece.name][piece.box.slices])
    optimizer.restore(pieces)
    optimizer.set_steps(6)
    train(optimizer, trained(model), range(6, 9))
    state = [(p.name, p.shape, p.box, p.data.clone()) for p in optimizer.state()]
    return pieces_of(model, optimizer.groups), state


@pytest.mark.parametrize("formats", [Formats(moments=FLOAT8, masters="remainder"), Formats(moments=FLOAT16, on_host=0.5)], ids=shown)  # fmt: skip
def test_a_checkpoint_of_two_ranks_goes_on_alike_on_one_and_on_three(ranks: Ranks, formats: Formats) -> None:
    told = ranks.run(_run, 2, ParallelConfig(), formats)
    model_state, saved = assembled([pieces for pieces, _ in told]), assembled([state for _, state in told])
    found = []
    for world in (1, 3):
        again = ranks.run(_resumed, world, formats, saved, model_state)
        found.append(assembled([pieces for pieces, _ in again]) | assembled([state for _, state in again]))
    same(found[1], found[0])
    assert {saved[name].dtype for name in saved if ".exp_avg" in name} == {
        BFLOAT16 if formats.moments == FLOAT8 else torch.float32
    }


@pytest.mark.parametrize("target", [PLAIN, Formats(moments=FLOAT16), Formats(masters="remainder"), Formats(on_host=1.0)], ids=shown)  # fmt: skip
def test_any_storage_goes_on_from_any_other(target: Formats) -> None:
    for source in (Formats(moments=FLOAT8), REMAINDER, Formats(moments=BFLOAT16, on_host=0.6)):
        (first, half), (second, other) = made(source), made(target)
        train(first, trained(half), range(4))
        _carry(first, second, half, other)
        before, after = state_of(first), state_of(second)
        for name, tensor in before.items():
            if ".master." in name or target.moments is None:
                assert torch.equal(after[name].double(), tensor.double()), name
            else:
                np.testing.assert_allclose(after[name].double(), tensor.double(), rtol=2.0**-9)


def test_what_a_run_asks_for_is_what_the_optimizer_gets() -> None:
    asked = PrecisionConfig(compute="bfloat16", moments="float8", masters="remainder")
    found = formats_of(asked, on_host=0.25, seed=9)
    assert found == Formats(moments=FLOAT8, masters="remainder", on_host=0.25, seed=9)
    assert formats_of(PrecisionConfig(moments="float16")).moments == FLOAT16


def test_parts_of_ranks_are_whole_blocks_of_what_has_scales() -> None:
    plain, scaled = made(Formats(moments=BFLOAT16))[0], made(Formats(moments=FLOAT16))[0]

    def starts(bucket: Bucket) -> list[int]:
        return [slot.start % BLOCK for slot in bucket.slots]

    assert all(not any(starts(bucket)) and bucket.parameters.numel() % BLOCK == 0 for bucket in scaled.buckets)
    assert any(any(starts(bucket)) for bucket in plain.buckets)
