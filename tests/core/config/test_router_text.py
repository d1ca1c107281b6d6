"""Balances and selections as words: both ways, and what is said of words that are none."""

from __future__ import annotations

import pytest

from core.config.architecture import (
    AuxLoss,
    Balance,
    ExpertBias,
    ExpertChoice,
    QuantileBias,
    Selection,
    Sinkhorn,
    TopK,
    ZLoss,
)
from core.config.override import settings
from core.config.router_text import (
    TextError,
    balance_text,
    parse_balance,
    parse_selection,
    selection_text,
)
from core.config.serial import from_json, to_json
from tests.core.config.test_override import RUN, changed, faults_of

BALANCES: dict[str, tuple[Balance, ...]] = {
    "none": (),
    "z:0.001": (ZLoss(coefficient=0.001),),
    "aux:microbatch:0.01+z:0.001+bias:0.001": (
        AuxLoss(scope="microbatch", coefficient=0.01),
        ZLoss(coefficient=0.001),
        ExpertBias(rate=0.001),
    ),
    "aux:sequence:1e+20+aux:global_batch:2.0+quantile:0.5": (
        AuxLoss(scope="sequence", coefficient=1e20),
        AuxLoss(scope="global_batch", coefficient=2.0),
        QuantileBias(ema=0.5),
    ),
}
SELECTIONS: dict[str, Selection] = {
    "top_k": TopK(),
    "sinkhorn:1e-06:7": Sinkhorn(tolerance=1e-6, rounds=7),
    "expert_choice": ExpertChoice(),
}


@pytest.mark.parametrize(("text", "balance"), BALANCES.items())
def test_a_balance_is_its_text_both_ways(text: str, balance: tuple[Balance, ...]) -> None:
    assert parse_balance(text) == balance
    assert balance_text(balance) == text


@pytest.mark.parametrize(("text", "selection"), SELECTIONS.items())
def test_a_selection_is_its_text_and_its_json_both_ways(text: str, selection: Selection) -> None:
    assert parse_selection(text) == selection
    assert selection_text(selection) == text
    assert from_json(Selection, to_json(selection)) == selection


def test_what_a_selection_leaves_out_takes_its_default() -> None:
    assert parse_selection("sinkhorn") == Sinkhorn(tolerance=1e-4, rounds=1000)
    assert parse_selection("sinkhorn:0.5") == Sinkhorn(tolerance=0.5, rounds=1000)


def test_every_layer_with_experts_gets_the_balance_and_the_selection_of_the_command_line() -> None:
    new = changed(
        "model.moe.router.balance=aux:microbatch:0.01+z:1e-3", "model.moe.router.selection=sinkhorn:0.01"
    ).model.layers
    for layer in new[2:]:
        assert layer.mlp.router.balance == (AuxLoss(scope="microbatch", coefficient=0.01), ZLoss(coefficient=1e-3))
        assert layer.mlp.router.selection == Sinkhorn(tolerance=0.01)
    assert new[:2] == RUN.model.layers[:2]
    assert changed("model.moe.router.balance=none").model.layers[-1].mlp.router.balance == ()


def test_the_settings_of_a_run_show_them_as_they_are_written() -> None:
    found = settings(changed("model.moe.router.balance=bias:0.25", "model.moe.router.selection=expert_choice"))
    assert found["model.moe.router.balance"] == "bias:0.25"
    assert found["model.moe.router.selection"] == "expert_choice"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("balance=axu:microbatch:0.1", "'axu' is none of the balances aux, z, bias, quantile (did you mean aux?)"),
        ("balance=aux:micro_batch:0.1", "'micro_batch' is none of the scopes"),
        ("balance=aux:micro_batch:0.1", "(did you mean microbatch?)"),
        ("balance=aux:0.1", "'aux:0.1' needs a scope and a coefficient, as aux:microbatch:0.01"),
        ("balance=z", "'z' needs a coefficient"),
        ("balance=z:0.1+", "'' is none of the balances"),
        ("balance=z:much", "'much' in 'z:much' must be a finite number"),
        ("balance=bias:inf", "must be a finite number"),
        ("selection=sinkhorm", "(did you mean sinkhorn?)"),
        ("selection=top_k:3", "'top_k:3' needs no value"),
        ("selection=sinkhorn:1e-4:2.5", "must be a whole number"),
        ("selection=sinkhorn:1:2:3", "at most"),
        ("balances=z:1", "did you mean model.moe.router.balance"),
    ],
)
def test_a_word_that_is_none_says_what_would_be(text: str, part: str) -> None:
    (fault,) = faults_of(f"model.moe.router.{text}")
    assert part in fault
    assert "Works: " in fault


@pytest.mark.parametrize("text", ["", "+", "aux", "sinkhorn"])
def test_a_balance_is_not_what_only_looks_like_one(text: str) -> None:
    with pytest.raises(TextError):
        parse_balance(text)
