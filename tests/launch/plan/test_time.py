"""Time of a step against closed forms: what is left when all but one thing costs nothing."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from core.config.architecture import GQA, Dense, Groups, Layer, ModelConfig, MoE, RMSNorm, Rope, Router, repeat
from core.config.execution import ExecutionConfig
from core.config.family import all_families
from core.config.flops import flops_per_token
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from core.config.recipe import RECIPES, Forward, RecipeName
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.parallel.traffic import TrainingStep, expected_bytes
from core.pipeline.layout import layout_of
from launch.plan.communication import Links, met
from launch.plan.time import plan_time
from launch.plan.work import Share, ahead_work, layer_work, loss_work
from launch.profiles import Profile, find_profile

FREE = 1e30  # bytes or FLOP a second of what shall cost nothing
ATTENTION = GQA(heads=32, kv_heads=8, head_dim=64)
DENSE = Layer(attention=ATTENTION, mlp=Dense(ffn=8192))
ROUTED = Layer(
    attention=ATTENTION, mlp=MoE(experts=64, top_k=4, expert_ffn=512, router=Router(score="softmax", normalise=True))
)
H100 = find_profile("h100")


def model_of(*layers: Layer, vocab: int = 1) -> ModelConfig:
    return ModelConfig(
        vocab=vocab, hidden=4096, max_tokens=8192, norm=RMSNorm(eps=1e-6), rope=Rope(theta=1e4), layers=layers
    )


def run_of(model: ModelConfig, ranks: int = 1, *, batch: int = 16, **parallel: object) -> RunConfig:
    return RunConfig(
        family="mixtral",
        size="none",
        hardware="h100",
        ranks=ranks,
        model=model,
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        train=TrainConfig(steps=1, sequence_tokens=4096, global_batch=batch, microbatch=1),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        data=DataConfig(),
        precision=PrecisionConfig(compute="bfloat16"),
        checkpoint=CheckpointConfig(),
        execution=ExecutionConfig(graphs=("full_iteration",)),
    )


def only(*, products: bool = False, network: bool = False, launches: bool = False) -> Profile:
    """H100 on which nothing costs time but what is named."""
    assert H100.chip is not None and H100.fabric is not None and H100.speeds is not None
    chip = replace(H100.chip, memory_bandwidth=FREE, bfloat16=H100.chip.bfloat16 if products else FREE)
    fabric = replace(H100.fabric, all_to_all_nvlink=FREE, token_once_nvlink=FREE)
    if not network:
        fabric = replace(fabric, all_to_all_network=FREE, token_once_network=FREE)
    speeds = replace(H100.speeds, attention=(FREE, FREE), long_attention=(FREE, FREE))
    if not launches:
        speeds = replace(speeds, launch_seconds=0.0)
    return replace(H100, chip=chip, fabric=fabric, speeds=speeds)


def faster_network(profile: Profile, times: float) -> Profile:
    assert profile.fabric is not None
    fabric = profile.fabric
    return replace(
        profile,
        fabric=replace(
            fabric,
            all_to_all_network=times * fabric.all_to_all_network,
            token_once_network=times * fabric.token_once_network,
        ),
    )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 7), (2, 1, 5), (4, 1, 8), (4, 2, 8), (8, 3, 16)])
def test_equal_stages_that_send_for_nothing_wait_p_minus_1_over_v_times_m(exact: bool, p: int, v: int, m: int) -> None:
    run = run_of(model_of(*repeat(p * v * 2, DENSE)), p, batch=m, pp=p, vpp=v)
    plan = plan_time(run, only(products=True), exact=exact)
    assert plan.step.bubble == pytest.approx((p - 1) / (v * m), rel=1e-3, abs=1e-3)
    assert plan.step.walls["bubble"] == pytest.approx(plan.step.seconds * (p - 1) / (p - 1 + v * m), rel=1e-3, abs=1e-9)


def test_products_take_their_flop_over_the_share_of_the_peak_forward_once_and_backward_twice() -> None:
    run = run_of(model_of(*repeat(3, DENSE)), batch=5)
    assert H100.chip is not None and H100.speeds is not None
    elements = 3 * (4096 * 64 * (2 * 32 + 2 * 8) + 3 * 4096 * 8192) + 4096
    seconds = 5 * 6 * 4096 * elements / (H100.chip.bfloat16 * H100.speeds.products)
    assert plan_time(run, only(products=True)).step.seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_current"])
def test_a_recipe_multiplies_layers_at_its_own_peak_and_logits_at_the_dtypes(recipe: RecipeName) -> None:
    run = run_of(model_of(*repeat(2, DENSE), vocab=1001))
    low = replace(run, precision=PrecisionConfig(compute="bfloat16", recipe=RECIPES[recipe]))
    profile = only(products=True)
    assert profile.chip is not None and profile.speeds is not None and profile.chip.fp8 is not None
    high, speeds = profile.chip.bfloat16, profile.speeds
    layers = 16 * 6 * 4096 * 2 * (4096 * 64 * (2 * 32 + 2 * 8) + 3 * 4096 * 8192)
    logits = 16 * 6 * 4096 * 4096 * 1001 / (high * speeds.products)
    assert plan_time(run, profile).step.seconds == pytest.approx(layers / (high * speeds.products) + logits)
    assert plan_time(low, profile).step.seconds == pytest.approx(
        layers / (profile.chip.fp8 * speeds.low_products) + logits
    )


@pytest.mark.parametrize(
    ("changes", "low"),
    [
        ({"high_first": 1}, 1),
        ({"high_first": 1, "high_last": 1}, 0),
        ({"high": ("layers.1.*",)}, 1),
        ({"forward": Forward(input=None, weight=None)}, 2 * 2 / 3),
    ],
    ids=str,
)
def test_products_that_a_recipe_leaves_alone_are_as_fast_as_without(changes: dict[str, Any], low: float) -> None:
    """low: how many of two layers' products are multiplied in eight bits."""
    run = run_of(model_of(*repeat(2, DENSE)))
    recipe = replace(RECIPES["fp8_blockwise"], **changes)
    profile = only(products=True)
    mixed, all_low, none_low = (
        plan_time(replace(run, precision=PrecisionConfig(compute="bfloat16", recipe=each)), profile).step.seconds
        for each in (recipe, RECIPES["fp8_blockwise"], None)
    )
    assert mixed == pytest.approx(none_low - low / 2 * (none_low - all_low))


def test_some_weights_of_a_product_may_stay_in_the_dtype() -> None:
    run = run_of(model_of(*repeat(1, DENSE)))
    recipe = replace(RECIPES["fp8_blockwise"], high=("layers.0.attention.query.weight", "layers.0.mlp.down"))
    profile = only(products=True)
    mixed, all_low, none_low = (
        plan_time(replace(run, precision=PrecisionConfig(compute="bfloat16", recipe=each)), profile).step.seconds
        for each in (recipe, RECIPES["fp8_blockwise"], None)
    )
    high = (64 * 32 + 8192) / (64 * (2 * 32 + 2 * 8) + 3 * 8192)
    assert mixed == pytest.approx(all_low + high * (none_low - all_low))


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_rows_that_travel_as_the_forward_rounds_them_halve_one_of_four_ways(dispatcher: str) -> None:
    run = run_of(model_of(*repeat(2, ROUTED)), 16, ep=16, dispatcher=dispatcher)
    sent = {}
    for name, changes in (("plain", {"dispatch": False}), ("low", {"dispatch": True}), ("left", {"high_first": 1})):
        recipe = replace(RECIPES["fp8_blockwise"], **({"dispatch": True} | changes))  # type: ignore[arg-type]
        low = replace(run, precision=PrecisionConfig(compute="bfloat16", recipe=recipe))
        sent[name] = {axis.axis: axis.sent_bytes for axis in plan_time(low, H100).communication}["ep"]
    each = (1 + 4 / 128) / 2
    assert sent["low"] == pytest.approx((3 + each) / 4 * sent["plain"])
    assert sent["left"] == pytest.approx((7 + each) / 8 * sent["plain"])


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep", "deepep"])
def test_twice_the_network_halves_what_is_exposed_of_experts_elsewhere(dispatcher: str) -> None:
    run = run_of(model_of(*repeat(3, ROUTED)), 64, batch=128, ep=64, dispatcher=dispatcher)
    one = plan_time(run, only(network=True))
    two = plan_time(run, faster_network(only(network=True), 2))
    assert one.step.walls["ep"] > 0
    assert two.step.walls["ep"] == pytest.approx(one.step.walls["ep"] / 2, rel=1e-12)


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex", "hybridep"])
def test_experts_inside_an_nvlink_domain_are_nearer_than_outside(dispatcher: str) -> None:
    run = run_of(model_of(*repeat(3, ROUTED)), 16, ep=16, dispatcher=dispatcher)
    assert H100.fabric is not None
    wide = replace(H100, fabric=replace(H100.fabric, domain=16))
    inside, outside = plan_time(run, wide), plan_time(run, H100)
    assert inside.step.walls["ep"] < 0.7 * outside.step.walls["ep"]
    of = {axis.axis: axis.inside for axis in inside.communication}
    assert of["ep"] and not {axis.axis: axis.inside for axis in outside.communication}["ep"]


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("mlp", 3 * 4096 * 8192),
        ("full", 4096 * 64 * (2 * 32 + 2 * 8) + 3 * 4096 * 8192),
        ("core_attn", 0),
        ("layernorm", 0),
        ("moe", 0),
    ],
)
def test_recomputation_costs_one_more_forward_of_its_part(name: str, elements: int) -> None:
    run = run_of(model_of(*repeat(3, DENSE)), batch=5)
    again = replace(run, memory=MemoryConfig(recompute=(name,)))  # type: ignore[arg-type]
    profile = only(products=True)
    assert profile.chip is not None and profile.speeds is not None
    more = plan_time(again, profile).step.seconds - plan_time(run, profile).step.seconds
    expected = 5 * 3 * 2 * 4096 * elements / (profile.chip.bfloat16 * profile.speeds.products)
    assert more == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_names_that_hold_one_another_are_computed_again_only_once() -> None:
    run = run_of(model_of(*repeat(2, ROUTED)))
    both = replace(run, memory=MemoryConfig(recompute=("moe", "moe_act")))
    one = replace(run, memory=MemoryConfig(recompute=("moe",)))
    assert plan_time(both, H100).step.seconds == plan_time(one, H100).step.seconds


def test_experts_computed_again_are_sent_again() -> None:
    run = run_of(model_of(*repeat(2, ROUTED)), 8, ep=8)
    again = replace(run, memory=MemoryConfig(recompute=("moe",)))
    sent = [
        next(axis.sent_bytes for axis in plan_time(each, H100).communication if axis.axis == "ep")
        for each in (run, again)
    ]
    assert sent[1] == pytest.approx(1.5 * sent[0])


def test_a_device_waits_for_its_host_only_as_long_as_the_host_takes_longer() -> None:
    run = replace(run_of(model_of(*repeat(3, ROUTED)), batch=5), execution=ExecutionConfig())
    assert H100.speeds is not None
    alone = plan_time(run, only(launches=True)).step
    assert alone.walls["launches"] == pytest.approx(5 * 3 * H100.speeds.launch_seconds)
    slow = replace(H100, speeds=replace(H100.speeds, streamed=100.0))
    assert plan_time(run, slow).step.walls["launches"] == 0
    busy, graphed = (
        plan_time(replace(run, execution=ExecutionConfig(graphs=g)), H100) for g in ((), ("full_iteration",))
    )
    assert busy.step.walls["launches"] > 0 == graphed.step.walls["launches"]


def test_graphs_of_parts_take_their_launches_away() -> None:
    run = run_of(model_of(*repeat(3, ROUTED)))
    waits = [
        plan_time(replace(run, execution=ExecutionConfig(graphs=graphs)), only(launches=True)).step.seconds
        for graphs in ((), ("moe_router",), ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess"))
    ]
    assert waits == sorted(waits, reverse=True) and len(set(waits)) == 4


def test_the_combined_schedule_hides_experts_exchanges_and_nothing_else() -> None:
    run = run_of(model_of(*repeat(4, ROUTED)), 32, batch=256, ep=16, pp=2)
    plain = plan_time(run, H100).step
    combined = plan_time(replace(run, parallel=replace(run.parallel, schedule="combined")), H100).step
    assert H100.speeds is not None
    least = (1 - H100.speeds.overlapped) * plain.walls["ep"]
    assert least < combined.walls["ep"] < 0.6 * plain.walls["ep"]
    for wall in ("products", "attention", "streaming"):
        assert combined.walls[wall] == pytest.approx(plain.walls[wall], rel=0.01)


def test_closed_and_executed_times_agree_on_a_long_pipeline() -> None:
    for schedule in ("1f1b", "combined", "zero_bubble", "gpipe"):
        run = run_of(model_of(*repeat(16, ROUTED)), 32, batch=256, ep=8, pp=4, vpp=2, schedule=schedule)
        exact, closed = (plan_time(run, H100, exact=exact) for exact in (True, False))
        assert closed.step.seconds == pytest.approx(exact.step.seconds, rel=0.03), schedule
        assert closed.timeline is None and exact.timeline is not None


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_walls_add_up_and_tokens_times_flop_are_tflops(sharding: str) -> None:
    model = model_of(*repeat(3, DENSE), *repeat(5, ROUTED), vocab=5003)
    run = run_of(model, 64, batch=32, tp=2, cp=2, ep=8, pp=4, sharding=sharding)
    run = replace(run, execution=ExecutionConfig())
    step = plan_time(run, H100).step
    assert all(seconds >= 0 for seconds in step.walls.values())
    assert sum(step.walls.values()) == pytest.approx(step.seconds)
    assert step.tokens_per_second == pytest.approx(32 * 4096 / 64 / step.seconds)
    assert step.tflops == pytest.approx(step.tokens_per_second * flops_per_token(model, 4096) / 1e12)


def test_a_stage_costs_by_what_lies_on_it() -> None:
    model = model_of(*repeat(8, DENSE), vocab=200_003)
    even, relieved = (plan_time(run_of(model, 2, pp=2, layout=layout), H100) for layout in ("Et*4|t*4L", "Et*5|t*3L"))
    assert even.stages[1].forward_seconds > even.stages[0].forward_seconds
    assert relieved.step.seconds < even.step.seconds
    assert [stage.parts for stage in even.stages] == [("Et*4",), ("t*4L",)]


def test_offloaded_states_come_and_go_over_the_host_link() -> None:
    run = run_of(model_of(*repeat(3, DENSE)))
    half = replace(run, memory=MemoryConfig(optimizer_offload=0.5))
    plain, moved = (plan_time(each, H100).step.walls["optimizer"] for each in (run, half))
    assert H100.chip is not None
    numbers = 3 * (4096 * 64 * (2 * 32 + 2 * 8) + 3 * 4096 * 8192) + 2 * 4096
    assert moved == pytest.approx(numbers * 0.5 * 12 / H100.chip.host_link, rel=1e-6)
    assert plain < moved


def test_flop_of_the_parts_are_those_of_published_figures() -> None:
    for family in all_families():
        for size in family.sizes:
            share = Share.of(run_of(size.model))
            works = [work for _, layer in size.model.all_layers() for work in layer_work(layer, share)]
            modules = len(size.model.mtp_layers())
            works += [work for _ in range(modules) for work in ahead_work(share)]
            works += [loss_work(size.model.vocab, share)] * (1 + modules)
            flop = sum(w.products + w.plain + w.attention for w in works if w.name != "router")
            assert 3 * flop / 4096 == pytest.approx(flops_per_token(size.model, 4096), rel=1e-12), size.name


@pytest.mark.parametrize(
    ("axis", "theirs", "mapping"),
    [
        ("tp", ("tp",), {"tp": 4}),
        ("cp", ("heads", "ring"), {"cp": 4, "cp_alltoall": 2}),
        ("ep", ("ep",), {"ep": 8, "dispatcher": "alltoall"}),
        ("ep", ("experts",), {"ep": 8, "dispatcher": "allgather"}),
        ("pp", ("pp",), {"pp": 2}),
        ("dp", ("replicas", "embedding"), {"ep": 8}),
        ("edp", ("edp",), {"ep": 2}),
    ],
)
def test_bytes_are_those_of_the_closed_form_that_is_held_against_real_runs(
    axis: str, theirs: tuple[str, ...], mapping: dict[str, object]
) -> None:
    run = run_of(model_of(*repeat(4, ROUTED), vocab=997), 8, batch=16, **mapping)
    step = TrainingStep(
        model=run.model,
        parallel=run.parallel,
        world=8,
        parts=layout_of(run.model, run.parallel).parts,
        lengths=(4096,) * 16,
        microbatches=16,
        element_bytes=2,
    )
    counted = expected_bytes(step)
    sent = {each.axis: each.sent_bytes for each in plan_time(run, H100).communication}[axis]
    # Theirs has the small things too: counts, router weights, statistics of the logits, gains.
    assert sent == pytest.approx(sum(counted.get(name, 0.0) for name in theirs), rel=0.01)


@pytest.mark.parametrize(
    ("groups", "units"),
    [
        *((None, units) for units in (1, 2, 3, 4, 6, 12)),
        *((Groups(total=4, kept=2), units) for units in (1, 2, 4, 12)),
        *((Groups(total=6, kept=1), units) for units in (1, 2, 3, 6, 12)),
        *((Groups(total=2, kept=2), units) for units in (1, 2, 4, 6, 12)),
    ],
)
def test_a_token_meets_a_part_of_the_experts_as_often_as_when_all_choices_are_counted(
    groups: Groups | None, units: int
) -> None:
    experts, k = 12, 2
    moe = MoE(experts=experts, top_k=k, expert_ffn=1, router=Router(score="sigmoid", normalise=True, groups=groups))
    group = experts // (groups.total if groups else 1)
    hits = choices = 0
    for kept in combinations(range(groups.total if groups else 1), groups.kept if groups else 1):
        pool = [e for e in range(experts) if e // group in kept]
        for chosen in combinations(pool, k):
            choices += 1
            hits += any(e < experts // units for e in chosen)
    assert met(moe, units) == pytest.approx(hits / choices)


def test_groups_of_sixty_four_fill_sixty_four_places_of_a_rack() -> None:
    gb200 = find_profile("gb200")
    assert gb200.fabric is not None
    axes = Links.of(run_of(model_of(ROUTED), 256, ep=64), gb200.fabric).axes
    assert axes["ep"].inside and axes["ep"].near == 64
    assert not axes["dp"].inside and axes["dp"].near == 64
    assert not Links.of(run_of(model_of(ROUTED), 256, ep=64), H100.fabric).axes["ep"].inside  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_nothing_is_said_where_nothing_is_known_of_the_hardware(name: str) -> None:
    with pytest.raises(ValueError, match=f"nothing is known of the speed of --hw {name}"):
        plan_time(run_of(model_of(DENSE)), find_profile(name))


def test_a_recipe_that_the_chip_has_not_and_a_batch_that_does_not_divide_are_refused() -> None:
    run = run_of(model_of(DENSE))
    with pytest.raises(ValueError, match="h100 has no mxfp8"):
        plan_time(replace(run, precision=PrecisionConfig(compute="bfloat16", recipe=RECIPES["mxfp8"])), H100)
    with pytest.raises(ValueError, match="a batch of 16 does not divide"):
        plan_time(run_of(model_of(DENSE), 3), H100)
