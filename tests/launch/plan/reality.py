"""What a real rank holds, keeps and sends, told by what memory lives, by the optimizer's own tensors and by the meter of its groups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from core.config.architecture import MoE
from core.config.run import RunConfig
from core.moe.workload import Workload
from core.optim.chained import ChainedOptimizer
from core.optim.formats import formats_of
from core.optim.make import make_optimizer
from core.optim.protocol import Optimizer
from core.optim.shards import FullyShardedOptimizer
from core.parallel.groups import Groups, groups_for
from core.parallel.meter import Meter
from core.pipeline.layout import layout_of
from core.precision.quantiser import Quantiser
from core.state.inventory import initialise
from core.state.shard import local
from core.training.clock import Clock
from core.training.step import train_step
from core.training.work import train_microbatches
from core.transformer.context import BalanceInputs, TokenBatch, Totals
from core.transformer.quantise import quantisers
from core.transformer.stage import PartOutput, Stage, build_model
from launch.plan.memory import MemoryPlanner
from launch.plan.survivors import Watch
from launch.plan.trace import FLOATS, Alike, kinds_by_path
from tests.core.tiny import batch_of


def measure_peak(rank: int, world: int, run: RunConfig) -> tuple[int, int]:
    """The most bytes that forwards and backwards of a whole step hold at once, beside parameters and main gradients; and what it
    sends along the pipeline, which gloo keeps until the end."""
    meter = Meter()
    stages = layout_of(run.model, run.parallel).embedding_stages(run.model.tied_embeddings)
    groups = groups_for(run.parallel, embedding_stages=stages, meter=meter)
    model = build_model(run.model, groups=groups, parallel=run.parallel, memory=run.memory)
    initialise(model, 7)
    batch = batch_for(run, groups)
    optimizer = make_optimizer(model, run.optimizer, groups, run.parallel)
    assert isinstance(optimizer, ChainedOptimizer)
    number = run.train.global_batch // (groups.dp.size * run.train.microbatch)
    tokens = batch.packing.tokens * number
    totals = Totals(tokens=tokens, labels=tokens, ahead=(tokens,) * len(model.config.mtp_layers()))
    watch = Watch()
    watch.ignore([*model.parameters(), *model.buffers(), *_held_by(batch), *(b.gradients for b in optimizer.buckets)])
    optimizer.begin(model.passes(number))
    with watch.watching():
        train_microbatches(model, [batch] * number, totals, after=optimizer.accumulate, clock=Clock())
    optimizer.reduce()
    return watch.peak, meter.by_axis().get("pp", 0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one rank, in bytes. on_host: how much of `optimizer` lies in host memory. kept: by virtual stage, after the forward of one microbatch. sent: by axis, in one step."""

    parameters: int
    gradients: int
    optimizer: int
    on_host: int
    kept: tuple[int, ...]
    sent: dict[str, int]


# Sums of counts that a step's report makes, and of delayed scaling's histories, which the plan leaves out.
REPORTS = ("world", "dp")


def as_planned(measured: Measured, planner: MemoryPlanner, run: RunConfig, rank: int, *, kept: bool = False) -> None:
    """What a rank holds is its plan exactly; what it sends, and `kept`: what waits for the backward, within 2 %."""
    resident = planner.resident(run, rank)
    held = (measured.parameters, measured.gradients, measured.optimizer)
    assert held == (resident.parameters, resident.gradients, resident.optimizer), rank
    if kept:
        planned = [part.activations + part.logits for part in planner.parts(run, rank)]
        assert planned == pytest.approx(measured.kept, rel=0.02), rank
    counted = {axis: count for axis, count in measured.sent.items() if axis not in REPORTS}
    assert planner.traffic(run, rank) == pytest.approx(counted, rel=0.02), rank


def measure(rank: int, world: int, run: RunConfig) -> Measured:
    """Build, run one microbatch through every part, and train one step, with the experts dealt out evenly."""
    meter = Meter()
    layout = layout_of(run.model, run.parallel)
    stages = layout.embedding_stages(run.model.tied_embeddings)
    groups = groups_for(run.parallel, embedding_stages=stages, meter=meter)
    dtype = FLOATS[run.precision.compute]
    model = build_model(
        run.model,
        groups=groups,
        parallel=run.parallel,
        memory=run.memory,
        recipe=run.precision.recipe,
        dtype=dtype,
    )
    initialise(model, 7)
    batch = batch_for(run, groups)
    # Before FSDP shards it: what waits does not depend on where parameters are.
    kept = tuple(kept_by_watch(model, chunk, batch) for chunk in range(len(model.parts)))
    formats = formats_of(run.precision, on_host=run.memory.optimizer_offload)
    optimizer = make_optimizer(model, run.optimizer, groups, run.parallel, formats)
    held = _held(model, optimizer)
    meter.sent_bytes.clear()
    replicas = groups.dp.size * run.train.microbatch
    batches = [batch] * (run.train.global_batch // replicas)
    train_step(model, optimizer, batches, rate=1e-3, groups=groups)
    optimizer.wait_all()
    sent = meter.by_axis()
    return Measured(parameters=held[0], gradients=held[1], optimizer=held[2], on_host=held[3], kept=kept, sent=sent)


def batch_for(run: RunConfig, groups: Groups) -> TokenBatch:
    """One microbatch of full sequences."""
    model, lengths = run.model, [run.train.sequence_tokens] * run.train.microbatch
    layers = {f"layers.{i}": layer.mlp for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)}
    workload = Workload(name="balanced", seed=0, step=0, first=0, layers=layers, ep=run.parallel.ep)
    ids = torch.arange(sum(lengths)) % model.vocab
    plain = batch_of(ids.tolist(), ids.roll(-1).tolist(), lengths, groups)
    return TokenBatch(
        tokens=plain.tokens,
        labels=plain.labels,
        packing=plain.packing,
        prescribed=Alike(workload=workload, kinds=kinds_by_path(model)),
    )


def kept_by_allocator(model: Stage, chunk: int, batch: TokenBatch) -> int:
    """What the allocator has given and not got back once a part's forward is done and all but its graph is dropped: of a rank alone,
    since it is not told what the threads of a backend give back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        waiting = _forward(model, chunk, batch)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert waiting, "the graph is held until here"
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def kept_by_watch(model: Stage, chunk: int, batch: TokenBatch) -> int:
    """The same, told by what of the memory that was taken still lives."""
    watch = Watch()
    watch.ignore([*model.parameters(), *model.buffers(), *_held_by(batch)])
    with watch.watching():
        waiting = _forward(model, chunk, batch)
    time.sleep(0.02)  # a thread of the backend may still hold what has just been sent
    assert waiting, "the graph is held until here"
    return watch.current


def deferred_by_watch(model: Stage, chunk: int, batch: TokenBatch) -> int:
    """What still lives when the input's gradient is done and those of the weights are put off."""
    watch, later = Watch(), model.place.later
    assert later is not None, "a schedule of halved backwards"
    watch.ignore([*model.parameters(), *model.buffers(), *_held_by(batch)])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_forget)
    with watch.watching():
        share = _run(model, chunk, batch, None).share
        assert share is not None
        later.collecting = True
        share.backward()
        later.collecting = False
        del share
    assert later.work, "products put something off"
    return watch.current


def _held_by(batch: TokenBatch) -> list[Tensor]:
    packing = batch.packing
    return [batch.tokens, batch.labels, packing.index_T, packing.positions_T, packing.sequence_T]


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _forward(model: Stage, chunk: int, batch: TokenBatch) -> list[object]:
    """Run a part; what waits for the backward: as in the pipeline's runtime what was received and what goes on, and the graph."""
    received = None
    if not model.parts[chunk].embedding:
        shape = model.received_shape(chunk, batch, "training")
        received = torch.zeros(shape, dtype=model.place.dtype, requires_grad=True)
    made = _run(model, chunk, batch, received)
    node = None if made.share is None else made.share.grad_fn
    return [each for each in (received, made.out, node) if each is not None]


def _run(model: Stage, chunk: int, batch: TokenBatch, received: Tensor | None) -> PartOutput:
    groups, tokens = model.place.groups, batch.packing.tokens
    totals = Totals(tokens=tokens, labels=tokens, ahead=(tokens,) * len(model.config.mtp_layers()))
    balance = BalanceInputs(totals=totals, seen={}, sequence=groups.sequence, tokens=groups.tokens)
    return model.run(chunk, received, batch, purpose="training", balance=balance)


def _held(model: Stage, optimizer: Optimizer) -> tuple[int, int, int, int]:
    """Bytes of parameters with buffers, of main gradients, of the optimizer's own tensors, and of those in host memory."""
    low = [tensor for quantiser in quantisers(model) for tensor in _primary(quantiser)]
    parameters = list(_storages([*(local(tensor) for tensor in (*model.parameters(), *model.buffers())), *low]))
    known = {storage.data_ptr() for storage in parameters}
    assert isinstance(optimizer, ChainedOptimizer | FullyShardedOptimizer)
    gradients = list(_storages([bucket.gradients for bucket in optimizer.buckets]))
    here, there = optimizer.adam.tensors()
    masters = [shard.master for shard in optimizer.shards if isinstance(shard.master, Tensor)]
    own = [storage for storage in _storages([*here, *there, *masters]) if storage.data_ptr() not in known]
    return _bytes(parameters), _bytes(gradients), _bytes(own), _bytes(list(_storages(there)))


def _primary(quantiser: Quantiser) -> Iterator[Tensor]:
    """What is held of a weight in low precision."""
    if quantiser.primary is not None:
        held = (quantiser.primary.rows, quantiser.primary.columns)
        tensors = [t for one in held if one is not None for t in (one.data, one.scales, one.tensor_scale)]
        yield from (tensor for tensor in (*tensors, quantiser.primary.amax) if tensor is not None)


def _storages(tensors: Sequence[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The different memories behind some tensors."""
    known: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            yield storage


def _bytes(storages: Sequence[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)
