"""Every recipe under every axis of a mapping: the losses of one rank, as far as arithmetic lets them be.

Scales of a whole tensor are measured over all ranks that hold parts of it (core/precision/reach.py), so that what a rank holds decides
nothing. What may still differ, and by how much:

- pp, and dp over equally many microbatches: nothing;
- ep without such scales: nothing. An expert's rows are padded for each rank that they come from, so that blocks along the rows never
  hold rows of two, and how rows lie is the same whoever sent them;
- ep that joins the microbatches of several replicas, with such scales: an expert's rows of all of them have one scale, where each
  microbatch had its own before. Losses move by what rounding itself takes from them;
- tp and cp: float32 sums have another order, and a last bit decides how a number is rounded now and then: up to a quarter of the number
  in E5M2. Under cp the blocks along the tokens hold other neighbours, too;
- stochastic rounding draws by the bits of a row: where tp holds a piece of the row, or one sum ends in another bit, it draws other noise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from core.config.architecture import GQA, Dense, Layer, ModelConfig, MoE, Router, SharedExperts
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.memory import MemoryConfig
from core.config.recipe import FP8_BLOCKWISE, MXFP8, NVFP4, RECIPES, InputGradient, Operand, Recipe, WeightGradient
from core.config.recipe_text import parse_recipe
from core.config.run import OptimizerConfig
from tests.core.tiny import SEQUENCE_LOSS, Z_LOSS, Case, Trained, assemble, mixtral, train, train_all
from tests.ranks import Ranks

ATTENTION = GQA(heads=4, kv_heads=4, head_dim=64)
EXPERTS = MoE(
    experts=4,
    top_k=2,
    expert_ffn=256,
    router=Router(score="softmax", normalise=True, balance=(SEQUENCE_LOSS, Z_LOSS)),
    shared=SharedExperts(count=1),
)
# Two ranks of tp cut every width into whole blocks of 128.
MODEL: ModelConfig = replace(
    mixtral(),
    hidden=128,
    init_std=0.05,
    layers=(Layer(attention=ATTENTION, mlp=Dense(ffn=256)), Layer(attention=ATTENTION, mlp=EXPERTS)),
)
# An update in proportion to the gradient: a rounding that differs moves a weight by no more than it moves the gradient.
SMOOTH = OptimizerConfig(learning_rate=0.02, beta1=0.9, beta2=0.95, eps=1.0, weight_decay=0.1, clip_norm=None)


def _nearest(recipe: Recipe) -> Recipe:
    """The same without stochastic rounding."""
    inputs, weights = recipe.input_gradient, recipe.weight_gradient
    assert inputs.gradient is not None and weights.gradient is not None
    return replace(
        recipe,
        input_gradient=InputGradient(gradient=replace(inputs.gradient, stochastic=False), weight=inputs.weight),
        weight_gradient=WeightGradient(gradient=replace(weights.gradient, stochastic=False), input=weights.input),
    )


ALL: dict[str, Recipe] = {**RECIPES, "nvfp4, to nearest": _nearest(NVFP4)}
DETERMINISTIC = [name for name in ALL if name != "nvfp4"]
# Without a scale of a whole tensor: nothing depends on who else has rows.
OF_ROWS = ("fp8_blockwise", "mxfp8")
# Tokens with two bits of mantissa for the forward, and three for the weight gradient where they come whole.
COARSE = replace(MXFP8, forward=replace(MXFP8.forward, input=Operand(element="e5m2", scaling="mx")))
SENT = {
    f"{name}, sent": replace(recipe, dispatch=True)
    for name, recipe in {"fp8_blockwise": FP8_BLOCKWISE, "mxfp8": MXFP8, "coarse": COARSE}.items()
}


def case(recipe: str, *, microbatch: int = 4, memory: MemoryConfig | None = None, **mapping: int | str) -> Case:
    return Case(
        model=MODEL,
        parallel=ParallelConfig(**mapping),  # type: ignore[arg-type]
        microbatch=microbatch,
        steps=2,
        optimizer=SMOOTH,
        dtype=torch.float32,
        recipe={**ALL, **SENT, "coarse": COARSE}[recipe],
        memory=memory or MemoryConfig(),
    )


@cache
def alone(recipe: str) -> Trained:
    """One rank, two microbatches a step."""
    return train(case(recipe))


def losses(trained: Trained) -> list[float]:
    return [result.loss for result in trained.results]


def check(found: Sequence[Trained], recipe: str, *, first: float, later: float) -> None:
    """The losses of the first step, which nothing has been updated for, and of later ones, relative."""
    for trained in found:
        for bound, got, truth in zip((first, later), losses(trained), losses(alone(recipe)), strict=True):
            assert abs(got / truth - 1) <= bound, (recipe, losses(trained), losses(alone(recipe)))


def on_two(ranks: Ranks, *cases: Case) -> list[list[Trained]]:
    """By case what each of two ranks knows."""
    found = ranks.run(train_all, 2, list(cases), timeout_seconds=120.0)
    return [[rank[i] for rank in found] for i in range(len(cases))]


@pytest.mark.parametrize("recipe", ALL)
def test_stages_and_replicas_change_no_bit_of_a_loss(ranks: Ranks, recipe: str) -> None:
    stages, replicas = on_two(ranks, case(recipe, pp=2), case(recipe))
    for found in (stages, replicas):
        assert all(losses(trained) == losses(alone(recipe)) for trained in found)
    for name, tensor in assemble([alone(recipe)]).items():
        assert torch.equal(assemble(stages)[name], tensor), name


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("recipe", OF_ROWS)
def test_experts_on_other_ranks_change_no_bit_where_every_row_has_scales_of_its_own(
    ranks: Ranks, recipe: str, dispatcher: DispatcherName
) -> None:
    (found,) = on_two(ranks, case(recipe, ep=2, dispatcher=dispatcher))
    assert all(losses(trained) == losses(alone(recipe)) for trained in found)


@pytest.mark.parametrize("recipe", SENT)
def test_tokens_that_travel_as_bytes_give_the_same_losses_wherever_their_experts_are(ranks: Ranks, recipe: str) -> None:
    """Those of tokens that travel as they are, too: what is rounded once more under powers of two stays as it is. Unless the weight
    gradient would have read them finer."""
    plain = losses(alone(recipe.removesuffix(", sent")))
    assert losses(alone(recipe))[0] == plain[0] and (losses(alone(recipe)) == plain) == (recipe != "coarse, sent")
    names: tuple[DispatcherName, ...] = ("alltoall", "allgather", "flex")
    for found in on_two(ranks, *(case(recipe, ep=2, dispatcher=name) for name in names)):
        assert all(losses(trained) == losses(alone(recipe)) for trained in found)


@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_experts_that_see_several_microbatches_at_once_change_losses_by_a_thousandth_at_most(
    ranks: Ranks, recipe: str
) -> None:
    mappings: list[dict[str, int]] = [{"ep": 2}] if recipe == "fp8_delayed" else [{"ep": 2}, {"etp": 2}]
    for found in on_two(ranks, *(case(recipe, **mapping) for mapping in mappings)):
        check(found, recipe, first=1e-3, later=1e-3 if recipe in RECIPES else 1e-2)


@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_parts_of_weights_change_losses_by_the_last_bits_of_sums_alone(ranks: Ranks, recipe: str) -> None:
    (found,) = on_two(ranks, case(recipe, tp=2))
    check(found, recipe, first=1e-6, later=1e-3)


@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_parts_of_sequences_change_losses_by_a_thousandth_at_most(ranks: Ranks, recipe: str) -> None:
    """With experts whole on each rank, and spread over the two, which then see the rows of one microbatch, as one rank does."""
    for found in on_two(ranks, case(recipe, cp=2), case(recipe, cp=2, ep=2)):
        check(found, recipe, first=1e-6, later=1e-3 if recipe in RECIPES else 1e-2)


def test_stochastic_rounding_of_other_bits_draws_other_noise_and_the_forward_stays_as_it_is(ranks: Ranks) -> None:
    """Losses then differ as those of two seeds do."""
    found = on_two(ranks, case("nvfp4", tp=2), case("nvfp4", cp=2), case("nvfp4", ep=2))
    for trained in found[:2]:
        check(trained, "nvfp4", first=1e-6, later=1e-2)
    check(found[2], "nvfp4", first=1e-3, later=1e-2)


@pytest.mark.parametrize("recipe", ALL)
def test_what_is_made_again_in_the_backward_changes_no_bit(recipe: str) -> None:
    again = train(case(recipe, memory=MemoryConfig(recompute=("moe", "mlp", "layernorm"))))
    assert losses(again) == losses(alone(recipe))
    for name, tensor in assemble([alone(recipe)]).items():
        assert torch.equal(assemble([again])[name], tensor), name


def test_a_recipe_is_another_run_than_none_and_than_each_other() -> None:
    """The comparisons above would hold of recipes that do nothing."""
    plain = train(replace(case("mxfp8"), recipe=None))
    runs = [losses(plain), *(losses(alone(recipe)) for recipe in ALL)]
    assert len({tuple(run) for run in runs}) == len(runs)
    for run in runs[1:]:
        assert max(abs(got / truth - 1) for got, truth in zip(run, runs[0], strict=True)) < 1e-2


def test_histories_are_the_same_under_all_mappings_and_of_the_largest_numbers(ranks: Ranks) -> None:
    """Of the last step, which stands first, and the one before it; nothing behind them."""
    truth = {name: h for name, h in assemble([alone("fp8_delayed")]).items() if name.endswith("_amax.history")}
    assert len(truth) == 2 * 4 + 2 + 2 + 2  # attention, dense MLP, experts, shared experts
    cases = [case("fp8_delayed", **mapping) for mapping in ({"pp": 2}, {}, {"tp": 2}, {"cp": 2}, {"ep": 2})]
    for found in on_two(ranks, *cases):
        whole = assemble(found)
        for name, history in truth.items():
            assert (history[..., :2] > 0).all() and not history[..., 2:].any(), name
            assert whole[name].shape == history.shape
            # The oldest is of the first step, whose forward is the same; later ones follow the weights, and gradients roundings.
            torch.testing.assert_close(whole[name][..., :2, 1], history[..., :2, 1], rtol=1e-5, atol=0)
            torch.testing.assert_close(whole[name], history, rtol=0.3, atol=0)


def test_the_recipe_that_the_page_writes_trains(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    file = tmp_path / "mine.py"
    file.write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0])
    recipe = parse_recipe(f"{file}:MINE")
    plain, ours = train(replace(case("mxfp8"), recipe=None)), train(replace(case("mxfp8"), recipe=recipe))
    assert losses(ours) != losses(plain)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-2)
