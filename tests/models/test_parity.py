"""Ours against transformers on random tiny models: logits, and the gradient of every parameter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ckpt.huggingface import load_pretrained
from ckpt.translate import import_state
from core.config.family import find_family
from core.parallel.groups import one_rank
from core.state.inventory import inventory
from core.state.rules import choose
from core.state.sharded import ShardedTensor
from core.transformer.stage import Stage
from tests.models import oracle

# Odd lengths, one of a single token, all past the trained length of some of the stretched rotations.
LENGTHS = st.sampled_from([(2,), (23,), (1, 7, 17), (5, 1, 1, 11), (13, 13)])


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(family: str) -> None:
    @settings(max_examples=30, database=None)
    @given(config=oracle.settings_of(family), lengths=LENGTHS, seed=st.integers(0, 99))
    def compare(config: dict[str, Any], lengths: tuple[int, ...], seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            theirs = oracle.save(family, config, Path(folder), seed=seed)
            ours = load_pretrained(folder)
        generator = torch.Generator().manual_seed(seed)
        tokens_T = torch.randint(0, config["vocab_size"], (sum(lengths),), generator=generator)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        expected = oracle.logits_apart(theirs, tokens_T, lengths)
        got = ours(tokens_T, cu_seqlens)
        assert got.dtype == torch.float32
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        # Any direction does as a loss: the gradient of logits is then that direction.
        direction = torch.randn(expected.shape, generator=generator)
        (expected * direction).sum().backward()
        (got * direction).sum().backward()
        check_gradients(family, ours, theirs)

    compare()


def check_gradients(family: str, ours: Stage, theirs: nn.Module) -> None:
    """Every gradient within 1e-4 of theirs, measured against the largest of its tensor, where that is more than the rounding
    of the model's largest gradient, of which a nearly cancelled one is left; or zero but for rounding in both, as that of a
    router whose only chosen weight is always one."""
    expected = translated_gradients(family, ours, theirs)
    parameters = dict(ours.named_parameters())
    assert set(expected) == set(parameters)
    rounding = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        wrong, largest = (parameter.grad - expected[name]).abs().max(), expected[name].abs().max()
        assert wrong <= max(1e-4 * largest, 0.1 * rounding) or max(wrong, largest) < rounding, (
            f"{name}: {wrong} of {largest}"
        )


def translated_gradients(family: str, ours: Stage, theirs: nn.Module) -> dict[str, Tensor]:
    """The gradients of transformers' parameters, which are named as its fused format is, under our names."""
    found = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    pieces = inventory(ours, one_rank())
    targets = {
        name: ShardedTensor(name=name, shape=pieces[name].shape, box=pieces[name].box, data=torch.zeros_like(parameter))
        for name, parameter in ours.named_parameters()
    }
    rules = find_family(family).huggingface.rules(ours.config)
    shapes = {name: target.shape for name, target in targets.items()}
    choice = choose(rules, shapes, {name: tuple(grad.shape) for name, grad in found.items()})
    assert not choice.faults, choice.faults.lines()
    import_state(rules, choice, targets, lambda name, box: found[name][box.slices])
    return {name: target.data for name, target in targets.items()}
