"""A module tree as canonical state: nothing undeclared, nothing twice, and the same initial values under every mapping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from core.parallel.groups import Group, one_rank
from core.state.box import Box, part, whole
from core.state.inventory import declared, initialise, inventory, replicas
from core.state.seed import normal
from core.state.spec import Constant, Normal, Replicas, TensorSpec


class Leaf(nn.Module):
    """A weight [12, 3], or a piece of it along dimension 0, and a buffer."""

    def __init__(self, index: int = 0, count: int = 1, *, kind: Replicas = "dense", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.box, self.kind = part((12, 3), 0, index, count), kind
        self.weight = nn.Parameter(torch.full(self.box.shape, torch.nan, dtype=dtype))
        self.register_buffer("bias", torch.full((5,), torch.nan))

    def specs(self) -> dict[str, TensorSpec]:
        bias = TensorSpec(shape=(5,), box=whole((5,)), replicas="dense", init=Constant(value=0.25), trained=False)
        return {
            "weight": TensorSpec(shape=(12, 3), box=self.box, replicas=self.kind, init=Normal(std=0.5)),
            "bias": bias,
        }


class Tree(nn.Module):
    """Leaves under two names, one of them shared."""

    def __init__(self, *leaves: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(leaves)
        self.again = leaves[0]


def weight(model: nn.Module, layer: int) -> torch.Tensor:
    return model.get_parameter(f"layers.{layer}.weight").detach()


def group(position: int, size: int) -> Group:
    return Group(ranks=tuple(range(size)), position=position, handle=None)


def test_every_tensor_is_found_once_by_its_path_in_order() -> None:
    model = Tree(*(Leaf() for _ in range(11)))
    names = list(declared(model))
    assert names == [f"layers.{i}.{name}" for i in range(11) for name in ("weight", "bias")]
    assert declared(model)["layers.10.weight"].tensor is model.layers[10].weight
    assert list(declared(Leaf())) == ["weight", "bias"]


def test_a_tensor_without_a_declaration_is_our_mistake() -> None:
    model = Tree(Leaf())
    model.layers[0].register_buffer("forgotten", torch.zeros(1))
    with pytest.raises(AssertionError, match=r"layers\.0: owns .*forgotten.* but declares"):
        declared(model)
    with pytest.raises(AssertionError, match="declares"):
        declared(nn.Linear(2, 2))


def test_a_declaration_without_a_tensor_is_our_mistake() -> None:
    model = Tree(Leaf())
    del model.layers[0].bias
    with pytest.raises(AssertionError, match=r"owns \['weight'\] but declares \['bias', 'weight'\]"):
        declared(model)


def test_a_tensor_of_another_shape_than_declared_is_our_mistake() -> None:
    model = Tree(Leaf())
    model.layers[0].weight = nn.Parameter(torch.zeros(3, 12))
    with pytest.raises(AssertionError, match=r"layers\.0\.weight: \(3, 12\) is not \(12, 3\)"):
        declared(model)


def test_pieces_share_their_data_with_the_model_and_say_which_copy_they_are() -> None:
    groups = replace(one_rank(), adjacent={1: group(3, 4)}, edp=group(1, 2))
    model = Tree(Leaf(), Leaf(2, 3, kind="expert"))
    initialise(model, 1)
    pieces = inventory(model, groups)
    dense, expert = pieces["layers.0.weight"], pieces["layers.1.weight"]
    assert (dense.copy, dense.copies, expert.copy, expert.copies) == (3, 4, 1, 2)
    assert expert.shape == (12, 3) and expert.box == Box(offset=(8, 0), shape=(4, 3))
    assert not expert.data.requires_grad
    expert.data.fill_(7.0)
    assert weight(model, 1).tolist() == [[7.0] * 3] * 4
    assert replicas(declared(model)["layers.1.bias"].spec, groups) is groups.adjacent[1]


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_initial_values_are_the_same_however_a_tensor_is_cut(count: int) -> None:
    parts = []
    for index in range(count):
        model = Tree(Leaf(index, count, kind="expert"))
        initialise(model, 42)
        parts.append(weight(model, 0))
        assert model.get_buffer("layers.0.bias").tolist() == [0.25] * 5
    assert torch.equal(torch.cat(parts), normal(42, "layers.0.weight", whole((12, 3)), std=0.5))


def test_initial_values_in_bfloat16_are_those_of_float32_rounded() -> None:
    wide, narrow = Leaf(), Leaf(dtype=torch.bfloat16)
    initialise(wide, 3)
    initialise(narrow, 3)
    assert torch.equal(narrow.weight, wide.weight.to(torch.bfloat16))


def test_equal_modules_under_other_names_or_seeds_start_differently() -> None:
    model, other = Tree(Leaf(), Leaf()), Tree(Leaf())
    initialise(model, 0)
    initialise(other, 1)
    assert not torch.equal(weight(model, 0), weight(model, 1))
    assert not torch.equal(weight(model, 0), weight(other, 0))
