"""Which balances and selections of experts are refused together, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.check import check_model
from core.config.architecture import Capacity, MoE, Router
from core.config.override import override, parse_assignment
from tests.core.config.test_override import RUN
from tests.core.said import sentence

ROUTER = "model.moe.router"


def found(*texts: str, **moe: object) -> list[str]:
    """The faults of the run's model with settings of its router, and other fields of its experts."""
    plain = [f"{ROUTER}.groups=none", f"{ROUTER}.normalise=false", *(f"{ROUTER}.{text}" for text in texts)]
    last = {text.split("=")[0]: text for text in plain}
    run, wrong = override(RUN, [parse_assignment(text) for text in last.values()])
    assert not wrong, wrong
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, **moe)) if isinstance(layer.mlp, MoE) else layer
        for layer in run.model.layers
    )
    return [sentence(fault) for fault in check_model(replace(run.model, layers=layers))]


@pytest.mark.parametrize(
    "texts",
    [
        ("balance=aux:microbatch:0.1+aux:sequence:0.1+aux:global_batch:0+z:0.1",),
        ("score=sigmoid", "balance=bias:0.1+aux:sequence:0.1+z:0.1"),
        ("score=sqrt_softplus", "balance=bias:0.1"),
        ("balance=quantile:0.9+z:0.1",),
        ("score=sigmoid", "normalise=true", "balance=quantile:0"),
        ("selection=sinkhorn", "balance=z:0.1"),
        ("selection=expert_choice", "balance=z:0.1", "scale=2"),
    ],
)
def test_what_goes_together_has_no_fault(texts: tuple[str, ...]) -> None:
    assert found(*texts) == []


def test_optimal_transport_wants_the_score_of_its_weights() -> None:
    assert found("selection=sinkhorn", "score=sigmoid", top_k=1) == []
    (fault,) = found("selection=sinkhorn", top_k=1)
    assert "score=softmax: must be sigmoid with model.moe.router.selection=sinkhorn" in fault
    assert "where model.moe.top_k=1. Works: sigmoid." in fault
    (fault,) = found("selection=sinkhorn", "score=sigmoid")
    assert fault.endswith("where model.moe.top_k=3. Works: softmax.")


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        (("balance=aux:sequence:-0.1",), "AuxLoss.coefficient=-0.1: must be at least 0"),
        (("balance=z:-1",), "ZLoss.coefficient=-1.0: must be at least 0"),
        (("score=sigmoid", "balance=bias:-1"), "ExpertBias.rate=-1.0: must be at least 0"),
        (("balance=quantile:1",), "QuantileBias.ema=1.0: must be at least 0 and less than 1"),
        (("balance=quantile:-0.1",), "QuantileBias.ema=-0.1: must be at least 0 and less than 1"),
        (("balance=aux:sequence:1+aux:sequence:2",), "balance=sequence: stands twice"),
        (("balance=z:1+z:2",), "balance=ZLoss: stands twice"),
        (("balance=bias:1",), "score=softmax: cannot carry an ExpertBias"),
        (("balance=quantile:0.5+aux:microbatch:0.1",), "balance=aux:microbatch:0.1: does not go with quantile"),
        (("score=sigmoid", "balance=quantile:0.5+bias:0.1"), "balance=bias:0.1: does not go with quantile"),
        (("selection=sinkhorn", "balance=aux:microbatch:0.0"), "does not go with model.moe.router.balance=aux:micro"),
        (("selection=sinkhorn", "balance=quantile:0.5"), "does not go with model.moe.router.balance=quantile:0.5"),
        (("selection=sinkhorn:0",), "selection.tolerance=0.0: must be positive"),
        (("selection=sinkhorn:1:0",), "selection.rounds=0: must be positive"),
        (("selection=sinkhorn", "normalise=true"), "normalise=True: must be false with"),
        (("selection=expert_choice", "balance=aux:sequence:1"), "balances the experts itself and does not go with"),
        (("selection=expert_choice", "score=softmax_after_top_k"), "must be softmax with"),
        (("selection=expert_choice", "normalise=true"), "normalise=True: must be false with"),
    ],
)
def test_what_does_not_go_together_is_one_fault_with_its_values(texts: tuple[str, ...], part: str) -> None:
    (fault,) = found(*texts)
    assert part in fault
    assert ROUTER in fault and "Works: " in fault


def test_experts_that_choose_have_no_bias_and_no_capacity() -> None:
    text = "\n".join(found("selection=expert_choice", "score=sigmoid", "balance=bias:0.1"))
    assert "does not go with model.moe.router.balance=bias:0.1" in text and "score=sigmoid: must be softmax" in text
    (fault,) = found("selection=expert_choice", capacity=Capacity(factor=1.0))
    assert "selection=expert_choice: gives every expert equally many tokens" in fault
    assert found("selection=sinkhorn", capacity=Capacity(factor=1.0)) == []


@pytest.mark.parametrize("text", ["selection=sinkhorn", "selection=expert_choice", "balance=quantile:0.5"])
def test_groups_go_with_plain_top_k_alone(text: str) -> None:
    router = next(layer.mlp for layer in RUN.model.layers if isinstance(layer.mlp, MoE)).router
    assert router.groups is not None
    plain = [parse_assignment(f"{ROUTER}.{t}") for t in ("normalise=false", text)]
    run, _ = override(RUN, plain)
    (fault,) = map(str, check_model(run.model))
    assert "Groups(total=3, kept=2" in fault and "does not go with" in fault


def test_quantile_balancing_needs_an_expert_that_is_not_chosen() -> None:
    (fault,) = found("balance=quantile:0.5", top_k=12)
    assert fault.startswith("model.moe.top_k=12: must be less than model.moe.experts=12")
    assert fault.endswith("Works: 1 to 11.")


def test_a_router_without_anything_is_plain_top_k() -> None:
    assert not Router(score="softmax", normalise=True).biased
    assert found() == []
