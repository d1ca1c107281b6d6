"""Every kind of balance and of selection trains one model under every mapping, split and recomputation (known faults, group b)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from core.config.architecture import (
    AuxLoss,
    Balance,
    Dense,
    ExpertBias,
    ExpertChoice,
    Layer,
    ModelConfig,
    MoE,
    QuantileBias,
    Router,
    Score,
    Selection,
    SharedExperts,
    Sinkhorn,
    TopK,
    ZLoss,
)
from core.config.mapping import ParallelConfig
from core.optim.make import make_optimizer
from core.parallel.groups import groups_for, one_rank
from core.pipeline.layout import layout_of
from core.state.inventory import initialise, inventory
from core.training.evaluate import generate, validation_loss
from core.training.step import train_step
from core.transformer.block import Block
from core.transformer.stage import Stage, build_model
from tests.core.tiny import (
    ATTENTION,
    GLOBAL_LOSS,
    MICROBATCH_LOSS,
    SEQUENCE_LOSS,
    Z_LOSS,
    Case,
    Trained,
    microbatches,
    mixtral,
    train,
)
from tests.core.training.test_step import check_equal
from tests.ranks import Ranks

EXPERTS, TOP_K = 8, 2
BIAS = ExpertBias(rate=0.05)
PLAIN = TopK()


def model_of(
    *balance: Balance, score: Score = "softmax", selection: Selection = PLAIN, top_k: int = TOP_K
) -> ModelConfig:
    """A dense layer and two MoE layers of 8 experts."""
    router = Router(score=score, normalise=False, scale=1.5, balance=balance, selection=selection)
    moe = MoE(experts=EXPERTS, top_k=top_k, expert_ffn=6, router=router, shared=SharedExperts(count=1))
    layers = (Layer(attention=ATTENTION, mlp=Dense(ffn=12)), *(Layer(attention=ATTENTION, mlp=moe),) * 2)
    return replace(mixtral(), layers=layers)


MODELS = {
    "aux of two scopes, z and bias": model_of(MICROBATCH_LOSS, SEQUENCE_LOSS, Z_LOSS, BIAS, score="sigmoid"),
    "quantile": model_of(QuantileBias(ema=0.25), Z_LOSS),
    "sinkhorn": model_of(Z_LOSS, selection=Sinkhorn(tolerance=1e-4)),
    "sinkhorn, one expert": model_of(score="sigmoid", selection=Sinkhorn(tolerance=1e-2), top_k=1),
    "expert choice": model_of(Z_LOSS, selection=ExpertChoice()),
}
# Only a balance over the global batch sees replicas' microbatches as one.
GLOBAL = model_of(GLOBAL_LOSS, MICROBATCH_LOSS, BIAS, score="sigmoid")
MAPPINGS = {
    2: [ParallelConfig(cp=2, etp=2), ParallelConfig(ep=2, dispatcher="allgather")],
    4: [
        ParallelConfig(tp=2, cp=2, ep=4, dispatcher="alltoall"),
        ParallelConfig(tp=2, pp=2),
        ParallelConfig(ep=4, dispatcher="alltoall"),
    ],
}


def cases_of(world: int) -> list[Case]:
    """Two windows at a time, wherever they lie: one to four microbatches a rank."""
    return [
        Case(model=model, parallel=parallel, microbatch=2, steps=2)
        for parallel in MAPPINGS[world]
        for model in MODELS.values()
    ]


@cache
def on_one_rank(model: ModelConfig) -> Trained:
    """The truth: four microbatches on one rank."""
    return train(Case(model=model, microbatch=2, steps=2))


def repeating(block: Block) -> Callable[..., object]:
    """The block's forward, of which nothing is kept: the backward runs it again."""
    forward = block.forward
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def train_recomputing(case: Case) -> Trained:
    """`train` with every layer recomputed in the backward, and an evaluation before every step."""
    layout = layout_of(case.model, case.parallel)
    groups = groups_for(case.parallel, embedding_stages=layout.embedding_stages(case.model.tied_embeddings))
    model = build_model(case.model, groups=groups, parallel=case.parallel, dtype=case.dtype)
    initialise(model, 7)
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = repeating(module)  # type: ignore[method-assign, assignment]
    optimizer = make_optimizer(model, case.optimizer, groups, case.parallel)
    results = []
    for step in range(case.steps):
        batches = microbatches(step, groups.dp.position, groups.dp.size, case.microbatch, groups)
        validation_loss(model, batches, groups)
        results.append(train_step(model, optimizer, batches, rate=case.optimizer.learning_rate, groups=groups))
    optimizer.wait_all()
    pieces = [(p.name, p.shape, p.box, p.data) for p in inventory(model, groups).values()]
    return Trained(results=results, pieces=pieces)


def train_cases(rank: int, world: int, cases: Sequence[Case], recomputing: bool) -> list[Trained]:
    """Each case on this rank."""
    return [(train_recomputing if recomputing else train)(case) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
def test_b1_every_balance_and_selection_trains_the_model_of_one_rank(ranks: Ranks, world: int) -> None:
    cases = cases_of(world)
    found = ranks.run(train_cases, world, cases, False, timeout_seconds=60.0)
    for i, case in enumerate(cases):
        check_equal([rank[i] for rank in found], on_one_rank(case.model))


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2, ep=2), ParallelConfig(ep=2), ParallelConfig(pp=2)])
def test_b5_b14_recomputation_and_evaluation_in_between_change_nothing(ranks: Ranks, parallel: ParallelConfig) -> None:
    cases = [Case(model=model, parallel=parallel, microbatch=2, steps=2) for model in MODELS.values()]
    found = ranks.run(train_cases, 2, cases, True, timeout_seconds=60.0)
    for i, case in enumerate(cases):
        check_equal([rank[i] for rank in found], on_one_rank(case.model))


def test_b3_b5_a_repeated_forward_sees_the_load_of_the_global_batch_that_the_first_one_saw() -> None:
    check_equal([train_recomputing(Case(model=GLOBAL, microbatch=2, steps=2))], on_one_rank(GLOBAL))


def test_b14_full_recomputation_and_four_microbatches_move_every_bias_once_by_the_counts_of_all_tokens() -> None:
    """And an evaluation and sampling between the microbatches' steps add nothing."""
    config = model_of(BIAS, SEQUENCE_LOSS, score="sigmoid")
    model = fresh(config)
    for block in model.modules():
        if isinstance(block, Block):
            block.forward = repeating(block)  # type: ignore[method-assign, assignment]
    optimizer = make_optimizer(model, Case(model=config).optimizer, one_rank(), ParallelConfig())
    batches = microbatches(0, microbatch=2)
    assert len(batches) == 4
    validation_loss(model, batches, one_rank())
    generate(model, [1, 2, 3], tokens=2, end_of_text=-1)
    assert all(not bias.any() for bias in biases(model).values())
    result = train_step(model, optimizer, batches, rate=0.1, groups=one_rank())
    choices = sum(len(batch.tokens) for batch in batches) * TOP_K
    for layer, bias in biases(model).items():
        counts = torch.tensor(result.expert_counts[layer])
        assert int(counts.sum()) == choices
        assert torch.equal(bias, 0.05 * torch.sign(choices / EXPERTS - counts.float()))
    before = {layer: bias.clone() for layer, bias in biases(model).items()}
    validation_loss(model, batches, one_rank())
    assert all(torch.equal(bias, before[layer]) for layer, bias in biases(model).items())


def test_b14_thresholds_move_once_per_step_to_the_mean_over_microbatches() -> None:
    """From zero, without memory: minus the mean over microbatches of each one's quantiles, less its own mean."""
    model = fresh(model_of(QuantileBias(ema=0.0)))
    batches = microbatches(0, microbatch=2)
    logits = router_logits(model, batches)
    optimizer = make_optimizer(model, Case(model=model.config).optimizer, one_rank(), ParallelConfig())
    train_step(model, optimizer, batches, rate=0.0, groups=one_rank())
    for layer, bias in biases(model).items():
        assert len(logits[layer]) == 4
        q = torch.stack([plain_quantiles(of_batch) for of_batch in logits[layer]]).mean(0)
        torch.testing.assert_close(bias, (q.mean() - q).float(), rtol=1e-5, atol=1e-6)
        assert float(bias.abs().max()) > 0.01 and abs(float(bias.sum())) < 1e-5


def test_b17_evaluation_of_one_token_works_for_every_balance_and_computes_no_loss() -> None:
    for config in MODELS.values():
        model = fresh(config)
        made = model.run(0, None, model.batch(torch.tensor([3]), torch.tensor([4])), purpose="loss")
        assert made.balance == {} and made.tokens is not None and bool(made.tokens.isfinite())
        assert all(routing.balance is None for routing in made.routings.values())
        assert all(int(routing.counts_E.sum()) in (1, TOP_K) for routing in made.routings.values())
        assert len(generate(model, [1], tokens=2, end_of_text=-1)) >= 2


def test_b18_layers_with_different_numbers_of_experts_each_have_their_own_thresholds(ranks: Ranks) -> None:
    base = model_of(QuantileBias(ema=0.0), Z_LOSS)
    few = base.layers[1]
    assert isinstance(few.mlp, MoE)
    config = replace(base, layers=(few, replace(few, mlp=replace(few.mlp, experts=12, top_k=3))))
    truth = train(Case(model=config, microbatch=2, steps=2))
    assert [len(counts) for counts in truth.results[0].expert_counts.values()] == [EXPERTS, 12]
    moved = {name: data for name, _, _, data in truth.pieces if name.endswith("router.bias")}
    assert len(moved) == 2 and all(float(bias.abs().max()) > 0 for bias in moved.values())
    case = Case(model=config, microbatch=2, steps=2, parallel=ParallelConfig(ep=2))
    check_equal([rank[0] for rank in ranks.run(train_cases, 2, [case], False)], truth)


def test_several_balances_in_one_router_each_add_their_own_loss() -> None:
    """Together what each is alone: losses are independent of one another."""
    parts: list[Balance] = [
        AuxLoss(scope="microbatch", coefficient=0.5),
        AuxLoss(scope="sequence", coefficient=0.3),
        AuxLoss(scope="global_batch", coefficient=0.4),
        ZLoss(coefficient=0.05),
    ]
    batches, found = microbatches(0, microbatch=4), {}
    for balance in [*([part] for part in parts), [*parts, BIAS]]:
        config = model_of(*balance, score="sigmoid")
        model = fresh(config)
        optimizer = make_optimizer(model, Case(model=config).optimizer, one_rank(), ParallelConfig())
        found[len(balance), str(balance[0])] = train_step(
            model, optimizer, batches, rate=0.0, groups=one_rank()
        ).balance
    *alone, together = found.values()
    assert len(together) == 8
    assert together == pytest.approx({name: value for one in alone for name, value in one.items()}, rel=1e-12)


def fresh(config: ModelConfig) -> Stage:
    model = build_model(config, dtype=torch.float64)
    initialise(model, 7)
    return model


def biases(model: Stage) -> dict[str, torch.Tensor]:
    """By layer."""
    found = {name: p.data for name, p in inventory(model, one_rank()).items() if name.endswith("router.bias")}
    assert len(found) == 2
    return {name.removesuffix(".mlp.router.bias"): bias for name, bias in found.items()}


@torch.no_grad()
def router_logits(model: Stage, batches: Sequence) -> dict[str, list[torch.Tensor]]:
    """By layer and microbatch, from what the routers are given."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = []
    for number, block in model.layers.items():

        def note(module: torch.nn.Module, inputs: tuple, output: object, name: str = f"layers.{number}") -> None:
            found.setdefault(name, []).append(inputs[0] @ dict(module.named_parameters())["weight"].T)

        router = dict(block.named_modules()).get("mlp.router")
        if router is not None:
            handles.append(router.register_forward_hook(note))
    for batch in batches:
        model.run(0, None, batch, purpose="hidden")
    for handle in handles:
        handle.remove()
    return found


def plain_quantiles(logits: torch.Tensor) -> torch.Tensor:
    """(T K / E + 1)-th largest of logit less the token's (K + 1)-th largest, by sorting."""
    above = logits - logits.sort(-1, descending=True).values[:, TOP_K : TOP_K + 1]
    return above.sort(0, descending=True).values[len(logits) * TOP_K // EXPERTS]
