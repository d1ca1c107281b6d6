"""A model of ungated experts with biases: trained, saved and loaded under unlike mappings, it is the model of one rank.

Biases are cut as nothing else is: over etp by features of the output, where the matrices are cut by neurons.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config.architecture import Dense, Layer, MoE, SquaredReLU
from core.config.mapping import ParallelConfig
from tests.ckpt.test_any_mapping import TENSORS, link
from tests.core.tiny import Case, assemble, mixtral, train
from tests.core.training.test_parity import ADAM, losses
from tests.ranks import Ranks


def ungated() -> Case:
    """A dense and two MoE layers without gates, the experts with biases; widths divide by nothing."""
    model = mixtral()
    layer = model.layers[0]
    assert isinstance(layer.mlp, MoE)
    moe = replace(layer.mlp, experts=8, expert_ffn=7, activation=SquaredReLU(), bias=True)
    dense = Layer(attention=layer.attention, mlp=Dense(ffn=11, activation=SquaredReLU()))
    layers = (dense, *(Layer(attention=layer.attention, mlp=moe),) * 2)
    return Case(model=replace(model, layers=layers), microbatch=2, optimizer=ADAM, dtype=torch.float32)


LINKS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(etp=2)),
    (4, ParallelConfig(tp=2, ep=2, etp=2)),
    (4, ParallelConfig(ep=2, sharding="fsdp")),
    (2, ParallelConfig(pp=2, schedule="zero_bubble")),
    (4, ParallelConfig(etp=2, sharding="fsdp")),
]


def test_biases_and_ungated_experts_go_on_under_any_mapping_from_what_any_other_has_saved(
    ranks: Ranks, tmp_path: Path
) -> None:
    case = ungated()
    truth = train(replace(case, steps=len(LINKS)))
    before: str | None = None
    expected: dict[str, torch.Tensor] = {}
    for step, (world, parallel) in enumerate(LINKS):
        store = ("zarr", "torch_dist")[step % 2]
        arguments = replace(case, parallel=parallel), step, before, tmp_path, store
        passed = ranks.run(link, world, *arguments, timeout_seconds=120.0)
        found = assemble([p.loaded for p in passed])
        if before is not None:
            assert found.keys() == expected.keys()
            for name, value in found.items():
                assert torch.equal(value, expected[name]), f"{parallel}: {name} is not what was saved"
        for p in passed:
            assert losses(p.result) == pytest.approx(losses(truth.results[step]), rel=1e-5), parallel
        expected, before = assemble([p.saved for p in passed]), passed[0].address
    last = assemble([truth])
    for name, value in last.items():
        torch.testing.assert_close(
            expected[f"model.{name}"], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    moved = [name for name in last if name.endswith("_bias")]
    assert len(moved) == 4 and all(bool(last[name].any()) for name in moved), "biases that never moved prove nothing"
    assert all(any(n.startswith(kind) and n.endswith("down_bias") for n in expected) for kind in TENSORS)
