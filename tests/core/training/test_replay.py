"""Router replay in training: what was recorded under one mapping is done again under another, in the backward too (H1, H2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.config.architecture import Capacity, Dense, ExpertChoice, ModelConfig, MoE, MultiToken
from core.config.mapping import ParallelConfig
from core.errors import DataError
from core.moe.replay import RouterReplay, moe_layers
from core.moe.replay_file import read_replay, write_replay
from core.optim.make import make_optimizer
from core.parallel.groups import groups_for
from core.pipeline.layout import layout_of
from core.state.inventory import initialise
from core.training.replay import Recording, replayed
from core.training.step import StepResult, train_step
from core.training.work import run_microbatches
from core.transformer.block import Block
from core.transformer.context import TokenBatch
from core.transformer.stage import Stage, build_model
from tests.core.tiny import PLAIN, WINDOW, deepseek, microbatches, mixtral, qwen3
from tests.ranks import Ranks

TOKENS = 8 * WINDOW
PLAIN_GRADIENTS = replace(PLAIN, weight_decay=0.0)


def four_layers() -> ModelConfig:
    """The first one dense, and one module that predicts ahead."""
    model = mixtral()
    moe = model.layers[0]
    dense = replace(moe, mlp=Dense(ffn=24))
    return replace(model, layers=(dense, moe, moe, moe), predict_ahead=MultiToken(depth=1, loss_weight=0.3))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step under a mapping: its routing is recorded, and replayed from a file where there is one."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    microbatch: int = 8
    path: Path | None = None
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a rank knows afterwards. moved: how its parameters were, which shows every gradient. asked: how often every router was asked in forward and backward, and for which experts last."""

    result: StepResult
    whole: dict[str, Tensor]
    moved: dict[str, Tensor]
    asked: dict[str, list[Tensor]]


def stage(job: Job) -> Stage:
    layout = layout_of(job.model, job.parallel)
    groups = groups_for(job.parallel, embedding_stages=layout.embedding_stages(job.model.tied_embeddings))
    model = build_model(job.model, groups=groups, parallel=job.parallel, dtype=torch.float64)
    initialise(model, 7)
    return model


def batches_of(model: Stage, job: Job, step: int = 0) -> list[TokenBatch]:
    groups = model.place.groups
    found = microbatches(step, groups.dp.position, groups.dp.size, job.microbatch, groups)
    return found if job.path is None else [from_file(batch, model, job.path) for batch in found]


def from_file(batch: TokenBatch, model: Stage, path: Path) -> TokenBatch:
    assert batch.position is not None
    tokens = batch.tokens.shape[0]
    return replayed(batch, read_replay(path, model.config, first=batch.position.first, tokens=tokens), model)


def run(job: Job) -> Done:
    """One step in the world that there is."""
    model = stage(job)
    optimizer = make_optimizer(model, PLAIN_GRADIENTS, model.place.groups, job.parallel)
    asked = _watch(model, job.recompute)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batches, recording = batches_of(model, job), Recording()
    result = train_step(model, optimizer, batches, rate=1.0, groups=model.place.groups, recording=recording)
    optimizer.wait_all()
    whole = recording.whole(batches, model)
    found = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return Done(result=result, whole=whole, moved=found, asked=asked)


def run_all(rank: int, world: int, jobs: list[Job]) -> list[Done]:
    return [run(job) for job in jobs]


def _watch(model: Stage, recompute: bool) -> dict[str, list[Tensor]]:
    """Note what every router chooses; with recompute, every layer is run again in the backward."""
    asked: dict[str, list[Tensor]] = {}
    for block in (module for module in model.modules() if isinstance(module, Block)):
        if not isinstance(block.mlp, torch.nn.Module) or "router" not in dict(block.mlp.named_children()):
            continue
        note = asked.setdefault(block.path, [])
        block.mlp.router.register_forward_hook(lambda _m, _i, out, note=note: note.append(out.experts_TK.clone()))
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return asked


def prescribed(model: ModelConfig, shift: int = 1) -> dict[str, Tensor]:
    """Experts that no router would choose: every layer others, and each token others."""
    return {
        name: (torch.arange(TOKENS)[:, None] * 3 + torch.arange(moe.top_k) * 2 + number + shift) % moe.experts
        for number, (name, moe) in enumerate(moe_layers(model).items())
    }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def chosen_by_experts() -> ModelConfig:
    """A token has any number of experts."""
    model = mixtral(())
    moe = model.layers[0].mlp
    assert isinstance(moe, MoE)
    router = replace(moe.router, score="softmax", normalise=False, selection=ExpertChoice())
    return replace(model, layers=(replace(model.layers[0], mlp=replace(moe, router=router)),) * 2)


MODELS = {"mixtral": mixtral(), "qwen3": qwen3(), "deepseek": deepseek(), "chosen by experts": chosen_by_experts()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_replaying_a_recorded_run_is_bitwise_that_run(model: ModelConfig, tmp_path: Path) -> None:
    job = Job(model=model, microbatch=4)
    recorded = run(job)
    write_replay(tmp_path / "a", recorded.whole, model)
    again = run(replace(job, path=tmp_path / "a", recompute=True))
    assert again.result.loss == recorded.result.loss and again.result.balance == recorded.result.balance
    assert again.result.gradient_norm == recorded.result.gradient_norm
    equal(again.moved, recorded.moved)
    equal(again.whole, recorded.whole)
    assert {name: len(calls) for name, calls in again.asked.items()} == dict.fromkeys(moe_layers(model), 4)


def test_what_is_recorded_is_what_routers_chose_before_experts_were_full(tmp_path: Path) -> None:
    model = mixtral()
    moe = model.layers[0].mlp
    assert isinstance(moe, MoE)
    tight = replace(moe, capacity=Capacity(factor=0.5, drop="weight"))
    model = replace(model, layers=(replace(model.layers[0], mlp=tight),) * 2)
    job = Job(model=model)
    recorded = run(job)
    assert min(int(ids.min()) for ids in recorded.whole.values()) == 0
    assert min(int(calls[0].min()) for calls in recorded.asked.values()) == -1
    write_replay(tmp_path / "a", recorded.whole, model)
    equal(run(replace(job, path=tmp_path / "a")).moved, recorded.moved)


def test_h1_experts_that_are_not_the_own_choice_change_the_loss_and_still_train_the_gate(tmp_path: Path) -> None:
    model = mixtral(balance=())
    own = run(Job(model=model))
    other = prescribed(model)
    write_replay(tmp_path / "a", other, model)
    found = run(Job(model=model, path=tmp_path / "a"))
    equal(found.whole, {name: ids.to(torch.int32) for name, ids in other.items()})
    assert abs(found.result.loss - own.result.loss) > 1e-4
    gates = [moved for name, moved in found.moved.items() if name.endswith("router.weight")]
    assert len(gates) == 2 and all(float(moved.abs().max()) > 1e-6 for moved in gates)


MAPPINGS = {
    2: [
        ParallelConfig(pp=2),
        ParallelConfig(tp=2),
        ParallelConfig(cp=2),
        ParallelConfig(ep=2),
        ParallelConfig(pp=2, schedule="zero_bubble"),
    ],
    3: [ParallelConfig(pp=3), ParallelConfig(cp=3)],
    4: [ParallelConfig(tp=2, pp=2), ParallelConfig(cp=2, ep=4)],
}


def _model_parallel(parallel: ParallelConfig) -> int:
    return parallel.tp * parallel.cp * parallel.pp


@pytest.mark.parametrize("world", MAPPINGS)
def test_h2_each_layer_gets_its_experts_under_every_mapping_in_microbatches_and_recomputation(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    """Four layers, the first dense, two microbatches a replica: experts of every token of every layer are other ones."""
    model = four_layers()
    other = prescribed(model)
    write_replay(tmp_path / "a", other, model)
    alone = run(Job(model=model, path=tmp_path / "a", microbatch=2))
    jobs = [
        Job(model=model, parallel=parallel, path=tmp_path / "a", microbatch=2, recompute=True)
        for parallel in MAPPINGS[world]
    ]
    for rank, done in enumerate(ranks.run(run_all, world, jobs)):
        for job, found in zip(jobs, done, strict=True):
            equal(found.whole, {name: ids.to(torch.int32) for name, ids in other.items()})
            assert found.result.loss == pytest.approx(alone.result.loss, rel=1e-9), job.parallel
            assert found.result.ahead == pytest.approx(alone.result.ahead, rel=1e-9)
            assert found.result.gradient_norm == pytest.approx(alone.result.gradient_norm, rel=1e-9), job.parallel
            assert set(found.asked) <= set(other), rank
            # once forward, once again in the backward, for each of the microbatches of a replica
            assert {len(calls) for calls in found.asked.values()} <= {8 // (world // _model_parallel(job.parallel))}


def test_h2_recorded_under_any_mapping_is_what_one_rank_records(ranks: Ranks) -> None:
    model = four_layers()
    alone = run(Job(model=model)).whole
    assert set(alone) == {"layers.1", "layers.2", "layers.3", "mtp.0.layer"}
    assert {ids.shape for ids in alone.values()} == {(TOKENS, 2)}
    jobs = [Job(model=model, parallel=parallel, microbatch=2) for parallel in MAPPINGS[2]]
    for done in ranks.run(run_all, 2, jobs):
        for found in done:
            equal(found.whole, alone)


def in_memory(rank: int, world: int, parallel: ParallelConfig) -> tuple[dict[str, Tensor], float, float]:
    """Evaluation alone is recorded, and replayed from memory by each stage with its own layers."""
    model = stage(Job(model=four_layers(), parallel=parallel))
    batches, recording = batches_of(model, Job(model=model.config, microbatch=4)), Recording()
    first = run_microbatches(model, batches, "loss", recording=recording)
    replays = recording.replays(batches, model)
    batches = [replayed(batch, _without_ahead(replay), model) for batch, replay in zip(batches, replays, strict=True)]
    again = run_microbatches(model, batches, "loss")
    return recording.whole(batches, model), float(first.losses[0]), float(again.losses[0])


def _without_ahead(replay: RouterReplay) -> RouterReplay:
    """An inference engine does not run the modules that predict ahead."""
    return replace(replay, own=("mtp.0.layer",))


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(tp=2), ParallelConfig(cp=2)], ids=str)
def test_evaluation_is_recorded_too_and_stages_replay_it_from_memory(ranks: Ranks, parallel: ParallelConfig) -> None:
    for whole, first, again in ranks.run(in_memory, 2, parallel):
        assert first == again
        assert set(whole) == {"layers.1", "layers.2", "layers.3"}
        assert min(int(ids.min()) for ids in whole.values()) == 0


def test_padding_is_recorded_as_nothing_and_replayed_as_nothing(tmp_path: Path) -> None:
    model = stage(Job(model=mixtral()))
    batch = microbatches(0)[0]
    valid = torch.ones(TOKENS, dtype=torch.bool)
    valid[[0, 50, TOKENS - 1]] = False
    batch = replace(batch, valid=valid)
    recording = Recording()
    first = run_microbatches(model, [batch], "loss", recording=recording)
    whole = recording.whole([batch], model)
    for ids in whole.values():
        assert (ids[~valid] == -1).all() and (ids[valid] >= 0).all()
    again = run_microbatches(model, [replayed(batch, RouterReplay(experts=whole), model)], "loss")
    assert torch.equal(first.losses, again.losses)
    with pytest.raises(DataError, match="token 0 has no expert"):
        replayed(replace(batch, valid=None), RouterReplay(experts=whole), model)
