"""Training with activations made again is the same training, to the last bit, under every kind of mapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from core.config.architecture import (
    Capacity,
    ExpertBias,
    ModelConfig,
    MoE,
    QuantileBias,
    SharedExperts,
    Sinkhorn,
    SquaredReLU,
)
from core.config.mapping import PACKAGES, DispatcherName, ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.moe.replay import RouterReplay, moe_layers
from core.moe.router import Router as RouterModule
from core.optim.make import make_optimizer
from core.parallel.groups import groups_for, one_rank
from core.parallel.meter import Meter
from core.state.inventory import initialise
from core.training.evaluate import validation_loss
from core.training.replay import Recording, replayed
from core.training.step import StepResult, train_step
from core.transformer.stage import Stage, build_model
from tests.core.moe.kernel_package import installed
from tests.core.tiny import GLOBAL_LOSS, PLAIN, Case, Trained, deepseek, microbatches, mixtral, train, train_all
from tests.core.training.mappings import dropping, label, wide_deepseek, wide_mixtral, wide_qwen3
from tests.ranks import Ranks

Names = tuple[RecomputeName, ...]
PARTS: Names = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts")
ALONE: tuple[Names, ...] = (*((name,) for name in PARTS), ("moe",), ("full",))
SEVERAL: tuple[Names, ...] = (PARTS, ("layernorm", "mla_up_proj"), ("layernorm", "mlp", "moe", "shared_experts"))
# What makes the most again, by regions and by discarded outputs.
MOST: tuple[Names, ...] = (PARTS, ("moe", "layernorm"), ("full",))


def with_experts(change: dict[str, object], router: dict[str, object] | None = None) -> ModelConfig:
    """The deepseek model with other experts."""
    model = deepseek()
    dense, layer = model.layers
    assert isinstance(layer.mlp, MoE)
    moe = replace(layer.mlp, router=replace(layer.mlp.router, **(router or {})), **change)
    return replace(model, layers=(dense, replace(layer, mlp=moe)))


MODELS = {
    "mixtral": mixtral(),
    "qwen3": wide_qwen3(),
    "deepseek": deepseek(),
    "no query latent": replace(
        deepseek(),
        layers=tuple(replace(x, attention=replace(x.attention, query_rank=None)) for x in deepseek().layers),
    ),
    "dropping": dropping(wide_mixtral(), Capacity(factor=0.8)),
    "padded": dropping(deepseek(), Capacity(factor=1.0, drop="position", pad=True)),
    "latent": with_experts({"latent": 6}),
    "gated shared": with_experts({"shared": SharedExperts(count=1, gated=True)}),
    "biases": with_experts({"bias": True, "activation": SquaredReLU()}),
    "jitter": with_experts({}, {"jitter": 0.3, "balance": (ExpertBias(rate=0.05), GLOBAL_LOSS)}),
    "sinkhorn": with_experts(
        {}, {"selection": Sinkhorn(), "score": "softmax", "normalise": False, "groups": None, "balance": (GLOBAL_LOSS,)}
    ),
    "quantiles": with_experts({}, {"balance": (QuantileBias(ema=0.5),)}),
}


def with_names(case: Case, names: Names) -> Case:
    return replace(case, memory=MemoryConfig(recompute=names))


def untimed(result: StepResult) -> StepResult:
    return replace(result, seconds={})


def same(found: Trained, plain: Trained) -> None:
    """Losses, norms, counts and what is told of experts, and every parameter."""
    assert list(map(untimed, found.results)) == list(map(untimed, plain.results))
    for (name, *_, data), (_, *_, expected) in zip(found.pieces, plain.pieces, strict=True):
        assert torch.equal(data, expected), name


@cache
def plain_run(name: str) -> Trained:
    return train(Case(model=MODELS[name], microbatch=4, steps=2))


@pytest.mark.parametrize("names", [*ALONE, *SEVERAL], ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_are_bitwise_the_same_for_every_kind_of_layer(name: str, names: Names) -> None:
    same(train(with_names(Case(model=MODELS[name], microbatch=4, steps=2), names)), plain_run(name))


MAPPINGS = [
    (2, "deepseek", ParallelConfig(tp=2)),
    (2, "qwen3", ParallelConfig(tp=2, ep=2)),
    (2, "deepseek", ParallelConfig(cp=2)),
    (2, "deepseek", ParallelConfig(cp=2, cp_alltoall=2)),
    (2, "dropping", ParallelConfig(ep=2)),
    (2, "deepseek", ParallelConfig(ep=2, dispatcher="flex")),
    (2, "mixtral", ParallelConfig(ep=2, dispatcher="allgather")),
    (2, "mixtral", ParallelConfig(etp=2)),
    (2, "deepseek", ParallelConfig(pp=2, vpp=2)),
    (2, "deepseek", ParallelConfig(pp=2, vpp=2, schedule="zero_bubble")),
    (2, "deepseek", ParallelConfig(sharding="fsdp", ep=2)),
    (4, "mixtral", ParallelConfig(tp=2, ep=4, dispatcher="flex", ep_per_node=2)),
    (4, "deepseek", ParallelConfig(tp=2, ep=2, pp=2, vpp=2, schedule="zero_bubble")),
]
WIDE = {
    "deepseek": wide_deepseek(),
    "qwen3": wide_qwen3(),
    "mixtral": wide_mixtral(),
    "dropping": dropping(wide_mixtral(), Capacity(factor=0.8)),
}


def on_ranks(ranks: Ranks, world: int, case: Case, ways: tuple[Names, ...]) -> None:
    """One run after the other, all bitwise the first one on every rank."""
    cases = [case, *(with_names(case, names) for names in ways)]
    for plain, *others in ranks.run(train_all, world, cases, timeout_seconds=60.0):
        for found in others:
            same(found, plain)


@pytest.mark.parametrize(("world", "name", "parallel"), MAPPINGS, ids=[f"{n} {label(p)}" for _, n, p in MAPPINGS])
def test_a_step_is_bitwise_the_same_under_a_mapping(
    ranks: Ranks, world: int, name: str, parallel: ParallelConfig
) -> None:
    replicas = world // (parallel.tp * parallel.cp * parallel.pp)
    case = Case(model=WIDE[name], parallel=parallel, microbatch=4 // replicas, steps=1)
    on_ranks(ranks, world, case, MOST)


def train_by_package(rank: int, world: int, cases: Sequence[Case]) -> list[Trained]:
    with installed():
        return train_all(rank, world, cases)


@pytest.mark.parametrize("dispatcher", PACKAGES)
def test_a_package_that_dispatches_does_so_again(ranks: Ranks, dispatcher: DispatcherName) -> None:
    """On stand-ins of the packages' interfaces."""
    case = Case(model=wide_mixtral(), parallel=ParallelConfig(ep=2, dispatcher=dispatcher), microbatch=2, steps=1)
    ways = [case, *(with_names(case, names) for names in (("moe",), ("full",), ("layernorm",)))]
    for plain, *others in ranks.run(train_by_package, 2, ways, timeout_seconds=60.0):
        for found in others:
            same(found, plain)


def test_a_combined_schedule_computes_parts_again_beside_another_forward(ranks: Ranks) -> None:
    parallel = ParallelConfig(pp=2, vpp=2, ep=2, etp=1, schedule="combined")
    on_ranks(ranks, 4, Case(model=wide_deepseek(), parallel=parallel, microbatch=2, steps=1), (PARTS,))


# ------------------------------------------------------------------------------------------------ how often what runs


def built(config: ModelConfig, names: Names) -> tuple[Stage, list[str]]:
    """A model whose routers and norms note that they run."""
    model = build_model(config, memory=MemoryConfig(recompute=names), dtype=torch.float64)
    initialise(model, 7)
    asked: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, RouterModule) or name.endswith(("norm", "query_up", "experts", "shared")):
            module.register_forward_hook(lambda _m, _i, _o, name=name: asked.append(name))
    return model, asked


def step(model: Stage, *, recording: Recording | None = None, shift: int | None = None) -> StepResult:
    """One step; shift: tokens are told to go to experts that no router would choose."""
    batches = microbatches(0, microbatch=4)
    if shift is not None:
        batches = [replayed(batch, prescribed(model, batch.tokens.numel(), shift), model) for batch in batches]
    optimizer = make_optimizer(model, PLAIN, one_rank(), ParallelConfig())
    return train_step(model, optimizer, batches, rate=1.0, groups=one_rank(), recording=recording)


def prescribed(model: Stage, tokens: int, shift: int) -> RouterReplay:
    experts = {
        name: (torch.arange(tokens)[:, None] * 3 + torch.arange(moe.top_k) * 2 + number + shift) % moe.experts
        for number, (name, moe) in enumerate(moe_layers(model.config).items())
    }
    return RouterReplay(experts={name: ids.to(torch.int32) for name, ids in experts.items()})


def test_what_is_named_runs_once_more_for_each_microbatch_and_nothing_else() -> None:
    model, asked = built(deepseek(), ())
    step(model)
    plain = {name: asked.count(name) for name in set(asked)}
    assert plain["layers.1.mlp.router"] == 2
    for names, again in {
        ("layernorm",): ("attention_norm", "mlp_norm", "query_norm", "latent_norm"),
        ("mla_up_proj",): ("query_up",),
        ("moe",): ("router", "experts", "shared"),
        ("moe_act",): (),
        ("core_attn",): (),
    }.items():
        model, asked = built(deepseek(), names)
        step(model)
        found = {name: asked.count(name) for name in set(asked)}
        assert found == {name: n * (2 if name.endswith(again) else 1) for name, n in plain.items()}, names


@pytest.mark.parametrize("names", [PARTS, ("moe", "layernorm"), ("full",)], ids="+".join)
def test_an_evaluation_makes_nothing_again_and_gives_the_same_loss(names: Names) -> None:
    losses = []
    for these in ((), names):
        model, asked = built(deepseek(), these)
        losses.append(validation_loss(model, microbatches(1, microbatch=4), one_rank()))
        assert max(asked.count(name) for name in asked) == 2, "two microbatches"
    assert losses[0] == losses[1]


@pytest.mark.parametrize("names", [("moe",), ("full",)], ids="+".join)
@pytest.mark.parametrize("config", [deepseek(), MODELS["dropping"]], ids=["deepseek", "dropping"])
def test_recorded_choices_counts_and_the_bias_are_those_of_one_forward(config: ModelConfig, names: Names) -> None:
    found = []
    for these in ((), names):
        model, _ = built(config, these)
        recording = Recording()
        result = step(model, recording=recording)
        tokens = sum(batch.tokens.numel() for batch in microbatches(0, microbatch=4))
        for layer, moe in moe_layers(config).items():
            assert sum(result.expert_counts[layer]) <= tokens * moe.top_k
            if moe.capacity is None:
                assert sum(result.expert_counts[layer]) == tokens * moe.top_k
        biases = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("bias")]
        found.append((untimed(result), recording.chosen, biases))
    (plain, chosen, biases), (again, also, moved) = found
    assert plain == again and chosen.keys() == also.keys()
    assert all(torch.equal(ids, also[spot]) for spot, ids in chosen.items())
    assert all(torch.equal(one, other) for one, other in zip(biases, moved, strict=True))


@pytest.mark.parametrize("names", [("moe",), ("full",), ("layernorm",)], ids="+".join)
def test_prescribed_experts_are_those_of_the_second_run_too(names: Names) -> None:
    models = [built(deepseek(), these)[0] for these in ((), names)]
    results = [untimed(step(model, shift=5)) for model in models]
    assert results[0] == results[1]
    other = built(deepseek(), names)[0]
    assert untimed(step(other)) != results[0]
    for (name, one), (_, two) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(one, two), name


# ------------------------------------------------------------------------------------------------ what is sent again


def sent(rank: int, world: int, parallel: ParallelConfig, ways: Sequence[Names]) -> list[int]:
    """Bytes over the axis of tp or ep in one step, by what is made again."""
    found = []
    for names in ways:
        meter = Meter()
        groups = groups_for(parallel, meter=meter)
        memory = MemoryConfig(recompute=names)
        model = build_model(mixtral(()), groups=groups, parallel=parallel, memory=memory, dtype=torch.float64)
        initialise(model, 7)
        optimizer = make_optimizer(model, PLAIN, groups, parallel)
        batches = microbatches(0, groups.dp.position, groups.dp.size, 4, groups)
        train_step(model, optimizer, batches, rate=1.0, groups=groups)
        optimizer.wait_all()
        found.append(Meter(sent_bytes=meter.sent_bytes).by_axis()["ep" if parallel.ep > 1 else "tp"])
    return found


@pytest.mark.parametrize("names", [("moe",), ("full",)], ids="+".join)
def test_experts_made_again_receive_their_rows_once_more_and_send_none_home(ranks: Ranks, names: Names) -> None:
    """Rows of H numbers and a weight go out, rows of H come back, and the same backward; 8 E / 2 bytes tell how many."""
    hidden, layers = 16, 2
    by_rank = ranks.run(sent, 2, ParallelConfig(ep=2), [(), names], timeout_seconds=60.0)
    plain, again = (sum(column) for column in zip(*by_rank, strict=True))
    told = 2 * layers * 8 * 4 // 2
    rows, left = divmod(plain - told, 2 * 8 * (2 * hidden + 1))
    assert left == 0 and rows > 0
    assert again - plain == rows * 8 * (hidden + 1) + told
