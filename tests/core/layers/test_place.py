"""Modules are built in the dtype and on the device of their place."""

from __future__ import annotations

import torch
from torch import nn

from core.config.architecture import RMSNorm as RMSNormConfig
from core.layers.embedding import Vocabulary
from core.layers.linear import Linear
from core.layers.mlp import MLP
from core.layers.norm import RMSNorm
from core.state.inventory import declared
from tests.core.layers.places import place


def test_every_layer_follows_its_place_and_declares_what_it_owns() -> None:
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float32, "meta"), (torch.float64, "cpu")):
        here = place(dtype, device)
        layers: list[nn.Module] = [
            Linear(5, 3, init_std=0.1, place=here),
            MLP(5, 7, init_std=0.1, place=here),
            Vocabulary(11, 5, init_std=0.1, place=here),
            RMSNorm(RMSNormConfig(eps=1e-6), 5, place=here),
        ]
        for layer in layers:
            for entry in declared(layer).values():
                assert (entry.tensor.dtype, entry.tensor.device.type) == (dtype, device)
                assert entry.spec.replicas == "dense" and entry.spec.box.shape == entry.spec.shape


def test_the_place_gives_uninitialised_tensors_of_any_shape() -> None:
    assert place().empty().shape == ()
    assert place(device="meta").empty(0, 10**9, 10**9).device.type == "meta"
