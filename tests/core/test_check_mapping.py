"""What a mapping asks of model and world: every rule in its words, and a mapping without fault is one that can be built."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import gcd, lcm
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.attention.heads import check_heads
from core.check import check, check_mapping, check_model
from core.config.architecture import (
    GQA,
    MLA,
    Capacity,
    Dense,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
)
from core.config.mapping import LIMITS, DispatcherName, ParallelConfig
from core.config.override import Assignment, override
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.errors import Fault
from core.parallel.fake import plan_world
from core.parallel.mesh import fold
from core.pipeline.layout import layout_of
from core.pipeline.prove import faults as schedule_faults
from core.pipeline.schedule import make_schedule
from core.state.box import tiling_fault, whole
from core.state.inventory import declared, replicas
from core.transformer.stage import build_model
from tests.core.said import sentence

NORM = RMSNorm(eps=1e-6)
ROUTER = Router(score="softmax", normalise=True)
EXPERTS = MoE(experts=12, top_k=3, expert_ffn=5, shared=SharedExperts(count=2), router=ROUTER)
DENSE = Layer(attention=GQA(heads=12, kv_heads=6, head_dim=2), mlp=Dense(ffn=23))
SPARSE = Layer(
    attention=MLA(heads=6, query_rank=3, latent_rank=5, nope_dim=4, rope_dim=2, value_dim=3, latent_norm=NORM),
    mlp=EXPERTS,
)
MODEL = ModelConfig(
    vocab=257,
    hidden=7,
    max_tokens=64,
    norm=NORM,
    rope=Rope(theta=1e4),
    layers=(DENSE, SPARSE, SPARSE),
    predict_ahead=MultiToken(depth=1, loss_weight=0.3),
)


def said(ranks: int, model: ModelConfig = MODEL, **degrees: Any) -> list[str]:
    return [sentence(fault) for fault in check_mapping(model, ParallelConfig(**degrees), ranks)]


def with_layers(*layers: Layer) -> ModelConfig:
    return replace(MODEL, layers=layers, predict_ahead=None)


@pytest.mark.parametrize(
    ("ranks", "degrees", "faults"),
    [
        (4, {"tp": 4}, ["parallel.tp=4: must divide model.attention.heads=6. Works: 3 or 6.", "parallel.tp=4: must divide model.attention.kv_heads=6 or be a multiple of it. Works: 3 or 6."]),
        (10, {"ep": 5}, ["parallel.ep=5: must divide model.moe.experts=12. Works: 4 or 6."]),
        (6, {"etp": 6}, ["parallel.etp=6: must be at most model.moe.expert_ffn=5. Works: 5."]),
        (4, {"cp": 4, "cp_alltoall": 3}, ["parallel.cp_alltoall=3: must divide parallel.cp=4. Works: 2."]),
        (
            12,
            {"tp": 3, "cp": 4, "cp_alltoall": 4},
            ["parallel.cp_alltoall=4: must divide model.attention.heads=6, of which a rank of parallel.tp=3 holds 2. Works: 2."],
        ),
        (4, {"fsdp_replicas": 2}, ["parallel.fsdp_replicas=2: copies what parallel.sharding=fsdp shards, and here parallel.sharding=zero1. Works: 1, or parallel.sharding=fsdp."]),
        (8, {"tp": 2, "sharding": "fsdp", "fsdp_replicas": 3}, ["parallel.fsdp_replicas=3: must divide the 4 data-parallel ranks. Works: 2 or 4."]),
        (2, {"sharding": "fsdp", "schedule": "zero_bubble"}, ["parallel.schedule=zero_bubble: puts weight gradients off, past the hooks by which parallel.sharding=fsdp takes them. Works: 1f1b or gpipe, or parallel.sharding=zero1."]),
        (2, {"sharding": "fsdp", "schedule": "combined"}, ["parallel.schedule=combined: runs a forward beside a backward, and parallel.sharding=fsdp holds the parameters of one of them at a time. Works: 1f1b or gpipe, or parallel.sharding=zero1."]),
        (6, {"pp": 2, "ep": 2}, ["--ranks=6: must be a multiple of parallel.etp*ep*pp=4. Works: 4 or 8, or parallel.ep=1 or 3, or parallel.pp=1 or 3."]),
        (1, {"tp": 2, "cp": 101}, ["--ranks=1: must be a multiple of parallel.tp*cp*pp=202. Works: 202."]),
        (2, {"pp": 2, "vpp": 3, "layout": "Et|tt|m|L"}, ["parallel.vpp=3: the layout 'Et|tt|m|L' has 4 stages, 2 on each of parallel.pp=2 pipeline ranks. Works: 2, or 1, which takes it from the layout."]),
        (2, {"pp": 2, "layout": "Et|tt|mL"}, ["parallel.pp=2: the layout 'Et|tt|mL' has 3 stages, which 2 pipeline ranks cannot share evenly. Works: 1, or 3."]),
        (4, {"ep": 4, "ep_per_node": 3, "dispatcher": "flex"}, ["parallel.ep_per_node=3: must divide parallel.ep=4. Works: 2 or 4."]),
        (4, {"ep": 4, "ep_per_node": 2}, ["parallel.ep_per_node=2: is for parallel.dispatcher=flex, and here parallel.dispatcher=alltoall. Works: 1, or parallel.dispatcher=flex."]),
        (1, {"ep_per_node": 0}, ["parallel.ep_per_node=0: must be positive. Works: 1 or more."]),
        (1, {"expert_budget": -0.5}, ["parallel.expert_budget=-0.5: must be a positive number; none drops nothing. Works: none."]),
        (1, {"expert_budget": float("nan")}, ["parallel.expert_budget=nan: must be a positive number; none drops nothing. Works: none."]),
    ],
)  # fmt: skip
def test_each_rule_says_both_settings_and_the_nearest_values_that_work(
    ranks: int, degrees: dict[str, Any], faults: list[str]
) -> None:
    assert said(ranks, **degrees) == faults


def with_capacity(capacity: Capacity) -> ModelConfig:
    return with_layers(replace(SPARSE, mlp=replace(EXPERTS, capacity=capacity)))


def test_c10_a_dispatcher_does_what_the_table_of_limits_says_and_nothing_else() -> None:
    padded, dropping = with_capacity(Capacity(factor=1.5, pad=True)), with_capacity(Capacity(factor=1.5))
    for name in get_args(DispatcherName):
        refused = bool(said(1, padded, dispatcher=name))
        assert refused == ("pad" not in LIMITS[name])
        assert bool(said(1, dropping, dispatcher=name)) == ("capacity" not in LIMITS[name])
        assert bool(said(1, with_layers(SPARSE), dispatcher=name, expert_budget=1.5)) == ("budget" not in LIMITS[name])
    assert said(1, padded, dispatcher="flex") == [
        "parallel.dispatcher=flex: moves as many rows as are routed, and the pad of model.moe.capacity wants a fixed number. "
        "Works: alltoall."
    ]


def test_a_budget_of_ranks_stands_alone_and_needs_experts() -> None:
    assert said(1, with_capacity(Capacity(factor=1.5)), expert_budget=1.25) == [
        "parallel.expert_budget=1.25: drops rows of a rank, and model.moe.capacity drops rows of an expert already. "
        "Works: none, or model.moe.capacity=none."
    ]
    assert said(1, with_layers(DENSE), expert_budget=1.25) == [
        "parallel.expert_budget=1.25: is for ranks of experts, and this model has none. Works: none."
    ]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_capacity_is_a_positive_number(factor: float) -> None:
    (fault,) = check_model(with_capacity(Capacity(factor=factor)))
    assert fault.setting == "model.moe.capacity" and "positive" in fault.rule


def test_key_value_heads_that_tp_or_the_exchange_of_heads_would_cut_are_refused() -> None:
    grouped = with_layers(Layer(attention=GQA(heads=12, kv_heads=4, head_dim=2), mlp=Dense(ffn=23)))
    (fault,) = said(3, grouped, tp=3)
    assert fault == "parallel.tp=3: must divide model.attention.kv_heads=4 or be a multiple of it. Works: 2 or 4."
    (fault,) = said(12, grouped, tp=2, cp=6, cp_alltoall=3)
    assert fault == (
        "parallel.cp_alltoall=3: must divide model.attention.kv_heads=4, of which a rank of parallel.tp=2 holds 2, "
        "or be a multiple of it. Works: 2 or 6."
    )
    assert said(12, grouped, tp=12) == [], "three neighbours hold the same key/value head"


def test_a_piece_of_the_vocabulary_and_of_every_mlp_is_left_for_each_rank_of_tp() -> None:
    wide = Layer(attention=GQA(heads=512, kv_heads=512, head_dim=2), mlp=Dense(ffn=300))
    shared = Layer(attention=wide.attention, mlp=replace(EXPERTS, expert_ffn=100))
    assert said(512, with_layers(wide, shared), tp=512) == [
        "parallel.tp=512: must be at most model.vocab=257. Works: 128.",
        "parallel.tp=512: must be at most model.dense.ffn=300. Works: 128.",
        "parallel.tp=512: must be at most model.moe.shared.count=2 times model.moe.expert_ffn=100. Works: 128.",
    ]


def test_axes_of_experts_are_refused_for_a_model_without_any() -> None:
    assert said(6, with_layers(DENSE), ep=2, etp=3) == [
        "parallel.ep=2: spreads experts, and this model has none. Works: 1.",
        "parallel.etp=3: cuts experts, and this model has none. Works: 1.",
    ]


def test_both_foldings_all_degrees_and_the_layout_are_said_at_once() -> None:
    found = said(7, tp=5, cp=3, cp_alltoall=2, ep=5, etp=6, pp=2, layout="Et|tL", sharding="fsdp", schedule="combined")
    keys = [fault.split("=")[0] for fault in found]
    assert Counter(keys) == {
        "parallel.tp": 3,
        "parallel.cp_alltoall": 1,
        "parallel.ep": 1,
        "parallel.etp": 1,
        "--ranks": 2,
        "parallel.schedule": 1,
        "parallel.layout": 1,
    }


def test_a_mistyped_degree_is_answered_at_once() -> None:
    found = said(10**15 + 37, tp=10**12, ep=10**12, etp=10**12, cp=10**12 + 39, cp_alltoall=10**9, pp=10**4)
    assert {fault.split("=")[0] for fault in found} == {
        "parallel.tp",
        "parallel.cp_alltoall",
        "parallel.ep",
        "parallel.etp",
        "--ranks",
    }


def test_what_is_odd_but_can_run_is_not_refused() -> None:
    assert said(1, vpp=3) == [], "virtual stages on a single pipeline rank"
    assert said(16, pp=16) == [], "more pipeline ranks than layers: some are empty"
    assert said(2, pp=2, layout="E|||ttt|m|L") == [], "empty stages, and loss and prediction apart"
    assert said(5, etp=5) == [], "one column of every expert on each rank"
    assert said(2, ep=1, schedule="combined") == [], "nothing to hide"
    assert said(6, ep=6, tp=2) == [], "experts over more ranks than dp has"


# ------------------------------------------------------------------------------------------------- drawn mappings


def run_of(model: ModelConfig, parallel: ParallelConfig, ranks: int, global_batch: int, microbatch: int) -> RunConfig:
    return RunConfig(
        family="odd",
        size="tiny",
        hardware="cpu",
        ranks=ranks,
        model=model,
        parallel=parallel,
        train=TrainConfig(steps=30, sequence_tokens=64, global_batch=global_batch, microbatch=microbatch),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
        data=DataConfig(),
        precision=PrecisionConfig(),
        checkpoint=CheckpointConfig(),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """One to five layers of different widths, some of them with experts, maybe modules that predict ahead, maybe one matrix."""
    layers = tuple(draw(layer()) for _ in range(draw(st.integers(1, 5))))
    ahead = draw(st.sampled_from((0, 0, 1, 2)))
    return replace(
        MODEL,
        vocab=draw(st.sampled_from((257, 300))),
        layers=layers,
        predict_ahead=MultiToken(depth=ahead, loss_weight=0.3) if ahead else None,
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def layer(draw: st.DrawFn) -> Layer:
    heads = draw(st.sampled_from((2, 4, 6, 12)))
    if draw(st.booleans()):
        attention: GQA | MLA = GQA(heads=heads, kv_heads=draw(divisors(heads, most=heads)), head_dim=2)
    else:
        query_rank = draw(st.sampled_from((None, 3)))
        attention = MLA(heads=heads, query_rank=query_rank, latent_rank=5, nope_dim=4, rope_dim=2, value_dim=3, latent_norm=NORM)  # fmt: skip
    if not draw(st.integers(0, 3)):
        return Layer(attention=attention, mlp=Dense(ffn=draw(st.sampled_from((1, 5, 23)))))
    shared = draw(st.sampled_from((None, SharedExperts(count=1), SharedExperts(count=3))))
    experts, ffn = draw(st.sampled_from((4, 6, 12))), draw(st.sampled_from((2, 5)))
    capacity = draw(st.sampled_from((None, None, None, Capacity(factor=1.5), Capacity(factor=1.5, pad=True))))
    moe = replace(EXPERTS, experts=experts, expert_ffn=ffn, shared=shared, capacity=capacity)
    return Layer(attention=attention, mlp=moe)


@st.composite
def layouts(draw: st.DrawFn, model: ModelConfig) -> str:
    """Any number of cuts between any of a model's parts, so that a stage may hold all or nothing."""
    ahead = model.predict_ahead.depth if model.predict_ahead else 0
    letters = list("t" * len(model.layers) + "m" * ahead)
    for _ in range(draw(st.integers(0, 6))):
        letters.insert(draw(st.integers(0, len(letters))), "|")
    return "E" + "".join(letters) + "L"


DEGREE = st.sampled_from((1, 1, 1, 2, 2, 3, 4, 6))


@st.composite
def any_run(draw: st.DrawFn) -> RunConfig:
    """Settings that know nothing of each other."""
    model = draw(models())
    parallel = ParallelConfig(
        tp=draw(DEGREE),
        cp=draw(DEGREE),
        pp=draw(DEGREE),
        ep=draw(DEGREE),
        etp=draw(DEGREE),
        vpp=draw(st.sampled_from((1, 1, 2, 3))),
        cp_alltoall=draw(DEGREE),
        layout=draw(st.one_of(st.none(), layouts(model), st.sampled_from(("EtL", "E(t|)*2", "tE|L", "")))),
        schedule=draw(st.sampled_from(("gpipe", "1f1b", "zero_bubble", "combined"))),
        dispatcher=draw(st.sampled_from(get_args(DispatcherName))),
        ep_per_node=draw(st.sampled_from((1, 1, 1, 2, 3))),
        expert_budget=draw(st.sampled_from((None, None, None, 1.5, 0.0))),
        sharding=draw(st.sampled_from(("zero1", "fsdp"))),
        fsdp_replicas=draw(st.sampled_from((1, 1, 2, 3))),
    )
    ranks = draw(st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 16)))
    return run_of(model, parallel, ranks, draw(st.integers(0, 24)), draw(st.integers(0, 3)))


@st.composite
def fitting_run(draw: st.DrawFn) -> RunConfig:
    """A run of at most 24 ranks that fits by how it is made."""
    model = draw(models())
    layers = [layer for _, layer in model.all_layers()]
    tp = draw(divisors(gcd(*(layer.attention.heads for layer in layers)), most=4))
    kv = [layer.attention.kv_heads for layer in layers if isinstance(layer.attention, GQA)]
    narrow = [layer.mlp.ffn for layer in layers if isinstance(layer.mlp, Dense)]
    if any(n % tp and tp % n for n in kv) or tp > min(narrow, default=tp):
        tp = 1
    left = gcd(*(layer.attention.heads // tp for layer in layers))
    trading = draw(divisors(left, most=3))
    if any(max(1, n // tp) % trading and trading % max(1, n // tp) for n in kv):
        trading = 1
    moes = [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]
    ep = draw(divisors(gcd(*(moe.experts for moe in moes)), most=4)) if moes else 1
    etp = draw(st.integers(1, min(moe.expert_ffn for moe in moes))) if moes else 1
    cp, pp, vpp = (
        trading * draw(st.sampled_from((1, 1, 2))),
        draw(st.sampled_from((1, 1, 2, 3))),
        draw(st.integers(1, 3)),
    )
    smallest = lcm(tp * cp * pp, etp * ep * pp)
    if smallest > 24:
        cp, etp, pp, trading = 1, 1, 1, 1
        smallest = lcm(tp, ep)
    ranks = smallest * draw(st.sampled_from((1, 1, 2)))
    dp = ranks // (tp * cp * pp)
    sharding: Any = draw(st.sampled_from(("zero1", "fsdp")))
    parallel = ParallelConfig(
        tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, cp_alltoall=trading,
        schedule=draw(st.sampled_from(("gpipe", "1f1b", *(("zero_bubble", "combined") if sharding == "zero1" else ())))),
        sharding=sharding,
        fsdp_replicas=draw(divisors(dp, most=dp)) if sharding == "fsdp" else 1,
    )  # fmt: skip
    microbatch = draw(st.integers(1, 3))
    return run_of(model, parallel, ranks, microbatch * dp * draw(st.integers(1, 4)), microbatch)


def divisors(number: int, *, most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, most + 1) if number % n == 0])


def alternatives(fault: Fault) -> list[dict[str, str]]:
    """Every way out that a fault names, as settings."""
    found = []
    for part in re.sub(r", which [^,]*", "", fault.works).split(", or "):
        if named := re.fullmatch(r"(.*) for (parallel\.pp)=(\d+)", part):
            found.append({fault.setting: named[1], named[2]: named[3]})
            continue
        key, sign, values = part.partition("=")
        key, values = (key, values) if sign else (fault.setting, part)
        values = re.sub(r" or (more|less|fewer)$", "", values).replace(" to ", " or ")
        found += [{key: value} for value in values.split(" or ")]
    return found


def changed(run: RunConfig, values: dict[str, str]) -> RunConfig:
    if "--ranks" in values:
        return replace(run, ranks=int(values["--ranks"]))
    run, wrong = override(run, [Assignment(key=key, text=text) for key, text in values.items()])
    assert not wrong, wrong
    return run


@settings(max_examples=80, deadline=None, derandomize=True)
@given(any_run())
def test_whatever_is_asked_is_refused_with_values_that_each_work_or_can_be_built(run: RunConfig) -> None:
    faults = check(run)
    for fault in faults:
        ways = alternatives(fault)
        assert ways, fault
        for way in ways:
            left = [other for other in check(changed(run, way)) if other.setting == fault.setting]
            if (
                fault.rule == "must be positive"
            ):  # the smallest positive number may break what could not be asked before
                left = [other for other in left if other.rule == fault.rule]
            assert not left, f"{fault} with {way}: {left[0]}"
    if not faults:
        build_every_rank(run)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(fitting_run())
def test_a_mapping_that_fits_by_construction_has_no_fault_and_can_be_built(run: RunConfig) -> None:
    assert check(run) == ()
    build_every_rank(run)


def build_every_rank(run: RunConfig) -> None:
    """Build all ranks' modules; their boxes must hold every element once, and in as many copies as they say."""
    layout = layout_of(run.model, run.parallel)
    stages = layout.embedding_stages(run.model.tied_embeddings)
    world = plan_world(
        fold(run.parallel, run.ranks),
        heads=run.parallel.cp_alltoall,
        embedding_stages=stages,
        fsdp_replicas=run.parallel.fsdp_replicas if run.parallel.sharding == "fsdp" else None,
    )
    held: dict[str, Counter[Any]] = {}
    shapes, said = {}, {}
    for rank in range(run.ranks):
        groups = world.groups(rank)
        stage = build_model(run.model, groups=groups, parallel=run.parallel, device="meta")
        for name, entry in declared(stage).items():
            held.setdefault(name, Counter())[entry.spec.box] += 1
            shapes[name] = entry.spec.shape
            said[name, entry.spec.box] = replicas(entry.spec, groups).size
    alone = declared(build_model(run.model, device="meta"))
    assert held.keys() == alone.keys()
    for name, boxes in held.items():
        assert tiling_fault(whole(shapes[name]), list(boxes)) is None, name
        for box, copies in boxes.items():
            assert said[name, box] == copies or not box.elements, f"{name} {box}: {copies} copies"
    check_the_rest(run, layout.virtual)


def check_the_rest(run: RunConfig, virtual: int) -> None:
    """What the modules only find out when they run: heads to trade, and the schedule."""
    parallel, train = run.parallel, run.train
    for _, layer in run.model.all_layers():
        heads = layer.attention.heads
        kv_heads = layer.attention.kv_heads if isinstance(layer.attention, GQA) else heads
        check_heads(heads // parallel.tp, max(1, kv_heads // parallel.tp), parallel.cp_alltoall)
    dp = run.ranks // (parallel.tp * parallel.cp * parallel.pp)
    microbatches, left_over = divmod(train.global_batch, train.microbatch * dp)
    assert microbatches >= 1 and not left_over
    made = make_schedule(parallel.schedule, stages=parallel.pp, virtual=virtual, microbatches=microbatches)
    assert schedule_faults(made) == ()


def test_any_number_of_microbatches_runs_under_every_schedule() -> None:
    for name in ("gpipe", "1f1b", "zero_bubble", "combined"):
        for stages in (1, 2, 3, 5):
            for virtual in (1, 2, 3):
                for microbatches in (1, 2, 3, 4, 5, 7, 11):
                    made = make_schedule(name, stages=stages, virtual=virtual, microbatches=microbatches)  # type: ignore[arg-type]
                    assert schedule_faults(made) == (), (name, stages, virtual, microbatches)
