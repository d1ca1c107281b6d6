"""The MoE layer as a whole against a loop over tokens, and what its balance losses do to the router."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from core.attention.packing import Packing, packing_of
from core.config.architecture import AuxLoss, ExpertBias, Groups, MoE, Router, SharedExperts, ZLoss
from core.config.mapping import DispatcherName, ParallelConfig
from core.layers.place import Place
from core.moe.balance import BalanceScope
from core.moe.layer import MoELayer
from core.moe.router import RouterInputs
from core.parallel.groups import Groups as RankGroups
from core.parallel.groups import one_rank
from core.state.inventory import initialise

HIDDEN = 5
BALANCE = (
    AuxLoss(scope="microbatch", coefficient=0.3),
    AuxLoss(scope="sequence", coefficient=0.2),
    ZLoss(coefficient=0.1),
)
SOFTMAX = MoE(
    experts=7, top_k=3, expert_ffn=8, router=Router(score="softmax", normalise=True, scale=1.5, balance=BALANCE)
)
SIGMOID = MoE(
    experts=8,
    top_k=3,
    expert_ffn=8,
    router=Router(
        score="sigmoid", normalise=True, groups=Groups(total=4, kept=2), scale=2.5, balance=(ExpertBias(rate=0.1),)
    ),
    shared=SharedExperts(count=2),
)
LATENT = replace(SOFTMAX, latent=3, shared=SharedExperts(count=1, gated=True))


def layer_of(config: MoE, dispatcher: DispatcherName = "alltoall") -> MoELayer:
    parallel = ParallelConfig(dispatcher=dispatcher)
    place = Place(groups=one_rank(), parallel=parallel, dtype=torch.float64, device=torch.device("cpu"))
    layer = MoELayer(config, HIDDEN, 0.5, place)
    initialise(layer, 5)
    return layer


def hidden_of(tokens: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)


def packing(*lengths: int) -> Packing:
    return packing_of(torch.tensor([0, *accumulate(lengths)]), sum(lengths), torch.device("cpu"))


def inputs(*lengths: int, scope: BalanceScope | None = None, valid_T: Tensor | None = None) -> RouterInputs:
    return RouterInputs(packing=packing(*lengths), scope=scope, valid_T=valid_T)


def scope_of(lengths: tuple[int, ...]) -> BalanceScope:
    return scope_on(packing(*lengths), one_rank(), sum(lengths))


def scope_on(packed: Packing, groups: RankGroups, total: int) -> BalanceScope:
    return BalanceScope(
        sequence_T=packed.sequence_T[packed.mine],
        sequences=len(packed.lengths),
        valid_T=None,
        global_tokens=total,
        seen=None,
        sequence=groups.sequence,
        tokens=groups.tokens,
    )


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = gate @ x
    return down @ (g / (1 + torch.exp(-g)) * (up @ x))


def naive(layer: MoELayer, hidden: Tensor) -> Tensor:
    """Each token alone: its experts by the router's own choice, summed with its weights, and the shared experts."""
    routing = layer.router(hidden, inputs(len(hidden)))
    out = []
    for x, experts, weights in zip(hidden, routing.experts_TK.tolist(), routing.weights_TK, strict=True):
        z = x if layer.latent_down is None else layer.latent_down.weight @ x
        y = torch.zeros_like(z)
        for e, weight in zip(experts, weights, strict=True):
            gate_up, down = layer.experts.gate_up[e], layer.experts.down[e]
            y = y + weight * mlp(z, gate_up[0], gate_up[1], down)
        if layer.latent_up is not None:
            y = layer.latent_up.weight @ y
        if layer.shared is not None:
            always = mlp(x, layer.shared.gate_up[0], layer.shared.gate_up[1], layer.shared.down)
            gate = layer.shared_gate
            y = y + (always if gate is None else always / (1 + torch.exp(-(gate.weight @ x))))
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "config", [SOFTMAX, SIGMOID, LATENT], ids=["softmax", "sigmoid, groups, shared", "latent, gated shared"]
)
def test_output_and_every_gradient_are_those_of_a_loop_over_tokens(config: MoE, dispatcher: DispatcherName) -> None:
    layer = layer_of(config, dispatcher)
    hidden = hidden_of(11).requires_grad_()
    wanted = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensors = {"hidden": hidden, **dict(layer.named_parameters())}
    found = layer(hidden, inputs(11))[0]
    expected = naive(layer, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    gradients = [
        torch.autograd.grad((out * wanted).sum(), list(tensors.values()), allow_unused=False)
        for out in (found, expected)
    ]
    for name, mine, truth in zip(tensors, *gradients, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: n + m)


def test_b10_balance_trains_the_router_even_where_the_main_loss_is_zero() -> None:
    layer = layer_of(SOFTMAX)
    hidden = hidden_of(12)
    out, routing = layer(hidden, inputs(5, 7, scope=scope_of((5, 7))))
    assert routing.balance is not None
    (0.0 * out.sum() + sum(routing.balance.by_name.values())).backward()
    weight = layer.router.weight.detach().clone().requires_grad_()
    logits = hidden @ weight.T
    scores = torch.softmax(logits, -1)
    best = scores.detach().argsort(-1, descending=True)[:, :3]
    chosen = torch.zeros_like(scores).scatter(1, best, 1.0)

    def aux(s: Tensor, c: Tensor) -> Tensor:
        """Tokens of the piece over all, times E * sum_i f_i P_i."""
        return len(s) / 12 * 7 * (c.mean(0) / 3 * s.mean(0)).sum()

    sequences = zip(scores.split([5, 7]), chosen.split([5, 7]), strict=True)
    loss = 0.3 * aux(scores, chosen) + 0.2 * sum(aux(s, c) for s, c in sequences)
    loss = loss + 0.1 * torch.logsumexp(logits, -1).square().mean()
    (expected,) = torch.autograd.grad(loss, weight)
    assert layer.router.weight.grad is not None and float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(layer.router.weight.grad, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_padding_passes_the_shared_experts_only_and_changes_no_other_token(dispatcher: DispatcherName) -> None:
    layer = layer_of(SIGMOID, dispatcher)
    hidden = hidden_of(6)
    valid = torch.tensor([True, True, False, True, False, True])
    found, routing = layer(hidden, inputs(6, valid_T=valid))
    assert layer.shared is not None
    torch.testing.assert_close(found[~valid], layer.shared(hidden[~valid], (2,)))
    torch.testing.assert_close(found[valid], layer(hidden[valid], inputs(4))[0], rtol=1e-12, atol=1e-14)
    assert int(routing.counts_E.sum()) == 4 * 3


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token_pass_forward_and_backward(dispatcher: DispatcherName, tokens: int) -> None:
    layer = layer_of(SOFTMAX, dispatcher)
    hidden = hidden_of(tokens).requires_grad_()
    lengths = (tokens,) if tokens else ()
    out, routing = layer(hidden, inputs(*lengths, scope=scope_of(lengths)))
    assert out.shape == (tokens, HIDDEN) and routing.balance is not None
    (out.sum() + sum(routing.balance.by_name.values())).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
        assert bool(parameter.grad.isfinite().all()) and (tokens or not parameter.grad.any()), name


def test_b17_a_forward_without_a_scope_has_no_balance_loss_and_the_next_one_has() -> None:
    layer = layer_of(SOFTMAX)
    with torch.no_grad():
        assert layer(hidden_of(1), inputs(1))[1].balance is None
    routing = layer(hidden_of(3), inputs(3, scope=scope_of((3,))))[1]
    assert routing.balance is not None and set(routing.balance.by_name) == {"aux_microbatch", "aux_sequence", "z"}
