"""Checkpoints of primary weights: those of any bfloat16 run, from which the codes are made again bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from core.config.mapping import ParallelConfig
from core.config.recipe import FP8_BLOCKWISE, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4, Recipe
from core.config.run import OptimizerConfig
from core.optim.formats import Formats
from core.transformer.quantise import quantisers
from core.transformer.stage import Stage
from tests.core.optim.sharded import built, steps_of
from tests.core.optim.test_fsdp_state import Run, assembled, everything, pieces_of
from tests.core.tiny import Case, mixtral
from tests.ranks import Ranks

BFLOAT16 = torch.bfloat16
PLAIN, PRIMARY = Formats(), Formats(primary=True)
ADAM = OptimizerConfig(learning_rate=0.01, eps=1e-3, weight_decay=0.1, clip_norm=1.0)
CASE = Case(model=mixtral(), optimizer=ADAM, microbatch=2)
ONE = ParallelConfig()


@dataclass(frozen=True, kw_only=True)
class Codes:
    """A run, and the weights that its products read at the checkpoint: bytes and scales by name."""

    run: Run
    codes: dict[str, list[Tensor]]


def codes_of(model: Stage) -> dict[str, list[Tensor]]:
    found = {}
    for quantiser in quantisers(model):
        held = quantiser.primary
        sides = [] if held is None else [held.rows, *([] if held.columns is None else [held.columns])]
        tensors = [t for side in sides for t in (side.data, side.scales, side.tensor_scale) if t is not None]
        found[quantiser.name] = [t.contiguous().view(torch.uint8).clone() for t in tensors]
    return found


def saved(rank: int, world: int, case: Case, out: Path, formats: Formats) -> Codes:
    """Two steps, a checkpoint, and two steps more."""
    model, optimizer, groups = built(case, dtype=BFLOAT16, formats=formats)
    steps_of(case, model, optimizer, groups, (0, 1))
    state, codes = everything(model, optimizer, groups), codes_of(model)
    pieces = pieces_of(state)
    folder = save(out, 2, state, {"step": 2}, groups.world, Saving(keep=1))
    results = steps_of(case, model, optimizer, groups, (2, 3))
    return Codes(run=Run(folder=folder, pieces=pieces, results=results), codes=codes)


def taken_up(rank: int, world: int, case: Case, folder: str, formats: Formats) -> Codes:
    """A checkpoint loaded over what two other steps made, and two steps."""
    model, optimizer, groups = built(case, dtype=BFLOAT16, formats=formats)
    steps_of(case, model, optimizer, groups, (5,))
    state = everything(model, optimizer, groups)
    load(folder, state, groups.world)
    optimizer.restore(state)
    optimizer.set_steps(2)
    pieces, codes = pieces_of(everything(model, optimizer, groups)), codes_of(model)
    results = steps_of(case, model, optimizer, groups, (2, 3))
    return Codes(run=Run(folder=folder, pieces=pieces, results=results), codes=codes)


def state_of(found: Sequence[Codes]) -> dict[str, Tensor]:
    return assembled([each.run for each in found])


def check_same(found: Sequence[Codes], truth: Sequence[Codes]) -> None:
    here, there = state_of(found), state_of(truth)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name


def numbers(found: Codes) -> list[tuple[float, float]]:
    return [(result.loss, result.gradient_norm) for result in found.run.results]


@pytest.mark.parametrize(
    ("world", "recipe", "parallel"),
    [
        (1, FP8_DELAYED, ONE),
        (2, MXFP8, ONE),
        (2, FP8_DELAYED, ParallelConfig(ep=2)),
        (2, FP8_CURRENT, ParallelConfig(pp=2, schedule="zero_bubble")),
        (4, NVFP4, ParallelConfig(tp=2, ep=2)),
    ],
    ids=["one rank", "dp", "ep, delayed", "pp", "tp ep"],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    ranks: Ranks, tmp_path: Path, world: int, recipe: Recipe, parallel: ParallelConfig
) -> None:
    case = replace(CASE, recipe=recipe, parallel=parallel)
    first = ranks.run(saved, world, case, tmp_path, PRIMARY)
    second = ranks.run(taken_up, world, case, first[0].run.folder, PRIMARY)
    check_same(second, first)
    for here, there in zip(second, first, strict=True):
        assert numbers(here) == numbers(there)
        assert here.codes.keys() == there.codes.keys() and here.codes
        for name, tensors in here.codes.items():
            assert tensors and all(map(torch.equal, tensors, there.codes[name])), name


def test_another_number_of_ranks_takes_up_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    case = replace(CASE, recipe=FP8_BLOCKWISE)
    first = ranks.run(saved, 2, replace(case, parallel=ParallelConfig(ep=2)), tmp_path, PRIMARY)
    folder = first[0].run.folder
    four = ranks.run(taken_up, 4, replace(case, microbatch=1), folder, PRIMARY)
    one = [taken_up(0, 1, case, folder, PRIMARY)]
    for found in (four, one):
        check_same(found, first)
    for name, tensors in one[0].codes.items():
        assert tensors
        for of_rank in four:
            assert all(map(torch.equal, of_rank.codes[name], tensors)), name


def test_its_checkpoint_is_that_of_a_bfloat16_run_and_each_goes_on_with_the_others(tmp_path: Path) -> None:
    """With and without primary weights, and without a recipe: the same names, dtypes and shapes, and the same numbers are taken up."""
    case = replace(CASE, recipe=FP8_CURRENT)
    primary = [saved(0, 1, case, tmp_path / "primary", PRIMARY)]
    plain = [saved(0, 1, case, tmp_path / "plain", PLAIN)]

    def entries(found: Sequence[Codes]) -> set[tuple[str, str, tuple[int, ...]]]:
        manifest = read_manifest(LocalFiles(Path(found[0].run.folder)))
        return {(entry.name, entry.dtype, tuple(entry.shape)) for entry in manifest.entries}

    assert entries(primary) == entries(plain)
    for first, formats, recipe in (
        (primary, PLAIN, FP8_CURRENT),
        (plain, PRIMARY, FP8_CURRENT),
        (primary, PRIMARY, NVFP4),
        (primary, PLAIN, None),
    ):
        second = [taken_up(0, 1, replace(case, recipe=recipe), first[0].run.folder, formats)]
        check_same(second, first)
        expected = [loss for loss, _ in numbers(first[0])]
        assert [loss for loss, _ in numbers(second[0])] == pytest.approx(expected, rel=0.05)
    state = state_of(primary)
    for name in primary[0].codes:
        rounded = state[f"optimizer.master.{name}"].to(BFLOAT16).double()
        assert torch.equal(state[f"model.{name}"], rounded) and not torch.equal(
            rounded, state[f"optimizer.master.{name}"]
        )
