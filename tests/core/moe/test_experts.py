"""The routed experts of every activation, with and without biases: against loops and gpt-oss, and cut over ranks against one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.config.architecture import Activation, ClampedSwiGLU, GeGLU, MoE, Router, SquaredReLU, num_halves
from core.config.mapping import ParallelConfig
from core.moe.dispatch.protocol import ExpertRows
from core.moe.experts import Experts
from core.moe.layer import MoELayer
from core.moe.router import RouterInputs
from core.parallel.groups import groups_for
from core.state.box import tiling_fault, whole
from core.state.inventory import declared, initialise
from core.state.spec import Constant
from tests.core.kernels.test_activation import ACTIVATIONS, formula
from tests.core.moe.test_layer import packing
from tests.core.moe.test_layer_ranks import LATENT, MODEL, check, jobs_of, run_all
from tests.core.numbers import draw, leaf, near
from tests.core.shares import fill, place_on
from tests.ranks import Ranks

HIDDEN, FFN = 5, 7
GPT_OSS = ClampedSwiGLU(limit=7.0, alpha=1.702, shift=1.0)
UNGATED = replace(MODEL, activation=SquaredReLU(), bias=True)
# Three features, fewer than four ranks of etp: one of them has no part of the second bias.
NARROW = replace(LATENT, activation=replace(GPT_OSS, limit=0.9), bias=True)


def config_of(activation: Activation, *, bias: bool, experts: int = 11) -> MoE:
    router = Router(score="softmax_after_top_k", normalise=False)
    return MoE(experts=experts, top_k=3, expert_ffn=FFN, router=router, activation=activation, bias=bias)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", [(0,) * 11, (1, 0, 3, 0, 0, 2, 0, 0, 0, 0, 5), (0,) * 10 + (1,)])
def test_every_row_passes_its_own_expert(activation: Activation, bias: bool, counts: tuple[int, ...]) -> None:
    experts = Experts(config_of(activation, bias=bias), HIDDEN, init_std=1.0, place=place_on())
    fill(experts)
    x, weight = draw(0, sum(counts), HIDDEN), draw(1, sum(counts)).sigmoid()
    found = experts(ExpertRows(hidden_RH=x, weights_R=weight, counts=counts))
    held = {name: tensor.detach().numpy() for name, tensor in experts.named_parameters()}
    assert set(held) == {"gate_up", "down"} | ({"gate_up_bias", "down_bias"} if bias else set())
    truth = torch.zeros(sum(counts), HIDDEN, dtype=torch.float64)
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    for r, e in enumerate(owners):
        product = held["gate_up"][e] @ x[r].numpy() + (held["gate_up_bias"][e] if bias else 0.0)
        act = formula(torch.from_numpy(product.reshape(1, -1)), activation)[0]
        truth[r] = weight[r] * torch.from_numpy(held["down"][e] @ act + (held["down_bias"][e] if bias else 0.0))
    near(found, truth, units=64)


@pytest.mark.parametrize("tokens", [1, 13])
def test_a_clamped_layer_with_biases_is_gpt_osss(tokens: int) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    settings = GptOssConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=11, num_experts_per_tok=3)
    theirs = GptOssMLP(settings).double()
    ours = MoELayer(config_of(GPT_OSS, bias=True), HIDDEN, 1.0, place_on())
    fill(ours)
    for parameter in ours.experts.parameters():
        parameter.data *= 4  # far enough that some numbers are cut off
    with torch.no_grad():
        held = dict(ours.experts.named_parameters())
        theirs.router.weight.copy_(ours.router.weight)
        theirs.router.bias.zero_()
        # Its gate and up stand in turn, and its matrices are multiplied from the right.
        theirs.experts.gate_up_proj.copy_(held["gate_up"].permute(0, 3, 2, 1).flatten(2))
        theirs.experts.gate_up_proj_bias.copy_(held["gate_up_bias"].transpose(1, 2).flatten(1))
        theirs.experts.down_proj.copy_(held["down"].transpose(1, 2))
        theirs.experts.down_proj_bias.copy_(held["down_bias"])
    x, arrives = draw(0, tokens, HIDDEN) * 3, draw(1, tokens, HIDDEN)
    mine, other = leaf(x), leaf(x)
    out, _ = ours(mine, RouterInputs(packing=packing(tokens)))
    expected, _ = theirs(other[None])
    near(out, expected[0], units=64)
    (out * arrives).sum().backward()
    (expected[0] * arrives).sum().backward()
    near(mine.grad, other.grad, units=64)

    def compare(found: Tensor | None, truth: Tensor | None) -> None:
        near(found, torch.zeros_like(found) if truth is None and found is not None else truth, units=64)

    of = {name: tensor.grad for name, tensor in held.items()}
    parameters = dict(theirs.experts.named_parameters())
    compare(of["down_bias"], parameters["down_proj_bias"].grad)
    compare(of["down"].transpose(1, 2), parameters["down_proj"].grad)
    compare(of["gate_up_bias"].transpose(1, 2).flatten(1), parameters["gate_up_proj_bias"].grad)
    compare(of["gate_up"].permute(0, 3, 2, 1).flatten(2), parameters["gate_up_proj"].grad)


def test_biases_begin_at_zero_and_do_not_decay() -> None:
    for activation in (SquaredReLU(), GeGLU(tanh=False)):
        experts = Experts(config_of(activation, bias=True), HIDDEN, init_std=1.0, place=place_on())
        halves = num_halves(activation)
        specs = experts.specs()
        assert {name: spec.shape for name, spec in specs.items()} == {
            "gate_up": (11, halves, FFN, HIDDEN),
            "down": (11, HIDDEN, FFN),
            "gate_up_bias": (11, halves, FFN),
            "down_bias": (11, HIDDEN),
        }
        assert {name for name, spec in specs.items() if not spec.decay} == {"gate_up_bias", "down_bias"}
        assert all(spec.init == Constant(value=0.0) for spec in specs.values() if not spec.decay)
        initialise(experts, 3)
        assert not experts.down_bias.any() and bool(experts.down.any())


def boxes(rank: int, world: int, parallel: ParallelConfig) -> dict[str, tuple[object, ...]]:
    """What this rank holds of each tensor of 4 experts."""
    place = place_on(groups_for(parallel), parallel)
    experts = Experts(config_of(SquaredReLU(), bias=True, experts=4), HIDDEN, init_std=1.0, place=place)
    return {name: (entry.spec.shape, entry.spec.box) for name, entry in declared(experts).items()}


def test_ranks_of_etp_hold_different_features_of_the_second_bias(ranks: Ranks) -> None:
    """5 features over etp=2: ranks 0 and 1 share experts 0 and 1, and have 2 and 3 features of their biases."""
    found = ranks.run(boxes, 4, ParallelConfig(etp=2, ep=2))
    assert [of["down_bias"][1].offset for of in found] == [(0, 0), (0, 2), (2, 0), (2, 2)]
    assert [of["down_bias"][1].shape for of in found] == [(2, 2), (2, 3), (2, 2), (2, 3)]
    for name, (shape, _) in found[0].items():
        assert tiling_fault(whole(shape), [of[name][1] for of in found]) is None


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_c2_c4_biases_and_ungated_experts_give_outputs_and_gradients_of_one_rank_in_every_folding(
    ranks: Ranks, world: int
) -> None:
    jobs = jobs_of(world, (UNGATED, NARROW))
    found = ranks.run(run_all, world, jobs, timeout_seconds=60.0)
    for i, job in enumerate(jobs):
        check([rank[i] for rank in found], job)
