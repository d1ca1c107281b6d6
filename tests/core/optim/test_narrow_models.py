"""Training of tiny models with moments and main gradients in bfloat16: under any mapping, near float32, and through checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from core.config.mapping import ParallelConfig, ScheduleName
from core.config.run import OptimizerConfig
from core.optim.formats import Formats
from core.parallel.meter import Meter
from core.training.step import StepResult
from tests.core.optim.sharded import FSDP, built, steps_of
from tests.core.optim.test_fsdp_state import Run, assembled, same_state, saved, taken_up
from tests.core.tiny import Case, mixtral, qwen3
from tests.ranks import Ranks

BFLOAT16 = torch.bfloat16
WIDE, BOTH = Formats(), Formats(moments=BFLOAT16, gradients=BFLOAT16)
ADAM = OptimizerConfig(learning_rate=0.01, eps=1e-3, weight_decay=0.1, clip_norm=1.0)
CASE = Case(model=qwen3(), optimizer=ADAM, microbatch=2)
ONE = ParallelConfig()


def trained(
    rank: int, world: int, cases: Sequence[Case], dtype: torch.dtype, formats: Formats, steps: Sequence[int]
) -> list[list[StepResult]]:
    """The steps of each case, one case after the other."""
    found = []
    for case in cases:
        model, optimizer, groups = built(case, dtype=dtype, formats=formats)
        found.append(steps_of(case, model, optimizer, groups, steps))
    return found


# ---------------------------------------------------------------------------------------------------------- mappings


def test_a_pipeline_makes_the_bits_of_one_rank_whatever_its_schedule(ranks: Ranks) -> None:
    """It adds up the same gradients of the same microbatches in the same order, of which half come by hand with zero_bubble."""
    case = Case(model=mixtral(), optimizer=ADAM, microbatch=2)
    (truth,) = trained(0, 1, [case], BFLOAT16, BOTH, range(4))
    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero_bubble")
    cases = [replace(case, parallel=ParallelConfig(pp=2, schedule=schedule)) for schedule in schedules]
    for found in ranks.run(trained, 2, cases, BFLOAT16, BOTH, range(4))[0]:
        assert [result.loss for result in found] == [result.loss for result in truth]


MAPPINGS = {
    1: (ONE, FSDP),
    2: (
        ONE,
        ParallelConfig(ep=2, schedule="combined"),
        ParallelConfig(tp=2),
        ParallelConfig(pp=2, schedule="zero_bubble"),
        FSDP,
        replace(FSDP, fsdp_replicas=2),
    ),
    4: (ParallelConfig(pp=2, ep=2, schedule="zero_bubble"), replace(FSDP, tp=2, fsdp_replicas=2)),
}


@pytest.mark.parametrize("world", MAPPINGS)
def test_every_mapping_trains_like_one_rank_up_to_the_roundings_of_its_sums(ranks: Ranks, world: int) -> None:
    """A rank adds up its microbatches in bfloat16, one rounding each (2**-9 of the sum, or less), and copies are then added in float32
    and rounded once; under FSDP each microbatch's sum over shards is rounded, and then added. So gradients differ by some thousandths,
    and losses after three updates by less than one percent; the first loss only where tp cuts products."""
    (truth,) = trained(0, 1, [CASE], BFLOAT16, BOTH, range(4))
    cases = [replace(CASE, parallel=parallel, microbatch=2 if world < 4 else 1) for parallel in MAPPINGS[world]]
    for rank in ranks.run(trained, world, cases, BFLOAT16, BOTH, range(4)):
        for case, found in zip(cases, rank, strict=True):
            if case.parallel.tp == 1:
                assert found[0].loss == pytest.approx(truth[0].loss, rel=1e-7), case.parallel
                assert found[0].gradient_norm == pytest.approx(truth[0].gradient_norm, rel=3e-3), case.parallel
            losses = [result.loss for result in found]
            assert losses == pytest.approx([result.loss for result in truth], rel=1e-2), case.parallel


def held(
    rank: int, world: int, case: Case, formats: Formats
) -> tuple[dict[torch.dtype, int], dict[tuple[str, str], int]]:
    """Bytes of the optimizer's state by dtype, and bytes sent in a step by axis and collective."""
    meter = Meter()
    model, optimizer, groups = built(case, dtype=BFLOAT16, formats=formats, meter=meter)
    steps_of(case, model, optimizer, groups, [0])
    found: dict[torch.dtype, int] = {}
    for piece in optimizer.state():
        kind = piece.name.split(".")[1]
        assert piece.data.dtype == (torch.float32 if kind == "master" else formats.moments or torch.float32)
        found[piece.data.dtype] = found.get(piece.data.dtype, 0) + piece.data.nbytes
    return found, dict(meter.sent_bytes)


@pytest.mark.parametrize("parallel", [ONE, FSDP], ids=["zero1", "fsdp"])
def test_moments_and_what_gradients_send_are_half(ranks: Ranks, parallel: ParallelConfig) -> None:
    case = replace(CASE, parallel=parallel)
    wide, narrow = (ranks.run(held, 2, case, formats) for formats in (WIDE, BOTH))
    for (before, sent_before), (after, sent_after) in zip(wide, narrow, strict=True):
        # Masters are a third of the wide state, and all of what is left in float32.
        assert after == {BFLOAT16: before[torch.float32] // 3, torch.float32: before[torch.float32] // 3}
        sums = {key for key in sent_before if key[1] == "reduce_scatter"}
        assert sums and sent_before.keys() == sent_after.keys()
        for key, count in sent_before.items():
            assert sent_after[key] == (count // 2 if key in sums else count), key


# ------------------------------------------------------------------------------------------------------- near float32


def test_losses_stay_within_one_percent_of_float32s_for_twenty_steps() -> None:
    """As near as those of plain bfloat16, and within a thousandth where moments alone are narrow; five batches over and over, so that
    the model learns them (4.15 to 3.48)."""
    case = Case(model=qwen3(), optimizer=replace(ADAM, eps=1e-8, learning_rate=0.003), microbatch=2)
    steps = list(range(5)) * 4

    def losses(dtype: torch.dtype, formats: Formats) -> list[float]:
        return [result.loss for result in trained(0, 1, [case], dtype, formats, steps)[0]]

    truth = losses(torch.float32, WIDE)
    assert truth[-1] < 0.85 * truth[0]
    moments = losses(torch.float32, Formats(moments=BFLOAT16))
    assert moments == pytest.approx(truth, rel=1e-3) and moments != truth
    for formats in (WIDE, BOTH):
        assert losses(BFLOAT16, formats) == pytest.approx(truth, rel=1e-2), formats


# ------------------------------------------------------------------------------------------------------- checkpoints

ZERO_BUBBLE = ParallelConfig(pp=2, schedule="zero_bubble")


@pytest.mark.parametrize("parallel", [ParallelConfig(ep=2), ZERO_BUBBLE, FSDP], ids=["zero1", "zero_bubble", "fsdp"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(ranks: Ranks, tmp_path: Path, parallel: ParallelConfig) -> None:
    case = replace(CASE, parallel=parallel)
    first = ranks.run(saved, 2, case, tmp_path, BFLOAT16, BOTH)
    second = ranks.run(taken_up, 2, case, first[0].folder, BFLOAT16, BOTH)
    same_state(second, first)
    for here, there in zip(second, first, strict=True):
        assert [r.loss for r in here.results] == [r.loss for r in there.results]
        assert [r.gradient_norm for r in here.results] == [r.gradient_norm for r in there.results]
    stored = {
        entry.name.split(".")[1]: entry.dtype
        for entry in read_manifest(LocalFiles(Path(first[0].folder))).entries
        if entry.name.startswith("optimizer.")
    }
    assert stored == {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16", "master": "float32"}


def state_of(runs: Sequence[Run]) -> dict[str, Tensor]:
    """The whole tensors of the optimizer."""
    return {name: tensor for name, tensor in assembled(runs).items() if name.startswith("optimizer.")}


@pytest.mark.parametrize(
    ("saves", "world", "loads"),
    [
        (ParallelConfig(ep=2), 2, FSDP),
        (FSDP, 2, ZERO_BUBBLE),
        (ONE, 4, ParallelConfig(tp=2, ep=2)),
        (ParallelConfig(ep=2), 1, ONE),
    ],
    ids=["zero1 to fsdp", "fsdp to zero_bubble", "two ranks to four", "two ranks to one"],
)
def test_another_mapping_takes_up_the_same_bits(
    ranks: Ranks, tmp_path: Path, saves: ParallelConfig, world: int, loads: ParallelConfig
) -> None:
    first = ranks.run(saved, 2, replace(CASE, parallel=saves), tmp_path, BFLOAT16, BOTH)
    case = replace(CASE, parallel=loads, microbatch=1)
    second = ranks.run(taken_up, world, case, first[0].folder, BFLOAT16, BOTH)
    here, there = state_of(second), state_of(first)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name
    assert second[0].results[0].loss == pytest.approx(first[0].results[0].loss, rel=1e-3)


@pytest.mark.parametrize("parallel", [ONE, FSDP], ids=["zero1", "fsdp"])
@pytest.mark.parametrize("before", [WIDE, BOTH], ids=["to bfloat16", "to float32"])
def test_moments_of_the_other_dtype_are_converted_by_value(
    ranks: Ranks, tmp_path: Path, before: Formats, parallel: ParallelConfig
) -> None:
    """Rounded once to nearest, as every step rounds them; or exactly widened."""
    case, after = replace(CASE, parallel=parallel), WIDE if before == BOTH else BOTH
    first = ranks.run(saved, 2, case, tmp_path, BFLOAT16, before)
    second = ranks.run(taken_up, 2, case, first[0].folder, BFLOAT16, after)
    here, there = state_of(second), state_of(first)
    for name, tensor in here.items():
        narrow = after == BOTH and ".exp_avg" in name
        assert torch.equal(tensor, there[name].to(BFLOAT16).double() if narrow else there[name]), name
        assert not narrow or not torch.equal(tensor, there[name]) or not bool(there[name].any()), name
    assert second[0].results[0].loss == first[0].results[0].loss
    assert second[0].results[1].loss == pytest.approx(first[0].results[1].loss, rel=5e-3)
