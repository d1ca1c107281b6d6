"""The experts' MLP under every recipe, against each expert alone by a linear layer's products and torch's own differentiation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from core.config.architecture import SWIGLU, Activation, ClampedSwiGLU, SquaredReLU
from core.config.recipe import RECIPES, RecipeName
from core.kernels.activation import activate
from core.kernels.deferred import Deferred
from core.kernels.grouped_products import Biases
from core.kernels.pieces import Pieces
from core.memory.recompute import recompute
from core.precision.experts import products_of, quantised_expert_mlp
from core.precision.linear import quantised_linear
from core.precision.quantiser import Quantiser
from tests.core.precision.recipe_case import NAMES, draw, quantiser_of

# In units of the recipe's alignment: empty experts, all rows at one, nobody at all, more than nine experts.
UNITS = [(1, 0, 2), (0, 3, 0, 0), (0, 0), (1,) * 11]
HIDDEN, FFN = 48, 32


@dataclass(frozen=True, kw_only=True)
class Run:
    """The output and all gradients."""

    out: Tensor
    rows: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True)
class Given:
    """Rows sorted by expert, their router weights, both weights, what arrives in the backward."""

    counts: tuple[int, ...]
    rows: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    arrives: Tensor


def given(counts: Sequence[int], *, hidden: int = HIDDEN, ffn: int = FFN, halves: int = 2) -> Given:
    total, experts = sum(counts), len(counts)
    return Given(
        counts=tuple(counts),
        rows=draw(total, hidden),
        weights=torch.rand(total, generator=torch.Generator().manual_seed(1)),
        gate_up=draw(experts, halves, ffn, hidden, seed=2) * 0.2,
        down=draw(experts, hidden, ffn, seed=3) * 0.2,
        arrives=draw(total, hidden, seed=4),
    )


def quantisers(name: RecipeName, experts: int, *, only: str | None = None) -> dict[str, Quantiser]:
    return {
        weight: quantiser_of(name, f"layers.1.mlp.experts.{weight}", experts)
        for weight in ("gate_up", "down")
        if only in (None, weight)
    }


def together(case: Given, made: Mapping[str, Quantiser], activation: Activation = SWIGLU) -> Run:
    """All experts at once."""
    rows, weights, gate_up, down = (
        tensor.clone().requires_grad_() for tensor in (case.rows, case.weights, case.gate_up, case.down)
    )
    out = quantised_expert_mlp(rows, weights, gate_up, down, case.counts, made, activation=activation)
    out.backward(case.arrives)
    assert rows.grad is not None and weights.grad is not None and gate_up.grad is not None and down.grad is not None
    return Run(out=out.detach(), rows=rows.grad, weights=weights.grad, gate_up=gate_up.grad, down=down.grad)


def one_by_one(case: Given, made: Mapping[str, Quantiser], activation: Activation = SWIGLU) -> Run:
    """Each expert's rows through two linear layers and an activation that torch differentiates; in the order of experts."""
    leaves = [tensor.clone().requires_grad_() for tensor in (case.rows, case.weights, case.gate_up, case.down)]
    rows, weights, gate_up, down = leaves
    outs = []
    pieces = zip(rows.split(case.counts), weights.split(case.counts), gate_up, down, strict=True)
    for i, (x, weight, first, second) in enumerate(pieces):
        hidden = _product(x, first.flatten(0, 1), made.get("gate_up"), i)
        outs.append(_product(activate(hidden, activation) * weight[:, None], second, made.get("down"), i))
    out = torch.cat(outs)
    out.backward(case.arrives)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Run(out=out.detach(), rows=grads[0], weights=grads[1], gate_up=grads[2], down=grads[3])


def _product(x: Tensor, weight: Tensor, quantiser: Quantiser | None, expert: int) -> Tensor:
    if quantiser is None:
        return F.linear(x, weight)
    alone = Quantiser(
        name=quantiser.name,
        recipe=quantiser.recipe,
        seed=quantiser.seed,
        signs=quantiser.signs,
        backend=quantiser.backend,
        # Fresh histories measure: each expert's own.
        history=None if quantiser.history is None else quantiser_of("fp8_delayed").history,
    )
    return quantised_linear(x, weight, alone)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", NAMES)
def test_all_experts_at_once_give_bitwise_what_each_gives_alone(name: RecipeName, units: tuple[int, ...]) -> None:
    case = given([n * RECIPES[name].align for n in units])
    got, truth = together(case, quantisers(name, len(units))), one_by_one(case, quantisers(name, len(units)))
    # The forward, and what depends on the second product's own operands alone, has the very bits.
    assert torch.equal(got.out, truth.out) and torch.equal(got.down, truth.down)
    # The activation's derivative is a formula here and torch's own there: its last bit decides a rounding now and then.
    for found, expected in ((got.rows, truth.rows), (got.weights, truth.weights), (got.gate_up, truth.gate_up)):
        assert found.shape == expected.shape
        assert (found - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("name", NAMES)
def test_products_of_all_experts_are_bitwise_those_of_each(name: RecipeName) -> None:
    """Without an activation between them: forward, input gradient and weight gradient of the grouped product alone."""

    align = RECIPES[name].align
    counts = (2 * align, 0, align)
    case = given(counts)
    pieces = Pieces(ends_E=torch.tensor(counts).cumsum(0).to(torch.int32), counts=counts)
    matrices = case.gate_up.flatten(1, 2)
    made = quantisers(name, 3)["gate_up"]
    products = products_of(made)
    grad = draw(sum(counts), 2 * FFN, seed=9)
    out = products.forward(case.rows, matrices, pieces)
    of_rows = products.of_rows(grad, matrices, pieces)
    of_weight = products.of_weight(grad, products.keep(case.rows, pieces), pieces)
    at = 0
    for i, count in enumerate(counts):
        piece = slice(at, at + count)
        x, w = case.rows[piece].clone().requires_grad_(), matrices[i].clone().requires_grad_()
        alone = _product(x, w, made, i)
        alone.backward(grad[piece])
        assert x.grad is not None and w.grad is not None
        assert torch.equal(out[piece], alone) and torch.equal(of_rows[piece], x.grad)
        assert torch.equal(of_weight[i], w.grad)
        at += count


@pytest.mark.parametrize("only", ["gate_up", "down"])
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_without_a_recipe_is_multiplied_as_it_is(name: RecipeName, only: str) -> None:
    case = given([n * RECIPES[name].align for n in (2, 0, 1)])
    got, truth = together(case, quantisers(name, 3, only=only)), one_by_one(case, quantisers(name, 3, only=only))
    whole = together(case, quantisers(name, 3))
    for field in ("out", "rows", "weights", "gate_up", "down"):
        found, expected = getattr(got, field), getattr(truth, field)
        assert (found - expected).norm() <= 2e-3 * expected.norm(), field
        assert not torch.equal(found, getattr(whole, field)), field


@pytest.mark.parametrize("activation", [ClampedSwiGLU(alpha=1.7, limit=3.0, shift=1.0), SquaredReLU()])
def test_other_activations_and_widths_that_blocks_do_not_divide_are_right(activation: Activation) -> None:
    halves = 1 if isinstance(activation, SquaredReLU) else 2
    case = given([32, 0, 96], hidden=41, ffn=7, halves=halves)
    made = quantisers("mxfp8", 3)
    got, truth = together(case, made, activation), one_by_one(case, made, activation)
    assert torch.equal(got.down, truth.down) or (got.down - truth.down).norm() <= 2e-3 * truth.down.norm()
    for field in ("out", "rows", "weights", "gate_up"):
        found, expected = getattr(got, field), getattr(truth, field)
        assert (found - expected).norm() <= 2e-3 * expected.norm(), field


@pytest.mark.parametrize("name", NAMES)
def test_biases_are_added_and_have_the_gradients_of_plain_sums(name: RecipeName) -> None:
    align = RECIPES[name].align
    case = given([2 * align, 0, align])
    first, second = (nn.Parameter(draw(3, *shape, seed=8) * 0.1) for shape in ((2, FFN), (HIDDEN,)))
    made = quantisers(name, 3)
    rows = case.rows.clone().requires_grad_()
    weights = case.weights.clone().requires_grad_()
    biases = Biases(gate_up=first, down=second)
    out = quantised_expert_mlp(rows, weights, case.gate_up, case.down, case.counts, made, biases=biases)
    out.backward(case.arrives)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (case.rows, case.weights, first, second)]
    x_R, weight_R, one, two = leaves
    outs = []
    for i, (x, weight) in enumerate(zip(x_R.split(case.counts), weight_R.split(case.counts), strict=True)):
        hidden = _product(x, case.gate_up[i].flatten(0, 1), made["gate_up"], i) + one[i].flatten()
        outs.append(
            _product(activate(hidden, SWIGLU) * weight[:, None], case.down[i], made["down"], i)
            + two[i] * weight[:, None]
        )
    truth = torch.cat(outs)
    truth.backward(case.arrives)
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    for leaf, expected in zip((rows, weights, first, second), leaves, strict=True):
        assert leaf.grad is not None and expected.grad is not None
        assert (leaf.grad - expected.grad).norm() <= 2e-3 * expected.grad.norm()


@pytest.mark.parametrize("name", NAMES)
def test_kept_of_the_rows_is_half_or_a_quarter(name: RecipeName) -> None:
    """Known of the rest: router weights, both parameters, and the first product's result in the run's dtype."""
    case = given([128, 0, 256], hidden=256)
    made = quantisers(name, 3)
    rows, weights = case.rows.bfloat16().requires_grad_(), case.weights.requires_grad_()
    gate_up, down = nn.Parameter(case.gate_up.bfloat16()), nn.Parameter(case.down.bfloat16())
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        quantised_expert_mlp(rows, weights, gate_up, down, case.counts, made)
    known = weights.nbytes + gate_up.nbytes + down.nbytes + 384 * 2 * FFN * 2
    elements = 384 * 256
    scales = {"fp8_blockwise": elements // 128 * 4, "mxfp8": elements // 32, "nvfp4": elements // 16 + 3 * 4}
    wanted = (elements // 2 if name == "nvfp4" else elements) + scales.get(name, 3 * 4)
    assert sum(tensor.nbytes for tensor in kept) == known + wanted
    assert wanted < (0.29 if name == "nvfp4" else 0.52) * rows.nbytes


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_mlp_run_again_in_the_backward_or_whose_weight_gradients_wait_gives_the_same_bits(
    name: RecipeName, again: bool
) -> None:
    case = given([n * RECIPES[name].align for n in (2, 0, 1)])
    once = together(case, quantisers(name, 3))
    later, made = Deferred(collecting=True), quantisers(name, 3)
    rows, weights = case.rows.clone().requires_grad_(), case.weights.clone().requires_grad_()
    gate_up, down = nn.Parameter(case.gate_up.clone()), nn.Parameter(case.down.clone())

    def mlp(rows: Tensor, weights: Tensor) -> Tensor:
        return quantised_expert_mlp(rows, weights, gate_up, down, case.counts, made, later=None if again else later)

    out = recompute(mlp, rows, weights) if again else mlp(rows, weights)
    out.backward(case.arrives)
    assert (gate_up.grad is None) != again
    for work in later.take():
        work()
    for found, expected in (
        (out, once.out),
        (rows.grad, once.rows),
        (weights.grad, once.weights),
        (gate_up.grad, once.gate_up),
        (down.grad, once.down),
    ):
        assert found is not None and torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_that_fill_an_expert_change_no_output_and_no_gradient(name: RecipeName) -> None:
    """Known fault D3: the padded path is the unpadded one, which for each expert alone needs no padding."""
    align = RECIPES[name].align
    filled, counts = (2 * align, align, align), (align + 3, 1, 0)
    case = given(filled)
    real = torch.cat([torch.arange(at, at + n) for at, n in zip((0, 2 * align, 3 * align), counts, strict=True)])
    hidden, weights, arrives = (torch.zeros_like(tensor) for tensor in (case.rows, case.weights, case.arrives))
    for padded, tensor in ((hidden, case.rows), (weights, case.weights), (arrives, case.arrives)):
        padded[real] = tensor[real]
    padded_case = Given(
        counts=filled, rows=hidden, weights=weights, gate_up=case.gate_up, down=case.down, arrives=arrives
    )
    short = Given(
        counts=counts,
        rows=case.rows[real],
        weights=case.weights[real],
        gate_up=case.gate_up,
        down=case.down,
        arrives=case.arrives[real],
    )
    got, truth = together(padded_case, quantisers(name, 3)), one_by_one(short, quantisers(name, 3))
    torch.testing.assert_close(got.out[real], truth.out, rtol=1e-5, atol=1e-5)
    rest = torch.ones(sum(filled), dtype=torch.bool)
    rest[real] = False
    assert not got.out[rest].any() and not got.rows[rest].any()
    for found, expected in (
        (got.rows[real], truth.rows),
        (got.weights[real], truth.weights),
        (got.gate_up, truth.gate_up),
        (got.down, truth.down),
    ):
        assert (found - expected).norm() <= 2e-3 * expected.norm()


def test_counts_that_do_not_cover_the_rows_or_cut_a_block_are_refused() -> None:
    """Known faults D1 and D3: neither unaligned counts nor those of other rows reach a product."""
    case = given([32, 64])
    made = quantisers("mxfp8", 2)
    for counts in ((32, 32), (32, 96)):
        with pytest.raises(ValueError, match=f"{sum(counts)} rows are counted for the experts, but there are 96"):
            quantised_expert_mlp(case.rows, case.weights, case.gate_up, case.down, counts, made)
    with pytest.raises(ValueError, match=r"has 44 rows.* multiple of 32"):
        quantised_expert_mlp(case.rows, case.weights, case.gate_up, case.down, (44, 52), made)
