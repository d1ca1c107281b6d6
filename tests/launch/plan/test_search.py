"""The search: what it finds fits, is legal and is the fastest there is; and every mapping that lost says why."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest

from core.check import check
from core.check.built import not_built
from core.config.family import find_family
from core.config.mapping import ParallelConfig
from core.config.override import override, parse_assignment
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.errors import RequestError
from core.parallel.mesh import fold
from core.pipeline.layout import parse_layout
from launch.plan.candidates import _cut, _item_costs, balanced_layout, setup_of
from launch.plan.found import SearchResult
from launch.plan.search import search
from launch.profiles import find_profile
from tests.launch.plan.prices import RoughMemory, rough_time

KEPT = ("memory.recompute", "memory.offload", "memory.optimizer_offload", "execution.graphs")
PRECISION = ("precision.recipe", "precision.primary", "precision.main_gradients", "precision.moments")


def a_run(family: str, size: str, hardware: str, ranks: int, parallel: ParallelConfig) -> RunConfig:
    """A bfloat16 run of a published size."""
    return RunConfig(
        family=family,
        size=size,
        hardware=hardware,
        ranks=ranks,
        model=find_family(family).size(size).model,
        parallel=parallel,
        train=TrainConfig(steps=10, sequence_tokens=4096, global_batch=256, microbatch=1),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        data=DataConfig(),
        precision=PrecisionConfig(compute="bfloat16"),
        checkpoint=CheckpointConfig(),
    )


MIXTRAL = a_run("mixtral", "8x7b", "h100", 64, ParallelConfig(tp=2, pp=2, ep=8))


def searched(run: RunConfig, gpus: int, **options: object) -> SearchResult:
    """A search with rough prices."""
    return search(run, gpus, planner=RoughMemory(), price_time=rough_time, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def mixtral() -> SearchResult:
    return searched(MIXTRAL, 64)


def test_what_is_found_fits_keeps_every_rule_and_comes_fastest_first(mixtral: SearchResult) -> None:
    assert mixtral.found
    for found in mixtral.found:
        run = found.setup.on(MIXTRAL, 64)
        used = max(rank.balanced.total for rank in RoughMemory().of(run))
        assert check(run) == ()
        assert used == found.memory <= mixtral.capacity == used + found.headroom
        assert rough_time(run, find_profile("h100")).step.seconds == found.seconds
    assert [each.seconds for each in mixtral.found] == sorted(each.seconds for each in mixtral.found)


def test_batch_sequences_and_model_stay_as_they_are(mixtral: SearchResult) -> None:
    for found in mixtral.found:
        run = found.setup.on(MIXTRAL, 64)
        assert replace(run.train, microbatch=1) == MIXTRAL.train and run.model == MIXTRAL.model


def test_nothing_that_is_found_is_slower_than_a_mapping_that_fits_as_it_was_asked_for(mixtral: SearchResult) -> None:
    assert mixtral.begun is not None and mixtral.begun.headroom >= 0
    assert mixtral.found[0].seconds <= mixtral.begun.seconds


@pytest.mark.parametrize("gpus", [16, 24])
def test_the_first_is_the_fastest_of_all_mappings_and_dispatchers_by_plain_loops(gpus: int) -> None:
    run = replace(a_run("mixtral", "8x7b", "h200", gpus, ParallelConfig()), ranks=gpus)
    run = replace(run, train=replace(run.train, global_batch=240), precision=replace(run.precision, moments="bfloat16"))
    best = float("inf")
    for tp in (1, 2, 4, 8):
        for pp in range(1, gpus + 1):
            for ep in (1, 2, 4, 8):
                for microbatch in range(1, 17):
                    for dispatcher in ("alltoall", "flex", "deepep"):
                        for schedule in ("1f1b", "combined"):
                            parallel = ParallelConfig(tp=tp, pp=pp, ep=ep, dispatcher=dispatcher, schedule=schedule)
                            tried = replace(run, parallel=parallel, train=replace(run.train, microbatch=microbatch))
                            if gpus % (tp * pp) or gpus % (ep * pp) or check(tried):
                                continue
                            if RoughMemory().of(tried)[0].balanced.total <= find_profile("h200").chip.memory:
                                best = min(best, rough_time(tried, find_profile("h200")).step.seconds)
    result = searched(run, gpus, fixed=frozenset({*KEPT, *PRECISION, "parallel.layout"}))
    assert result.found[0].seconds == pytest.approx(best, rel=1e-3)


def test_every_loser_says_in_which_phase_it_lost_and_why(mixtral: SearchResult) -> None:
    assert {loser.phase for loser in mixtral.losers} <= {1, 2, 3}
    assert all(loser.mapping and loser.reason for loser in mixtral.losers)
    whole = [loser for loser in mixtral.losers if loser.mapping == "microbatch 1"]
    assert [loser.phase for loser in whole] == [1] and "does not fit: at least" in whole[0].reason
    assert any("leaves the NVLink domain" in loser.reason for loser in searched(MIXTRAL_WIDE, 64).losers)


# Ranks of tp and ep together fill more than a node only where a model has more experts than a node has GPUs.
MIXTRAL_WIDE = a_run("qwen3", "30b_a3b", "h100", 64, ParallelConfig(ep=8))


def test_a_search_finds_the_same_twice(mixtral: SearchResult) -> None:
    assert searched(MIXTRAL, 64) == mixtral


def test_what_the_user_fixed_stays(mixtral: SearchResult) -> None:
    fixed = frozenset({"parallel.tp", "parallel.dispatcher", "train.microbatch", "memory.recompute", *PRECISION})
    result = searched(MIXTRAL, 64, fixed=fixed)
    assert any(found.setup.parallel.tp != 2 for found in mixtral.found)
    for found in result.found:
        assert found.setup.parallel.tp == 2 and found.setup.parallel.dispatcher == "alltoall"
        assert found.setup.precision == MIXTRAL.precision and found.setup.memory.recompute == ()
        assert found.setup.microbatch == 1


@pytest.mark.parametrize(
    ("parallel", "key", "pipelines"),
    [
        (ParallelConfig(ep=4), "parallel.ep", {1, 2, 4}),
        (ParallelConfig(tp=8, ep=8), "parallel.tp", {1, 2}),
        (ParallelConfig(pp=2, layout="Et*8|(t*8|)*2t*8L"), "parallel.layout", {1, 2, 4}),
        (ParallelConfig(pp=4, vpp=2), "parallel.vpp", {1, 2, 4, 8, 16}),
    ],
)
def test_what_does_not_go_with_a_fixed_degree_is_not_looked_at(
    parallel: ParallelConfig, key: str, pipelines: set[int]
) -> None:
    run = a_run("mixtral", "8x7b", "gb300", 16, parallel)
    result = searched(run, 16, fixed=frozenset({key}))
    assert result.found and {each.setup.parallel.pp for each in result.found} <= pipelines
    for each in result.found:
        name = key.removeprefix("parallel.")
        assert vars(each.setup.parallel)[name] == vars(parallel)[name]
        assert check(each.setup.on(run, 16)) == ()


def test_the_settings_of_what_is_found_make_it_out_of_what_was_searched(mixtral: SearchResult) -> None:
    for found in mixtral.found:
        run, faults = override(MIXTRAL, [parse_assignment(text) for text in found.settings])
        assert faults == () and setup_of(run) == found.setup


def test_what_cannot_start_yet_is_named_and_left_out_on_request(mixtral: SearchResult) -> None:
    assert any(found.cannot_start for found in mixtral.found)
    for found in searched(MIXTRAL, 64, buildable_only=True).found:
        assert not found.cannot_start and not not_built(found.setup.on(MIXTRAL, 64))


def test_a_search_for_what_can_start_leaves_out_what_the_set_up_asked_for_and_cannot() -> None:
    away = replace(MIXTRAL, memory=replace(MIXTRAL.memory, offload=("core_attn",)))
    result = searched(away, 64, buildable_only=True)
    assert result.found
    for found in result.found:
        assert found.cannot_start == ()
        assert "memory.offload=none" in found.settings, "as a change of what was asked for"
    fixed = searched(away, 64, buildable_only=True, fixed=frozenset({"memory.offload"}))
    assert not fixed.found and fixed.losers, "what the user insists on cannot start"


def test_every_step_on_the_way_to_a_set_up_names_its_option_and_its_reason(mixtral: SearchResult) -> None:
    for step in mixtral.found[0].steps:
        option, _, reason = step.partition(": ")
        assert option and ("of the step, which is" in reason or "too many, frees" in reason or "not needed" in reason)


def test_hardware_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(RequestError, match="--hw cpu: nothing is known"):
        searched(replace(MIXTRAL, hardware="cpu"), 2)


def test_a_world_that_nothing_folds_into_gives_no_set_up_and_reasons() -> None:
    result = searched(replace(MIXTRAL, ranks=1), 1)
    assert result.found == () and result.begun is None
    assert {loser.phase for loser in result.losers} == {1}
    assert any("does not fit" in line for line in result.lines())


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
def test_layers_are_cut_as_evenly_as_any_cut_is(stages: int) -> None:
    costs = (0.0, 3.0, 3.0, 1.0, 1.0, 1.0, 4.0, 2.5)
    cuts = _cut(costs, stages)
    best = min(
        sum(sum(costs[a:b]) ** 2 for a, b in zip((0, *inner), (*inner, len(costs)), strict=True))
        for inner in combinations_with_replacement(range(len(costs) + 1), stages - 1)
    )
    assert cuts[0] == 0 and cuts[-1] == len(costs) and cuts == sorted(cuts) and len(cuts) == stages + 1
    assert sum(sum(costs[a:b]) ** 2 for a, b in pairwise(cuts)) == pytest.approx(best)


def test_a_balanced_layout_gives_the_stage_of_the_loss_fewer_layers() -> None:
    model = find_family("deepseek_v3").size("671b").model
    text = balanced_layout(model, 4096, 4, 4)
    assert text is not None
    layout = parse_layout(text, num_layers=61, num_ahead=1, pp=4)
    costs = _item_costs(model, 4096)
    layer, ahead, head = costs[5], costs[-2], costs[-1]
    # By hand: 61 layers and a module of a layer, a projection and a head over 16 stages.
    assert layer < ahead < 3 * layer and head < 2 * layer
    last = layout.parts[-1]
    assert len(last.layers) < 4 and last.loss and max(len(part.layers) for part in layout.parts) <= 5


def test_mesh_of_what_is_found_keeps_tensor_parallel_ranks_in_a_node(mixtral: SearchResult) -> None:
    for found in mixtral.found:
        mesh = fold(found.setup.parallel, 64)
        assert max(mesh.dense.members(0, ("tp",))) < 8
