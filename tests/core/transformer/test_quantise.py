"""What giving a model its recipe tries on the device first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config.recipe import RECIPES, RecipeName
from core.precision.formats import Format
from core.precision.operands import format_of
from core.transformer import quantise as module
from core.transformer.quantise import try_formats
from core.transformer.stage import build_model
from tests.core.tiny import mixtral


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Format, str]]:
    """What is tried, and on which kind of device; the trials themselves are left out."""
    calls: list[tuple[Format, str]] = []
    monkeypatch.setattr(module, "self_check", lambda format, device: calls.append((format, device.type)))
    return calls


@pytest.mark.parametrize("name", RECIPES)
def test_every_format_of_a_recipe_is_tried_once_on_a_gpu(tried: list[tuple[Format, str]], name: RecipeName) -> None:
    try_formats(RECIPES[name], torch.device("cuda"))
    operands = [operand for _, operand in RECIPES[name].operands()]
    assert {format for format, _ in tried} == {format_of(operand) for operand in operands}
    assert len(tried) == len(set(tried)) and {kind for _, kind in tried} == {"cuda"}


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_nothing_is_tried_where_the_definition_or_nothing_runs(tried: list[tuple[Format, str]], kind: str) -> None:
    try_formats(RECIPES["nvfp4"], torch.device(kind))
    assert tried == []


def test_building_a_model_tries_its_recipe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(module, "try_formats", lambda recipe, device: asked.append((recipe, device)))
    build_model(mixtral())
    assert asked == []
    recipe = replace(RECIPES["mxfp8"], high_first=0, high_last=0)
    build_model(mixtral(), recipe=recipe, seed=1)
    assert asked == [(recipe, torch.device("cpu"))]
