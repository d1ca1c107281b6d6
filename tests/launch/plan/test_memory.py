"""The memory plan by itself: against closed forms, the built model's own buckets, whole traces, and its own limits."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.config.architecture import (
    Capacity,
    ExpertChoice,
    Layer,
    ModelConfig,
    MoE,
    QuantileBias,
    SharedExperts,
    Sinkhorn,
    SquaredReLU,
)
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.config.precision import PrecisionConfig
from core.config.recipe import RECIPES
from core.config.run import RunConfig
from core.optim.buckets import BUCKET_BYTES, pack
from core.parallel.fake import plan_world
from core.parallel.mesh import fold
from core.pipeline.layout import layout_of
from core.state.inventory import declared
from core.transformer.stage import build_model
from launch.plan.memory import MemoryPlanner, plan_memory
from launch.plan.pieces import RankPieces
from launch.plan.trace import PieceTrace
from tests.launch.plan.runs import MODELS, deepseek_run, tiny_run

BFLOAT16 = PrecisionConfig(compute="bfloat16")


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    return MemoryPlanner()


def _built(run: RunConfig, rank: int) -> tuple[int, int, int]:
    """Parameters, gradients, and the optimizer's bytes of a rank's own stage, built and put into buckets."""
    p, dtype = run.parallel, torch.bfloat16 if run.precision == BFLOAT16 else torch.float32
    stages = layout_of(run.model, p).embedding_stages(run.model.tied_embeddings)
    groups = plan_world(fold(p, run.ranks), embedding_stages=stages).groups(rank)
    model = build_model(run.model, groups=groups, parallel=p, dtype=dtype, device="meta")
    entries = declared(model)
    buckets = pack({name: e for name, e in entries.items() if e.spec.trained}, groups, BUCKET_BYTES)
    parameters = sum(bucket.parameters.nbytes for bucket in buckets)
    parameters += sum(e.tensor.nbytes for e in entries.values() if not e.spec.trained)
    masters = sum(b.master.nbytes for b in buckets if b.master.dtype != b.parameters.dtype)
    moments = sum(2 * 4 * b.master.numel() + 4 for b in buckets)
    return parameters, sum(b.gradients.nbytes for b in buckets), masters + moments


@pytest.mark.parametrize("precision", [PrecisionConfig(), BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_parameters_and_optimizer_are_those_of_the_built_model_on_every_folding(
    family: str, precision: PrecisionConfig, planner: MemoryPlanner
) -> None:
    """Known fault I1: experts divided by tp, and their optimizer by dp."""
    for tp, ep, etp, pp in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2)):
        if 8 % (tp * pp) or 8 % (ep * etp * pp):
            continue
        run = tiny_run(family, ParallelConfig(tp=tp, ep=ep, etp=etp, pp=pp), 8, precision=precision)
        for rank in (0, 3, 7):
            resident = planner.resident(run, rank)
            found = (resident.parameters, resident.gradients, resident.optimizer)
            assert found == _built(run, rank), (tp, ep, etp, pp, rank)


def test_experts_are_divided_by_ep_and_etp_and_not_by_tp(planner: MemoryPlanner) -> None:
    """Known fault I1, by closed form: 3 matrices of 8 by 16 an expert, two layers of 4 experts, 8 ranks."""

    def experts(tp: int, ep: int, etp: int) -> int:
        pieces = planner.traces.of(tiny_run("mixtral", ParallelConfig(tp=tp, ep=ep, etp=etp), 8), 0)
        return sum(e.tensor.numel() for n, e in pieces.experts.entries.items() if n.startswith("layers.0.mlp.experts"))

    for tp in (1, 2):
        for ep, etp in ((1, 1), (2, 1), (2, 2), (4, 2)):
            assert experts(tp, ep, etp) == 4 * 3 * 8 * 16 // (ep * etp), (tp, ep, etp)


def test_twice_as_much_ep_keeps_as_many_rows_and_a_dense_layer_keeps_none(planner: MemoryPlanner) -> None:
    """Known fault I2, by closed form: 48 tokens with 4 rows each of 16 numbers, whose first products are 16 wide, in float32."""
    for ep in (1, 2, 4):
        pieces = planner.traces.of(tiny_run("deepseek", ParallelConfig(ep=ep), 4), 0)
        rows = 48 * 4
        of_experts = [p for p in pieces.experts.layer(1, final=False).kept if p.shape == (rows, 16)]
        assert sum(p.num_bytes for p in of_experts) == 2 * rows * 16 * 4, ep
        assert not [p for p in pieces.shared.layer(0, final=False).kept if p.shape[:1] == (rows,)]


@pytest.mark.parametrize("recompute", [(), ("full",), ("layernorm", "moe")], ids=str)
def test_pieces_add_up_to_whole_parts(recompute: tuple[RecomputeName, ...], planner: MemoryPlanner) -> None:
    """The last layer with its norm, and a prediction module, are put together: traced whole they keep and send the same."""
    run = tiny_run("deepseek", ParallelConfig(tp=2, ep=4), 4, MemoryConfig(recompute=recompute))
    pieces = planner.traces.of(run, 1)
    last = pieces.kinds.of[-1]
    plain, norm = pieces.experts.layer(last, final=False), pieces.final_norm
    whole = pieces.experts.layer(last, final=True)
    between = norm.stream_bytes if norm.keeps_input else 0
    assert whole.kept_bytes == plain.kept_bytes + norm.kept_bytes + between
    apart = [placed.trace for placed in pieces.ahead(own_input=True)]
    assert sum(trace.kept_bytes for trace in apart) == pieces.experts.ahead.kept_bytes
    assert _sent(*apart) == _sent(pieces.experts.ahead)


def _sent(*traces: PieceTrace) -> dict[str, int]:
    found: dict[str, int] = {}
    for trace in traces:
        for axis, both in trace.sent.items():
            found[axis] = found.get(axis, 0) + sum(both)
    return {axis: count for axis, count in found.items() if count}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_a_hot_rank_is_told_by_the_slope_of_another_ep(dispatcher: str) -> None:
    planner = MemoryPlanner()
    for ep in (2, 4, 8):  # the first is traced, the others follow its slope
        run = tiny_run("qwen3", ParallelConfig(ep=ep if ep < 8 else 6, dispatcher=dispatcher), 12)  # type: ignore[arg-type]
        told = planner.parts(run, 0, hot=True)
        traced = MemoryPlanner().parts(run, 0, hot=True)
        assert [p.activations for p in told] == pytest.approx([p.activations for p in traced], rel=0.03), ep
        assert told[0].activations > 1.3 * planner.parts(run, 0)[0].activations


def test_a_capacity_and_a_budget_hold_the_worst_case_down(planner: MemoryPlanner) -> None:
    run = tiny_run("mixtral", ParallelConfig(ep=4), 4)
    free = planner.parts(run, 0, hot=True)[0].activations
    budget = replace(run, parallel=replace(run.parallel, expert_budget=1.25))
    kept = planner.parts(budget, 0, hot=True)[0].activations
    balanced = planner.parts(run, 0)[0].activations
    assert balanced < kept < free
    capacity = replace(run, model=_with_capacity(run))
    assert planner.parts(capacity, 0, hot=True)[0].activations < free


def _with_capacity(run: RunConfig) -> ModelConfig:
    def limited(layer: Layer) -> Layer:
        assert isinstance(layer.mlp, MoE)
        return replace(layer, mlp=replace(layer.mlp, capacity=Capacity(factor=1.0)))

    return replace(run.model, layers=tuple(map(limited, run.model.layers)))


def test_deepseek_v3_is_planned_in_seconds_and_fifty_more_mappings_in_moments() -> None:
    planner, start = MemoryPlanner(), time.process_time()
    plan = planner.of(deepseek_run())
    assert time.process_time() - start < 10, "a few seconds"
    assert max(plan, key=lambda each: each.balanced.total).rank == 0
    assert all(each.worst.total > each.balanced.total for each in plan)
    mappings: list[dict[str, Any]] = [
        {"pp": pp, "vpp": vpp, "ep": ep, "tp": tp, "layout": None}
        for pp, vpp in ((4, 4), (8, 2), (8, 1), (16, 1), (4, 1), (2, 2))
        for ep in (8, 16, 32, 64)
        for tp in (1, 2, 4)
        if 256 % (pp * ep) == 0
    ]
    assert len(mappings) >= 50
    start = time.process_time()
    plans = [planner.of(deepseek_run(**mapping)) for mapping in mappings[:50]]
    # 3 to 5 s on a quiet core; where others share its caches it takes up to twice as long.
    assert time.process_time() - start < 10
    assert len({each[0].balanced.total for each in plans}) > 40


@pytest.mark.parametrize(
    "name", ["full", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
)
def test_what_is_made_again_is_not_kept(name: str, planner: MemoryPlanner) -> None:
    run = tiny_run("deepseek", ParallelConfig(), 1)
    again = replace(run, memory=MemoryConfig(recompute=(name,)))  # type: ignore[arg-type]
    before, after = (planner.parts(each, 0)[0].activations for each in (run, again))
    # Experts never keep their activations, and the routers' small results may count as much as what core_attn saves of so few tokens.
    assert after < before or (name in ("moe_act",) and after == before)


def test_a_schedule_that_keeps_more_plans_more(planner: MemoryPlanner) -> None:
    run = tiny_run("mixtral", ParallelConfig(pp=2), 2)
    run = replace(run, train=replace(run.train, global_batch=8))
    kept = {}
    for name in ("gpipe", "1f1b", "combined"):
        named = replace(run, parallel=replace(run.parallel, schedule=name))  # type: ignore[arg-type]
        kept[name] = planner.of(named)[0]
    assert kept["gpipe"].in_flight == (8,) and kept["1f1b"].in_flight == (2,)
    # What runs at the fullest moment has not yet kept all that it will.
    assert kept["gpipe"].balanced.activations == pytest.approx(4 * kept["1f1b"].balanced.activations, rel=0.05)
    assert kept["1f1b"].balanced.activations < kept["combined"].balanced.activations


def test_moments_gradients_and_optimizer_offload_take_what_they_say(planner: MemoryPlanner) -> None:
    run = replace(deepseek_run(), parallel=replace(deepseek_run().parallel, ep=64))
    plain = planner.resident(run, 64)
    small = replace(run, precision=replace(BFLOAT16, moments="bfloat16", main_gradients="bfloat16"))
    less = planner.resident(small, 64)
    assert less.gradients * 2 == plain.gradients
    assert less.optimizer == pytest.approx(plain.optimizer * 8 / 12, rel=1e-3)
    # mxfp8 keeps a weight and its transpose, each with scales of its own; a weight of square blocks is kept once.
    for recipe, share in (("fp8_blockwise", 1 / 2), ("mxfp8", 1 + 1 / 32)):
        low = replace(BFLOAT16, recipe=RECIPES[recipe], primary=True)  # type: ignore[index]
        primary = planner.resident(replace(run, precision=low), 64)
        assert primary.parameters == pytest.approx(plain.parameters * share, rel=0.01)
    away = replace(run, memory=MemoryConfig(optimizer_offload=0.5))
    (_, here, *_), (_, there, *_) = planner.of(run), planner.of(away)
    # Whole blocks of 128, and counts of steps stay.
    assert there.on_host == pytest.approx(plain.optimizer / 2, rel=1e-6)
    assert here.balanced.optimizer - there.balanced.optimizer == there.on_host


def test_offloaded_activations_wait_on_the_host(planner: MemoryPlanner) -> None:
    """One layer of experts of DeepSeek-V3 and 4096 tokens, in MiB: the inputs of what is named."""
    sizes = {"attn_norm": 56, "core_attn": 576, "attn_proj": 128, "mlp_norm": 56, "expert_fc1": 448, "moe_act": 256}
    run = deepseek_run()
    for name, size in sizes.items():
        away = replace(run, memory=MemoryConfig(offload=(name,)))  # type: ignore[arg-type]
        pieces: RankPieces = planner.traces.of(away, 64)
        (placed,) = [pieces.layer(pieces.kinds.of[-1], own_input=True)]
        load = pieces.load(placed, hot=False)
        plain = planner.traces.of(run, 64).load(placed, hot=False)
        assert load.on_host == size * 2**20, name
        assert plain.kept + plain.stream - load.kept - load.stream == load.on_host, name


def test_a_recipe_keeps_operands_of_products_in_its_own_bytes(planner: MemoryPlanner) -> None:
    """4096 tokens of a layer of experts: 448 MiB of rows of experts, 16 of latents, 16 of shared experts and 128 behind attention are
    halved, and so are the 56 MiB behind attention's norm, kept once for both products that read them. The router reads those behind the
    other norm, which are kept as they are beside what shared experts keep of them."""
    run = deepseek_run()
    eight = replace(run, precision=replace(BFLOAT16, recipe=RECIPES["fp8_current"]))
    kept = [planner.parts(each, 64)[1].activations for each in (run, eight)]
    saved = (448 + 16 + 16 + 128 + 56) // 2 - 28
    assert kept[0] - kept[1] == pytest.approx(4 * saved * 2**20, rel=1e-5)


def test_under_a_recipe_the_same_parts_wait_on_the_host(planner: MemoryPlanner) -> None:
    """One layer of experts of DeepSeek-V3 and 4096 tokens, in MiB: what products read is halved, all else as it is."""
    sizes = {"attn_norm": 56, "core_attn": 576, "attn_proj": 64, "mlp_norm": 56, "expert_fc1": 224, "moe_act": 256}
    run = deepseek_run()
    run = replace(run, precision=replace(BFLOAT16, recipe=RECIPES["fp8_current"]))
    for name, size in sizes.items():
        away = replace(run, memory=MemoryConfig(offload=(name,)))  # type: ignore[arg-type]
        pieces = planner.traces.of(away, 64)
        load = pieces.load(pieces.layer(pieces.kinds.of[-1], own_input=True), hot=False)
        assert load.on_host == pytest.approx(size * 2**20, rel=1e-3), name


def test_plan_memory_is_what_a_fresh_planner_says() -> None:
    run = tiny_run("qwen3", ParallelConfig(pp=2, ep=2), 4)
    assert plan_memory(run) == MemoryPlanner().of(run)
    assert [each.pp_rank for each in plan_memory(run)] == [0, 1]
    assert [each.rank for each in plan_memory(run)] == [0, 2]


def _varied(model: ModelConfig, **changes: Any) -> ModelConfig:
    """The model with other layers of experts; `router` holds changes of their routers."""
    router = changes.pop("router", {})

    def other(layer: Layer) -> Layer:
        if not isinstance(layer.mlp, MoE):
            return layer
        return replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, **router), **changes))

    return replace(model, layers=tuple(map(other, model.layers)))


@pytest.mark.parametrize(
    "changes",
    [
        {"router": {"selection": Sinkhorn()}},
        {"router": {"selection": ExpertChoice()}},
        {"router": {"balance": (QuantileBias(),)}},
        {"router": {"jitter": 0.1}},
        {"router": {"dtype": "float64"}},
        {"latent": 8},
        {"bias": True},
        {"activation": SquaredReLU()},
        {"shared": SharedExperts(count=1, gated=True)},
        {"capacity": Capacity(factor=1.25, pad=True)},
    ],
    ids=str,
)
def test_whatever_a_layer_of_experts_is_made_of_is_planned(changes: dict[str, Any], planner: MemoryPlanner) -> None:
    run = tiny_run("mixtral", ParallelConfig(cp=2, cp_alltoall=2, ep=4), 4)
    varied = replace(run, model=_varied(run.model, **changes))
    (found,) = planner.of(varied)
    assert found.worst.total >= found.balanced.total > 0
    assert planner.traffic(varied, 1)["ep"] > 0


@pytest.mark.parametrize("dispatcher", ["flex", "deepep", "hybridep"])
def test_tokens_that_travel_once_are_planned_with_nodes(dispatcher: str, planner: MemoryPlanner) -> None:
    parallel = ParallelConfig(ep=4, ep_per_node=2, dispatcher=dispatcher)  # type: ignore[arg-type]
    sent = planner.traffic(tiny_run("mixtral", parallel, 4), 0)
    assert sent["nodes"] > 0 and sent["node"] > 0
