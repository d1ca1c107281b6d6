"""The loop: order of what it does, stopping together, and going on after a checkpoint as if nothing had happened."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt.asynchronous import AsynchronousSaver
from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.save import Saving
from ckpt.shelf.address import latest
from ckpt.staging import Staging
from core.config.architecture import ExpertBias, ModelConfig
from core.config.flops import flops_per_token
from core.config.mapping import ParallelConfig
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.data.loader import Loader
from core.data.storage import TokenSplit
from core.errors import CheckpointError
from core.optim.make import make_optimizer
from core.optim.schedules import learning_rate
from core.parallel.groups import Groups, groups_for
from core.pipeline.layout import layout_of
from core.state.inventory import initialise
from core.training.loop import Hooks, Progress, Trainer
from core.training.metrics import StepMetrics
from core.training.step import NotFiniteError
from core.transformer.stage import build_model
from launch.worker import training_state
from tests.core.tiny import SEQUENCE_LOSS, Z_LOSS, deepseek, mixtral, qwen3
from tests.ranks import Ranks

# No balance over the global batch: with several microbatches it depends on which windows lie together.
MODEL = deepseek((ExpertBias(rate=0.01), SEQUENCE_LOSS, Z_LOSS))
OPTIMIZER = OptimizerConfig(learning_rate=0.02, min_learning_rate=0.001, warmup_steps=2, clip_norm=1.0)


def run_of(model: ModelConfig, *, ep: int = 1, steps: int = 4, **train: Any) -> RunConfig:
    sizes = {"sequence_tokens": 11, "global_batch": 4, "microbatch": 1, "eval_interval": 3, "eval_sequences": 3}
    return RunConfig(
        family="none",
        size="tiny",
        hardware="cpu",
        ranks=1,
        model=model,
        parallel=ParallelConfig(ep=ep),
        train=TrainConfig(steps=steps, schedule_steps=6, seed=5, **(sizes | train)),
        optimizer=OPTIMIZER,
        data=DataConfig(),
        precision=PrecisionConfig(),
        checkpoint=CheckpointConfig(interval=2),
    )


def split_of(name: str) -> TokenSplit:
    """Documents of odd lengths over 31 tokens, the last of which ends a document."""
    generator = np.random.default_rng(len(name))
    lengths = [7, 1, 23, 12, 5, 40, 2, 19, 31, 8, 13, 60]
    tokens = generator.integers(0, 30, sum(lengths)).astype(np.uint16)
    offsets = np.array([0, *accumulate(lengths)], dtype=np.int64)
    tokens[offsets[1:] - 1] = 30
    return TokenSplit(name=name, folder=Path("made-by-hand"), vocab=31, tokens=tokens, offsets=offsets)


class Rig:
    """A trainer with everything that it needs, and a log of what it called."""

    def __init__(self, run: RunConfig, dtype: torch.dtype = torch.float64) -> None:
        self.run = run
        stages = layout_of(run.model, run.parallel).embedding_stages(run.model.tied_embeddings)
        self.groups: Groups = groups_for(run.parallel, embedding_stages=stages)
        self.model = build_model(run.model, groups=self.groups, parallel=run.parallel, dtype=dtype)
        initialise(self.model, run.train.seed)
        self.optimizer = make_optimizer(self.model, run.optimizer, self.groups, run.parallel)
        train, validation = (self._loader(split_of(name)) for name in ("train", "validation"))
        self.trainer = Trainer(
            run, self.model, self.optimizer, self.groups, train=train, validation=validation, matmul_rate=1e9
        )
        self.calls: list[tuple[str, int]] = []
        self.metrics: list[StepMetrics] = []
        self.saved: dict[int, dict[str, Tensor]] = {}

    def _loader(self, split: TokenSplit) -> Loader:
        train, dp = self.run.train, self.groups.dp
        return Loader(
            split,
            sequence_tokens=train.sequence_tokens,
            global_batch=train.global_batch,
            microbatch=train.microbatch,
            seed=train.seed,
            replica=dp.position,
            replicas=dp.size,
        )

    def go(self, start: Progress | None = None, *, stop_after: int | None = None, out: Path | None = None) -> Progress:
        """Train; stop_after: this rank is asked to stop once that many steps are done. out: where checkpoints go."""

        saver = None if out is None else AsynchronousSaver(out, self.groups.checkpoint, Saving(keep=3))

        def keep(step: int, tokens: int) -> None:
            self.calls.append(("save", step))
            if saver is not None:
                extra = {"step": step, "tokens": tokens}
                self.saved[step] = self.tensors()
                saver.save(step, training_state(self.model, self.optimizer, self.groups), extra)

        def record(metrics: StepMetrics) -> None:
            self.calls.append(("record", metrics.step))
            self.metrics.append(metrics)

        def stop() -> bool:
            return stop_after is not None and len(self.metrics) >= stop_after

        hooks = Hooks(save=keep, record=record, stop=stop)
        if saver is not None:
            hooks = replace(hooks, before_update=saver.before_update, failed=lambda: saver.failed, finish=saver.wait)
        return self.trainer.go(start or Progress(step=0, tokens=0), hooks)

    def restore(self, out: Path) -> Progress:
        """Poison everything, then load the newest checkpoint."""
        state = training_state(self.model, self.optimizer, self.groups)
        for tensor in state:
            tensor.data.fill_(torch.nan)
        folder = latest(out)
        assert folder is not None
        extra = load(folder, state, self.groups.world)
        self.optimizer.set_steps(int(extra["step"]))
        return Progress(step=int(extra["step"]), tokens=int(extra["tokens"]))

    def losses(self) -> list[tuple[float, ...]]:
        """What must not change by stopping: loss, rate, gradient norm, balance, prediction ahead, load, validation."""
        return [
            (m.loss, m.learning_rate, m.grad_norm, m.tokens, m.aux_loss or 0.0, m.mtp_loss or 0.0)
            + (m.validation_loss or 0.0, *(share for layer in m.expert_load.values() for share in layer))
            for m in self.metrics
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that a checkpoint has."""
        state = training_state(self.model, self.optimizer, self.groups)
        return {f"{t.name} {t.box.offset}": t.data.clone() for t in state}


def test_each_step_is_recorded_then_saved_where_due_and_the_last_one_always() -> None:
    rig = Rig(run_of(mixtral(), steps=5))
    end = rig.go()
    assert end == Progress(step=5, tokens=5 * 44)
    assert rig.calls == [
        ("record", 1),
        ("record", 2),
        ("save", 2),
        ("record", 3),
        ("record", 4),
        ("save", 4),
        ("record", 5),
        ("save", 5),
    ]


def test_a_last_step_that_the_interval_saved_is_not_saved_twice_and_a_finished_run_does_nothing() -> None:
    rig = Rig(run_of(mixtral(), steps=2))
    assert rig.go().step == 2
    assert rig.calls == [("record", 1), ("record", 2), ("save", 2)]
    rig.calls.clear()
    assert rig.go(Progress(step=2, tokens=88)) == Progress(step=2, tokens=88)
    assert rig.calls == []


def test_a_stop_before_the_first_step_saves_nothing() -> None:
    rig = Rig(run_of(mixtral()))
    assert rig.go(stop_after=0) == Progress(step=0, tokens=0)
    assert rig.calls == []


def test_metrics_hold_what_was_measured() -> None:
    rig = Rig(run_of(deepseek(), steps=4))
    rig.go()
    assert [m.step for m in rig.metrics] == [1, 2, 3, 4]
    assert [m.tokens for m in rig.metrics] == [44, 88, 132, 176]
    assert [m.learning_rate for m in rig.metrics] == [learning_rate(OPTIMIZER, s, 6) for s in range(4)]
    assert rig.metrics[0].learning_rate == pytest.approx(0.01)
    # every third step, and the last
    assert [m.validation_loss is not None for m in rig.metrics] == [False, False, True, True]
    assert rig.metrics[3].validation_loss == rig.trainer.validate()
    for m in rig.metrics:
        assert set(m.expert_load) == {"layers.1", "mtp.0.layer", "mtp.1.layer"}
        assert all(sum(shares) == pytest.approx(1.0) for shares in m.expert_load.values())
        assert m.worst_load == max(max(shares) * 16 for shares in m.expert_load.values())
        assert m.mtp_loss is not None and 0 < m.mtp_loss < 10 and m.aux_loss is not None and m.aux_loss > 0
        assert {"data", "forward", "backward", "optimizer"} <= set(m.seconds)
        assert m.mfu == pytest.approx(m.tokens_per_second * flops_per_token(rig.run.model, 11) / 1e9, rel=1e-9)
    assert Rig(run_of(mixtral(()))).go(stop_after=1).step == 1


def test_the_loss_falls() -> None:
    rig = Rig(run_of(qwen3(), steps=12))
    rig.go()
    assert rig.metrics[-1].loss < rig.metrics[0].loss - 0.3


def test_a_loss_that_is_not_finite_ends_the_run_without_saving_it() -> None:
    rig = Rig(run_of(deepseek()))
    rig.go(stop_after=2)
    rig.calls.clear()
    with torch.no_grad():
        rig.model.embedding.weight[:, 0] = torch.inf
    before = rig.tensors()
    with pytest.raises(NotFiniteError, match="step 3"):
        rig.go(Progress(step=2, tokens=88))
    assert rig.calls == []
    assert all(torch.equal(before[name], tensor) for name, tensor in rig.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interrupted_and_uninterrupted_runs_are_bitwise_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    """Losses, metrics, weights, expert bias and moments, through a checkpoint on the disk."""
    run = run_of(deepseek(), steps=4)
    whole = Rig(run, dtype)
    whole.go()
    first = Rig(run, dtype)
    assert first.go(stop_after=1, out=tmp_path).step == 1
    second = Rig(run, dtype)
    second.go(second.restore(tmp_path))
    assert first.losses() + second.losses() == whole.losses()
    found, expected = second.tensors(), whole.tensors()
    assert found.keys() == expected.keys() and any("router.bias" in name for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert second.optimizer.steps == 4


def stop_on_one(rank: int, world: int) -> tuple[Progress, list[tuple[str, int]], list[tuple[str, int]]]:
    """Only the last rank is asked to stop, after two steps; a second trainer is never asked."""
    rig = Rig(run_of(mixtral(), ep=2))
    end = rig.go(stop_after=2 if rank == world - 1 else None)
    free = Rig(run_of(mixtral(), steps=2, ep=1))
    free.go()
    return end, rig.calls, free.calls


def test_a_stop_on_one_rank_stops_all_after_the_same_step_and_saves_it(ranks: Ranks) -> None:
    for end, calls, free in ranks.run(stop_on_one, 2, timeout_seconds=20.0):
        assert end == Progress(step=2, tokens=88)
        assert calls == free == [("record", 1), ("record", 2), ("save", 2)]


def resumed(rank: int, world: int, ep: int, out: Path, stop_after: int) -> tuple[list, list, bool, list]:
    """A whole run; an interrupted one that saved; one that went on from there. Also whether the states are the same."""
    whole, first, second = (Rig(run_of(MODEL, ep=ep, steps=3)) for _ in range(3))
    whole.go()
    first.go(stop_after=stop_after, out=out)
    second.go(second.restore(out))
    state, expected = second.tensors(), whole.tensors()
    same = all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    return whole.losses(), first.losses() + second.losses(), same, sorted(state)


def go_on(rank: int, world: int, ep: int, source: Path) -> list[tuple[float, ...]]:
    """Go on from another mapping's checkpoint, which is left as it is."""
    rig = Rig(run_of(MODEL, ep=ep, steps=3))
    rig.go(rig.restore(source))
    return rig.losses()


def test_a_run_goes_on_bitwise_under_the_same_mapping_and_to_rounding_under_any_other(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(resumed, 2, 2, tmp_path, 1, timeout_seconds=30.0)
    names = set()
    for whole, pieced, same, state in found:
        assert pieced == whole == found[0][0] and len(whole) == 3
        assert same
        names |= set(state)
    # both ranks' experts and the moments of each
    assert {f"optimizer.exp_avg.layers.1.mlp.experts.down ({o}, 0, 0)" for o in (0, 8)} <= names
    for world, ep in ((1, 1), (2, 1), (4, 4), (4, 2)):
        for losses in ranks.run(go_on, world, ep, tmp_path, timeout_seconds=30.0):
            for step, expected in zip(losses, found[0][0][1:], strict=True):
                assert step == pytest.approx(expected, rel=1e-8)


def copy_at_the_last_moment(patch: pytest.MonkeyPatch) -> None:
    """Copies begin only when training stands before its update and waits for them, or at the end of the run."""
    waits = threading.Event()
    fill, before_update, wait = Staging.fill, AsynchronousSaver.before_update, AsynchronousSaver.wait

    def late(staging: Staging, tensors: Any) -> Any:
        assert waits.wait(20)
        time.sleep(0.01)
        return fill(staging, tensors)

    def then(method: Any) -> Any:
        def waiting(saver: AsynchronousSaver) -> None:
            waits.set()
            method(saver)
            waits.clear()

        return waiting

    patch.setattr(Staging, "fill", late)
    patch.setattr(AsynchronousSaver, "before_update", then(before_update))
    patch.setattr(AsynchronousSaver, "wait", then(wait))


def saved_and_loaded(rank: int, world: int, parallel: ParallelConfig, out: Path) -> tuple[bool, list[float | None]]:
    """Whether every checkpoint of a run has what the state was when it was saved; and for how long each step stood still."""
    run = replace(run_of(MODEL, steps=3), parallel=parallel, checkpoint=CheckpointConfig(interval=1))
    rig = Rig(run)
    with pytest.MonkeyPatch.context() as patch:
        copy_at_the_last_moment(patch)
        rig.go(out=out)
    held = rig.tensors()
    same = True
    for step, folder in zip((1, 2, 3), sorted((out / "checkpoints").glob("step_*")), strict=True):
        state = training_state(rig.model, rig.optimizer, rig.groups)
        for tensor in state:
            tensor.data.fill_(torch.nan)
        assert load(folder, state, rig.groups.checkpoint)["step"] == step
        found = {f"{t.name} {t.box.offset}": t.data for t in state}
        same = same and all(torch.equal(found[name], tensor) for name, tensor in rig.saved[step].items())
    assert not all(torch.equal(held[name], tensor) for name, tensor in rig.saved[2].items()), "training changes nothing"
    return same, [m.seconds.get("checkpoint") for m in rig.metrics]


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(ep=2), ParallelConfig(sharding="fsdp"), ParallelConfig(pp=2)],
    ids=["zero1", "fsdp", "pp"],
)
def test_a_checkpoint_has_the_state_of_its_step_though_it_is_copied_when_the_next_update_waits(
    ranks: Ranks, tmp_path: Path, parallel: ParallelConfig
) -> None:
    for same, stopped in ranks.run(saved_and_loaded, 2, parallel, tmp_path, timeout_seconds=60.0):
        assert same
        assert stopped[0] is None and all(seconds is not None and seconds >= 0.01 for seconds in stopped[1:])


def broken_disk(rank: int, world: int, out: Path) -> tuple[str, int]:
    """What ends the run, and after how many steps, when the last rank cannot write."""
    rig = Rig(run_of(MODEL, steps=9))

    def fail(files: LocalFiles, path: str, buffers: Any) -> int:
        raise OSError(5, "Input/output error", f"{files.root}/{path}")

    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(LocalFiles, "write", fail)
        with pytest.raises(CheckpointError) as caught:
            rig.go(out=out)
    return str(caught.value), len(rig.metrics)


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_on_all_ranks_after_the_same_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    told = ranks.run(broken_disk, 2, tmp_path, timeout_seconds=60.0)
    assert told[0] == told[1]
    text, steps = told[0]
    assert "rank 1: " in text and "checkpoint of step 2 could not be written" in text and 2 <= steps <= 4
    assert latest(tmp_path) is None


def test_the_rig_differs_between_seeds() -> None:
    """So that equal losses above mean something."""
    run = run_of(mixtral(), steps=1)
    rigs = [Rig(replace(run, train=replace(run.train, seed=seed))) for seed in (5, 6)]
    for rig in rigs:
        rig.go()
    assert rigs[0].losses() != rigs[1].losses()


def test_forced_routing_deals_the_whole_global_batch_evenly_and_tells_what_layers_do() -> None:
    rig = Rig(run_of(mixtral(), steps=2, forced_routing="balanced"))
    rig.go()
    free = Rig(run_of(mixtral(), steps=2))
    free.go()
    for forced, own in zip(rig.metrics, free.metrics, strict=True):
        assert {share for shares in forced.expert_load.values() for share in shares} == {0.25}
        assert {layer.entropy for layer in forced.insight.values()} == {1.0}
        assert all(layer.entropy < 1.0 and layer.logit_max > layer.logit_rms > 0 for layer in own.insight.values())
    assert rig.metrics[0].loss != free.metrics[0].loss


def test_jitter_in_training_hangs_on_seed_and_step_so_that_a_run_can_go_on(tmp_path: Path) -> None:
    model = mixtral(())
    layers = [
        replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, jitter=0.5)))  # type: ignore[union-attr]
        for layer in model.layers
    ]
    run = run_of(replace(model, layers=tuple(layers)), steps=4)
    whole, first, second = Rig(run), Rig(run), Rig(run)
    whole.go()
    first.go(stop_after=2, out=tmp_path)
    second.go(second.restore(tmp_path), out=tmp_path)
    assert first.losses() + second.losses() == whole.losses()
    still = Rig(run_of(model, steps=4))
    still.go()
    assert still.metrics[0].loss != whole.metrics[0].loss
