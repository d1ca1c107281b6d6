"""Bytes that a rank sends in one training step, by axis: counted while it trains, beside the closed form of core/parallel/traffic.py.

Small models of the three kinds, 8192 tokens a step in packed sequences of two lengths, on 1, 2, 4 and 8 gloo processes of one
thread each. Of every mapping a step of few microbatches warms up and the next step is counted. Bytes are means over the ranks; the closed form takes
routing as even, which the mean over ranks is nearly. Off by more than 1 %, a row is marked and the exit code is 1.

Seconds are of processes that share this machine's cores: they say what communication and smaller pieces of work cost together,
not how anything scales.

    python -m benchmarks.scaling [--world 4] [--model deepseek] [--only tp=2] [--every]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from core.attention.packing import packing_of
from core.config.architecture import (
    GQA,
    MLA,
    AuxLoss,
    Dense,
    ExpertBias,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    ZLoss,
)
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import Groups as RankGroups
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from core.parallel.traffic import TrainingStep, expected_bytes
from core.pipeline.layout import layout_of
from core.state.inventory import initialise
from core.training.step import train_step
from core.transformer.context import TokenBatch
from core.transformer.stage import build_model

MICROBATCHES, SEQUENCES = 8, (700, 324)  # microbatches of a global batch, tokens of the sequences packed in each
VOCAB, HIDDEN = 128, 64
NORM = RMSNorm(eps=1e-6)
ALLOWED = 0.01
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = "{:<9} {:<9} {:<54} {:<9} {:<36} {:>11} {:>11} {:>7}{}"

Parallel = ParallelConfig
# Every axis alone, every way to run it, then mixtures. dp fills what is left of a world, edp likewise.
MAPPINGS: dict[int, tuple[ParallelConfig, ...]] = {
    1: (Parallel(),),
    2: (
        Parallel(),
        Parallel(tp=2),
        Parallel(cp=2),
        Parallel(cp=2, cp_alltoall=2),
        Parallel(ep=2),
        Parallel(ep=2, dispatcher="allgather"),
        Parallel(etp=2),
        Parallel(pp=2),
        Parallel(pp=2, vpp=2),
    ),
    4: (
        Parallel(),
        Parallel(tp=4),
        Parallel(cp=4),
        Parallel(cp=4, cp_alltoall=2),
        Parallel(ep=4),
        Parallel(etp=2, ep=2),
        Parallel(etp=2, ep=2, dispatcher="allgather"),
        Parallel(pp=4),
        Parallel(tp=2, cp=2, ep=4),
        Parallel(tp=2, pp=2, vpp=2, ep=2),
        Parallel(cp=2, pp=2, schedule="zero_bubble", etp=2),
        Parallel(pp=2, vpp=2, ep=2, schedule="combined"),
    ),
    8: (
        Parallel(),
        Parallel(tp=8),
        Parallel(cp=8, cp_alltoall=4),
        Parallel(ep=8),
        Parallel(tp=2, cp=2, ep=2),
        Parallel(tp=2, cp=2, pp=2, ep=4),
        Parallel(tp=4, etp=2, ep=2),
        Parallel(cp=4, pp=2, vpp=2, ep=2, dispatcher="allgather"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    world: int
    model: str
    parallel: ParallelConfig
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What one rank counted: bytes by (axis, collective), and the seconds of the step."""

    sent: Counter[tuple[str, str]]
    seconds: float


def mixtral() -> ModelConfig:
    """Eight experts, two a token."""
    balance = (AuxLoss(scope="microbatch", coefficient=0.01), ZLoss(coefficient=0.001))
    router = Router(score="softmax_after_top_k", normalise=False, balance=balance)
    moe = MoE(experts=8, top_k=2, expert_ffn=64, router=router)
    return _model((Layer(attention=GQA(heads=8, kv_heads=2, head_dim=16), mlp=moe),) * 4)


def qwen3() -> ModelConfig:
    """16 experts, four a token, with head norms and tied embeddings."""
    router = Router(score="softmax", normalise=True, balance=(AuxLoss(scope="global_batch", coefficient=0.01),))
    moe = MoE(experts=16, top_k=4, expert_ffn=32, router=router)
    attention = GQA(heads=8, kv_heads=4, head_dim=16, head_norm=NORM)
    return replace(_model((Layer(attention=attention, mlp=moe),) * 4), tied_embeddings=True)


def deepseek() -> ModelConfig:
    """16 experts in four groups, four a token and a shared one, latent attention, a dense first layer, two modules ahead."""
    attention = MLA(heads=8, query_rank=48, latent_rank=32, nope_dim=16, rope_dim=16, value_dim=16, latent_norm=NORM)
    balance = (ExpertBias(rate=0.001), AuxLoss(scope="sequence", coefficient=0.001))
    router = Router(score="sigmoid", normalise=True, groups=Groups(total=4, kept=2), scale=2.5, balance=balance)
    moe = MoE(experts=16, top_k=4, expert_ffn=32, router=router, shared=SharedExperts(count=1))
    sparse = Layer(attention=attention, mlp=moe)
    model = _model((Layer(attention=attention, mlp=Dense(ffn=128)), sparse, sparse))
    return replace(model, predict_ahead=MultiToken(depth=2, loss_weight=0.3))


def _model(layers: tuple[Layer, ...]) -> ModelConfig:
    """A wide embedding, so that tokens differ to the routers."""
    return ModelConfig(
        vocab=VOCAB,
        hidden=HIDDEN,
        max_tokens=max(SEQUENCES),
        norm=NORM,
        rope=Rope(theta=1e4),
        layers=layers,
        embedding_std=1.0,
    )


MODELS = {"mixtral": mixtral, "qwen3": qwen3, "deepseek": deepseek}


def main() -> int:
    """Run what was asked for; 1 if a closed form is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, choices=tuple(MAPPINGS), action="append")
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--only", default="", help="mappings whose text holds this")
    parser.add_argument("--every", action="store_true", help="every model under every mapping, instead of in turn")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(
        f"torch {torch.__version__}, {cores} cores shared by all processes; bytes per rank and step, means over ranks"
    )
    print(
        COLUMNS.format("processes", "model", "mapping", "axis", "collectives", "measured", "closed form", "ratio", "")
    )
    start, missed = time.perf_counter(), 0
    for world in asked.world or tuple(MAPPINGS):
        cases = [
            case for case in cases_of(world, tuple(asked.model or MODELS), asked.every) if asked.only in label(case)
        ]
        for case, counted in zip(cases, run_world(world, cases), strict=True):
            missed += report(case, counted)
    print(f"{missed} rows off by more than {ALLOWED:.0%}; {time.perf_counter() - start:.0f} s in all")
    return 1 if missed else 0


def cases_of(world: int, models: Sequence[str], every: bool) -> list[Case]:
    """Every mapping, on one model after the other or on all; in bfloat16 the last mapping of each world once more."""
    cases = []
    for i, parallel in enumerate(MAPPINGS[world]):
        names = models if every else (models[i % len(models)],)
        cases += [Case(world=world, model=name, parallel=parallel) for name in names]
    return [*cases, replace(cases[-1], dtype="bfloat16")]


def label(case: Case) -> str:
    """What of the mapping is not left at its default."""
    plain = vars(ParallelConfig())
    said = [f"{k}={v}" for k, v in vars(case.parallel).items() if v != plain[k]]
    if case.dtype != "float32":
        said.append(case.dtype)
    return " ".join(said) or (f"dp={case.world}" if case.world > 1 else "one rank")


def run_world(world: int, cases: Sequence[Case]) -> list[list[Counted]]:
    """What every rank counted, case by case."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["core.training.step"])  # torch is imported once, and not by every process
        with context.Pool(world) as pool:
            # One task for every process: each waits in the rendezvous for the others, so none takes two.
            by_rank = pool.starmap(_rank, [(rank, world, store, tuple(cases)) for rank in range(world)], chunksize=1)
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def _rank(rank: int, world: int, store: str, cases: tuple[Case, ...]) -> list[Counted]:
    """One process: all cases one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    try:
        return [measure(case) for case in cases]
    finally:
        dist.barrier()
        dist.destroy_process_group()


def measure(case: Case) -> Counted:
    """Train two steps on this rank and count the second."""
    model_config, meter = MODELS[case.model](), Meter()
    stages = layout_of(model_config, case.parallel).embedding_stages(model_config.tied_embeddings)
    groups = groups_for(case.parallel, embedding_stages=stages, meter=meter)
    model = build_model(model_config, groups=groups, parallel=case.parallel, dtype=DTYPES[case.dtype])
    initialise(model, 7)
    optimizer = ChainedOptimizer(model, OptimizerConfig(learning_rate=1e-3), groups)
    seconds = 0.0
    for step in range(2):
        batches = list(batches_of(step, groups))[: 1 if step == 0 else None]
        optimizer.wait_all()
        dist.barrier()
        meter.sent_bytes.clear()
        start = time.perf_counter()
        train_step(model, optimizer, batches, rate=1e-3, groups=groups)
        seconds = time.perf_counter() - start
    sent = meter.sent_bytes.copy()
    optimizer.wait_all()
    return Counted(sent=sent, seconds=seconds)


def batches_of(step: int, groups: RankGroups) -> Iterator[TokenBatch]:
    """This replica's microbatches of a step. The vocabulary in ever another order: what any rank holds of it is much the same, and
    so is where its rows go, which random tokens would need many more of."""
    generator, length = torch.Generator().manual_seed(step), sum(SEQUENCES)
    orders = MICROBATCHES * (length // VOCAB + 1)
    tokens = torch.cat([torch.randperm(VOCAB, generator=generator) for _ in range(orders)]).view(MICROBATCHES, -1)
    bounds = torch.tensor([0, *accumulate(SEQUENCES)])
    for row in tokens[groups.dp.position :: groups.dp.size, : length + 1]:
        packing = packing_of(bounds, length, torch.device("cpu"), groups)
        yield TokenBatch(tokens=row[:-1].clone(), labels=row[1:].clone(), packing=packing)


def report(case: Case, counted: Sequence[Counted]) -> int:
    """Print one line for each axis, and one for the time; how many axes are off."""
    model = MODELS[case.model]()
    step = TrainingStep(
        model=model,
        parallel=case.parallel,
        world=case.world,
        parts=layout_of(model, case.parallel).parts,
        lengths=SEQUENCES * MICROBATCHES,
        microbatches=MICROBATCHES,
        element_bytes=DTYPES[case.dtype].itemsize,
    )
    expected = expected_bytes(step)
    measured: defaultdict[str, float] = defaultdict(float)
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for of_rank in counted:
        for (axis, collective), count in of_rank.sent.items():
            if count:
                measured[axis] += count / case.world
                kinds[axis].add(collective)
    missed = 0
    for axis in sorted(expected.keys() | measured.keys()):
        sent, form = measured[axis], expected.get(axis, 0.0)
        off = abs(sent - form) > ALLOWED * form
        missed += off
        ratio = f"{sent / form:.4f}" if form else "-"
        row = (axis, " ".join(sorted(kinds[axis])), f"{sent:,.0f}", f"{form:,.0f}", ratio, "  OFF" if off else "")
        print(COLUMNS.format(case.world, case.model, label(case), *row), flush=True)
    seconds = max(of_rank.seconds for of_rank in counted)
    total = (f"{sum(measured.values()):,.0f}", f"{sum(expected.values()):,.0f}", "", f"  {seconds:.2f} s")
    print(COLUMNS.format(case.world, case.model, label(case), "all", "", *total), flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
