"""One run that changes its mapping at every step: saved under one, loaded under the next, in both stores and with both optimizers.

Each link of a chain is a world of its own. It loads what the link before has saved, holds it against that bit by bit, trains a step, and
saves. The losses are those of one rank that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ckpt.files.address import open_files
from ckpt.load import load
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from core.config.mapping import ParallelConfig
from core.optim.make import make_optimizer
from core.optim.protocol import Optimizer
from core.parallel.groups import Groups, groups_for
from core.pipeline.layout import layout_of
from core.state.inventory import initialise, inventory
from core.state.sharded import ShardedTensor
from core.training.step import StepResult, train_step
from core.transformer.stage import Stage, build_model
from tests.core.tiny import Case, Trained, assemble, microbatches, train
from tests.core.training.mappings import MODELS, drawn, label
from tests.core.training.test_parity import ADAM, losses
from tests.ranks import Ranks

STORES = ("zarr", "torch_dist")
TENSORS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")

Link = tuple[int, ParallelConfig]
# Two that share nothing: tensor and pipeline parallel with sharded states, then context parallel with split experts under FSDP.
SPREAD = [
    (8, ParallelConfig(tp=2, ep=4, pp=2, layout="Ett|tmmL")),
    (4, ParallelConfig(cp=2, ep=2, etp=2, sharding="fsdp")),
]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What one rank of a link knows: the checkpoint it wrote, its pieces after loading and when it saved, and its step."""

    address: str
    loaded: Trained
    saved: Trained
    result: StepResult


def replicas_of(world: int, parallel: ParallelConfig) -> int:
    return world // (parallel.tp * parallel.cp * parallel.pp)


def chains() -> dict[str, list[Link]]:
    """Per model, the foldings of 1, 2 and 4 ranks and some of 8 that the draw gives it, in the order of the draw."""
    found: dict[str, list[Link]] = {name: [] for name in MODELS}
    for world, cases in (
        (1, drawn(1, seed=4)),
        (2, drawn(2, seed=4)),
        (4, drawn(4, seed=4)),
        (8, drawn(8, 14, seed=4)),
    ):
        for name, parallel in cases:
            if replicas_of(world, parallel) <= 4:
                found[name].append((world, parallel))
    # Not small worlds first: every link should be a step between unlike ones.
    mixed = {name: links[::2] + links[1::2] for name, links in found.items()}
    return {**mixed, "deepseek": [*SPREAD, *mixed["deepseek"]]}


CHAINS = chains()


def case_of(name: str, world: int, parallel: ParallelConfig) -> Case:
    """Two windows at a time, but for a balance over all replicas' tokens so far: there, four over all replicas."""
    microbatch = 4 // replicas_of(world, parallel) if name == "qwen3" else 2
    return Case(model=MODELS[name], parallel=parallel, microbatch=microbatch, optimizer=ADAM, dtype=torch.float32)


def state_of(model: Stage, optimizer: Optimizer, groups: Groups) -> list[ShardedTensor]:
    optimizer.wait_all()
    pieces = [replace(piece, name=f"model.{name}") for name, piece in inventory(model, groups).items()]
    return pieces + optimizer.state()


def pieces_of(state: Sequence[ShardedTensor]) -> Trained:
    return Trained(results=[], pieces=[(t.name, t.shape, t.box, t.data.clone()) for t in state])


def link(rank: int, world: int, case: Case, step: int, before: str | None, run: Path, store: str) -> Passed:
    """Load `before`, into NaN; train step `step`; save."""
    groups = groups_for(
        case.parallel,
        embedding_stages=layout_of(case.model, case.parallel).embedding_stages(case.model.tied_embeddings),
    )
    model = build_model(case.model, groups=groups, parallel=case.parallel, dtype=case.dtype)
    if before is None:
        initialise(model, 7)
    optimizer = make_optimizer(model, case.optimizer, groups, case.parallel)
    state = state_of(model, optimizer, groups)
    if before is not None:
        for tensor in state:
            tensor.data.fill_(torch.nan)
        load(before, state, groups.world)
        optimizer.set_steps(step)
        state = state_of(model, optimizer, groups)
    loaded = pieces_of(state)
    batches = microbatches(step, groups.dp.position, groups.dp.size, case.microbatch, groups)
    result = train_step(model, optimizer, batches, rate=case.optimizer.learning_rate, groups=groups)
    state = state_of(model, optimizer, groups)
    address = save(run, step + 1, state, {"step": step + 1}, groups.world, Saving(store=store, keep=1))
    return Passed(address=address, loaded=loaded, saved=pieces_of(state), result=result)


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_goes_on_under_any_mapping_from_what_any_other_has_saved(ranks: Ranks, tmp_path: Path, name: str) -> None:
    links = CHAINS[name]
    truth = train(replace(case_of(name, 1, ParallelConfig()), steps=len(links))).results
    before: str | None = None
    expected: dict[str, torch.Tensor] = {}
    for step, (world, parallel) in enumerate(links):
        store, told = STORES[step % 2], f"step {step}: {world} ranks: {label(parallel)}"
        passed = ranks.run(
            link, world, case_of(name, world, parallel), step, before, tmp_path, store, timeout_seconds=120.0
        )
        found = assemble([p.loaded for p in passed])
        if before is not None:
            assert found.keys() == expected.keys(), told
            for tensor, value in found.items():
                assert torch.equal(value, expected[tensor]), f"{told}: {tensor} is not what was saved"
        for p in passed:
            assert losses(p.result) == pytest.approx(losses(truth[step]), rel=1e-5), told
        expected, before = assemble([p.saved for p in passed]), passed[0].address
        assert read_manifest(open_files(before)).store == store
    assert all(any(n.startswith(kind) for n in expected) for kind in TENSORS)


def test_the_chains_hold_sixty_pairs_all_axes_both_optimizers_and_both_ways_between_them() -> None:
    """What the drawn chains must not lose when the draw changes."""
    pairs = [pair for links in CHAINS.values() for pair in pairwise(links)]
    assert len(pairs) >= 60
    for axis in ("tp", "cp", "pp", "ep", "etp", "vpp"):
        sizes = {(getattr(a, axis) > 1, getattr(b, axis) > 1) for (_, a), (_, b) in pairs}
        assert sizes == {(False, False), (False, True), (True, False), (True, True)}, axis
    ways = {(a.sharding, b.sharding) for (_, a), (_, b) in pairs}
    assert ways == {("zero1", "zero1"), ("zero1", "fsdp"), ("fsdp", "zero1"), ("fsdp", "fsdp")}
    assert {world for links in CHAINS.values() for world, _ in links} == {1, 2, 4, 8}
    # Stores change at every link, so that each of these ways is taken from each store where it is taken twice in a row of links.
    stores = {
        (STORES[step % 2], a.sharding, b.sharding)
        for links in CHAINS.values()
        for step, ((_, a), (_, b)) in enumerate(pairwise(links))
    }
    assert len(stores) == 8
