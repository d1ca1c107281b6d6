"""What the ranks of a mapping make of a module together, against one process that holds all of it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.config.mapping import ParallelConfig
from core.kernels.deferred import Deferred
from core.layers.place import Place
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups, one_rank
from core.state.box import Box, tiling_fault, whole
from core.state.inventory import declared, replicas
from tests.core.numbers import draw

EXACT = 1e-12  # of the largest element: sums in float64 in another order


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rank's piece of a tensor: where it lies, who holds copies of it, and its gradient, summed over those."""

    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank has after forward and backward: its rows of the output and of the input's gradient, and of every weight
    its piece. extra: numbers that add up over the ranks."""

    out: Tensor
    input_gradient: Tensor
    pieces: dict[str, Piece]
    extra: dict[str, Tensor]


def place_on(
    groups: Groups | None = None, parallel: ParallelConfig | None = None, later: Deferred | None = None
) -> Place:
    """A place for float64, of one rank without groups."""
    return Place(
        groups=groups or one_rank(),
        parallel=parallel or ParallelConfig(),
        dtype=torch.float64,
        device=torch.device("cpu"),
        later=later,
    )


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Every tensor as its piece of random numbers that only its name decides: not by the code that is under test."""
    for name, entry in declared(module).items():
        full = draw(zlib.crc32(name.encode()), *entry.spec.shape)
        entry.tensor.copy_(full[entry.spec.box.slices] * 0.5)


def pieces_of(module: nn.Module, groups: Groups) -> dict[str, Piece]:
    """Every trained tensor's piece on this rank, of which a missing gradient is a fault. All ranks call it together."""
    found = {}
    for name, entry in declared(module).items():
        if not entry.spec.trained:
            continue
        assert entry.tensor.grad is not None, f"{name} has no gradient"
        group = replicas(entry.spec, groups)
        total = all_reduce_sum(entry.tensor.grad, group)
        found[name] = Piece(shape=entry.spec.shape, box=entry.spec.box, holders=group.ranks, gradient=total)
    return found


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of a module that lies on one rank."""
    return {name: piece.gradient for name, piece in pieces_of(module, one_rank()).items()}


def check_pieces(ranks: Sequence[Mapping[str, Piece]], truth: Mapping[str, Tensor], bound: float = EXACT) -> None:
    """Every rank holds exactly the tensors of `truth`; holders of copies hold one box, different boxes tile the tensor, and the
    summed gradients are those of one process."""
    for pieces in ranks:
        assert set(pieces) == set(truth)
    for name, expected in truth.items():
        of_holders: dict[tuple[int, ...], Box] = {}
        for rank, pieces in enumerate(ranks):
            piece = pieces[name]
            assert piece.shape == tuple(expected.shape), name
            assert rank in piece.holders, name
            assert of_holders.setdefault(piece.holders, piece.box) == piece.box, f"{name}: copies of unequal boxes"
            close(
                piece.gradient, expected[piece.box.slices], f"{name} on rank {rank}", bound, float(expected.abs().max())
            )
        assert sorted(r for holders in of_holders for r in holders) == list(range(len(ranks))), name
        assert tiling_fault(whole(tuple(expected.shape)), list(of_holders.values())) is None, name


def close(actual: Tensor, truth: Tensor, what: str, bound: float = EXACT, size: float | None = None) -> None:
    """Equal shapes, and within `bound` of `size` (the largest element of the truth)."""
    assert actual.shape == truth.shape, f"{what}: {tuple(actual.shape)} is not {tuple(truth.shape)}"
    assert actual.dtype == truth.dtype, f"{what}: {actual.dtype} is not {truth.dtype}"
    if not truth.numel():
        return
    largest = float(truth.abs().max()) if size is None else size
    error = float((actual - truth).abs().max())
    assert error <= bound * max(largest, 1e-30), f"{what}: off by {error:g} where {largest:g} is the largest"
