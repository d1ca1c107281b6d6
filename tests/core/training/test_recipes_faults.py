"""Known faults of low precision, each as a test: padding, alignment, and histories that travel with a checkpoint (group d)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from ckpt.load import load
from ckpt.save import Saving, save
from core.config.family import find_family
from core.config.mapping import ParallelConfig
from core.config.recipe import ALONG, RECIPES, Recipe, RecipeName
from core.kernels.permute import map_rows
from core.moe.layer import MoELayer
from core.optim.make import make_optimizer
from core.parallel.groups import groups_for, one_rank
from core.pipeline.layout import layout_of
from core.state.inventory import initialise, inventory
from core.training.step import train_step
from core.transformer.stage import build_model
from tests.core.tiny import Case, Trained, assemble, microbatches, train
from tests.core.training.test_recipes import alone, case, losses
from tests.ranks import Ranks


def multiples(recipe: Recipe | None, name: str = "deepseek_v3") -> set[int]:
    """To what each MoE layer of a model fills up its experts' rows."""
    model = build_model(find_family(name).size("tiny").model, groups=one_rank(), recipe=recipe)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert layers
    return {layer.dispatcher.multiple for layer in layers}  # type: ignore[attr-defined]  # of those without a package


def test_d1_counts_are_aligned_where_the_multiple_exceeds_the_tokens() -> None:
    """T = 100, E = 2, 90 tokens, multiple 128: rows of zeros, never an unaligned count."""
    experts = torch.full((100, 1), -1)
    experts[:90] = (torch.arange(90) % 7 == 0)[:, None].to(torch.int64)
    rows = map_rows(experts, 2, multiple=128)
    assert rows.counts_E.tolist() == [128, 128]
    assert rows.rows == 256 and int((rows.order_R >= 0).sum()) == 90


@pytest.mark.parametrize("name", RECIPES)
def test_d2_rows_are_filled_up_to_what_the_recipe_says_in_whole_blocks_of_it(name: RecipeName) -> None:
    recipe = RECIPES[name]
    along = [ALONG[operand.scaling] for key, operand in recipe.operands() if key.startswith("weight_gradient")]
    assert all(recipe.align % size == 0 for size in along) and recipe.align % 16 == 0
    assert multiples(recipe) == {recipe.align}
    assert multiples(replace(recipe, align=256)) == {256}


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_d3_more_padding_changes_nothing_of_what_is_trained(name: RecipeName) -> None:
    """Blocks of a tensor, or of so many rows that both alignments consist of them."""
    plain = alone(name)
    padded = train(replace(case(name), recipe=replace(RECIPES[name], align=RECIPES[name].align * 4)))
    for got, truth in zip(losses(padded), losses(plain), strict=True):
        assert got == pytest.approx(truth, rel=1e-6)
    first = train(replace(case(name), recipe=replace(RECIPES[name], align=RECIPES[name].align * 4), steps=1))
    assert losses(first)[0] == losses(plain)[0]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "mixtral"])
def test_d4_without_a_recipe_no_row_of_zeros_is_added(family: str) -> None:
    assert multiples(None, family) == {1}


def test_d4_nor_where_a_recipe_leaves_the_experts_alone() -> None:
    assert multiples(replace(RECIPES["fp8_blockwise"], high=("*.experts.*",))) == {1}


# --------------------------------------------------------------------------------- histories that travel (known fault A28)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One step of a run on some ranks: what they loaded, what they saved and where, and the step's loss."""

    address: str
    loaded: Trained
    saved: Trained
    loss: float


def link(rank: int, world: int, work: Case, step: int, before: str | None, run: Path) -> Link:
    """Load `before`, into NaN; train step `step`; save."""
    layout = layout_of(work.model, work.parallel)
    groups = groups_for(work.parallel, embedding_stages=layout.embedding_stages(work.model.tied_embeddings))
    model = build_model(work.model, groups=groups, parallel=work.parallel, recipe=work.recipe, seed=7, dtype=work.dtype)
    if before is None:
        initialise(model, 7)
    optimizer = make_optimizer(model, work.optimizer, groups, work.parallel)

    def state() -> list:  # type: ignore[type-arg]  # of ShardedTensor
        optimizer.wait_all()
        pieces = [replace(piece, name=f"model.{name}") for name, piece in inventory(model, groups).items()]
        return pieces + optimizer.state()

    def known() -> Trained:
        kept = [t for t in state() if t.name.startswith("model.")]
        return Trained(results=[], pieces=[(t.name, t.shape, t.box, t.data.clone()) for t in kept])

    if before is not None:
        tensors = state()
        for tensor in tensors:
            tensor.data.fill_(torch.nan)
        load(before, tensors, groups.world)
        optimizer.set_steps(step)
    loaded = known()
    batches = microbatches(step, groups.dp.position, groups.dp.size, work.microbatch, groups)
    result = train_step(model, optimizer, batches, rate=work.optimizer.learning_rate, groups=groups)
    address = save(run, step, state(), {"steps": step + 1}, groups.world, Saving())
    return Link(address=address, loaded=loaded, saved=known(), loss=result.loss)


def test_a_history_is_saved_under_one_mapping_taken_up_under_another_and_the_run_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    chain = [(2, {"pp": 2}), (2, {"tp": 2}), (1, {})]
    truth = losses(train(replace(case("fp8_delayed"), steps=len(chain))))
    before: list[Link] | None = None
    for step, (world, mapping) in enumerate(chain):
        work = replace(case("fp8_delayed"), parallel=ParallelConfig(**mapping))
        came = None if before is None else before[0].address
        found = ranks.run(link, world, work, step, came, tmp_path, timeout_seconds=60.0)
        if before is not None:
            taken, left = assemble([one.loaded for one in found]), assemble([one.saved for one in before])
            assert taken.keys() == left.keys()
            for name, tensor in taken.items():
                assert torch.equal(tensor, left[name]), name
            histories = [tensor for name, tensor in taken.items() if name.endswith("_amax.history")]
            assert histories and all((h[..., :step] > 0).all() and not h[..., step:].any() for h in histories)
        assert all(one.loss == pytest.approx(truth[step], rel=1e-3) for one in found)
        before = found
