"""The smallest models of the three kinds, one global batch with documents of odd lengths, and training of it under any mapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from core.attention.packing import packing_of
from core.config.architecture import (
    GQA,
    MLA,
    AuxLoss,
    Balance,
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
    Yarn,
    ZLoss,
)
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.recipe import Recipe
from core.config.run import IGNORE, OptimizerConfig
from core.optim.make import make_optimizer
from core.parallel.groups import Groups as RankGroups
from core.parallel.groups import groups_for
from core.pipeline.layout import layout_of
from core.state.box import Box, whole
from core.state.inventory import initialise, inventory
from core.training.step import StepResult, train_step
from core.transformer.context import BalanceInputs, BatchPosition, TokenBatch, Totals
from core.transformer.stage import PartOutput, Stage, build_model

VOCAB = 31
WINDOW = 13
NORM = RMSNorm(eps=1e-5)
ATTENTION = GQA(heads=2, kv_heads=1, head_dim=8)
MICROBATCH_LOSS, SEQUENCE_LOSS, GLOBAL_LOSS = (
    AuxLoss(scope="microbatch", coefficient=0.5),
    AuxLoss(scope="sequence", coefficient=0.3),
    AuxLoss(scope="global_batch", coefficient=0.4),
)
Z_LOSS = ZLoss(coefficient=0.05)
# Lengths of the documents in each of the eight windows of the global batch.
DOCUMENTS = ((13,), (5, 8), (1, 12), (6, 1, 6), (13,), (2, 11), (7, 6), (4, 4, 5))
# Without momentum and with a large eps an update is rate * g / (|g| + 1): scale, sign and size of every gradient show.
PLAIN = OptimizerConfig(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.1, clip_norm=None)


def mixtral(balance: tuple[Balance, ...] = (MICROBATCH_LOSS, Z_LOSS)) -> ModelConfig:
    """Two MoE layers: 4 experts, top-2, softmax over the chosen."""
    moe = MoE(
        experts=4, top_k=2, expert_ffn=8, router=Router(score="softmax_after_top_k", normalise=False, balance=balance)
    )
    return _model((Layer(attention=ATTENTION, mlp=moe),) * 2)


def qwen3(balance: tuple[Balance, ...] = (GLOBAL_LOSS,)) -> ModelConfig:
    """Two MoE layers: 12 experts, top-3, renormalised softmax; query and key norms, tied embeddings."""
    moe = MoE(experts=12, top_k=3, expert_ffn=8, router=Router(score="softmax", normalise=True, balance=balance))
    attention = replace(ATTENTION, head_norm=NORM)
    return replace(_model((Layer(attention=attention, mlp=moe),) * 2), tied_embeddings=True)


def deepseek(
    balance: tuple[Balance, ...] = (ExpertBias(rate=0.05), SEQUENCE_LOSS, GLOBAL_LOSS, Z_LOSS),
) -> ModelConfig:
    """A dense and an MoE layer with MLA: 16 experts in 4 groups, top-4, a shared expert, two modules that predict ahead."""
    attention = MLA(heads=2, query_rank=6, latent_rank=8, nope_dim=4, rope_dim=4, value_dim=6, latent_norm=NORM)
    router = Router(score="sigmoid", normalise=True, groups=Groups(total=4, kept=2, best=2), scale=2.5, balance=balance)
    moe = MoE(experts=16, top_k=4, expert_ffn=8, router=router, shared=SharedExperts(count=2))
    model = _model((Layer(attention=attention, mlp=Dense(ffn=24)), Layer(attention=attention, mlp=moe)))
    yarn = Yarn(theta=1e4, factor=4.0, trained_tokens=8, mscale=1.0, mscale_all_dim=0.7)
    return replace(model, rope=yarn, predict_ahead=MultiToken(depth=2, loss_weight=0.3))


def _model(layers: tuple[Layer, ...]) -> ModelConfig:
    return ModelConfig(
        vocab=VOCAB, hidden=16, max_tokens=32, norm=NORM, rope=Rope(theta=1e4), layers=layers, init_std=0.3
    )


def batch_of(
    tokens: Sequence[int], labels: Sequence[int], lengths: Sequence[int], groups: RankGroups | None = None
) -> TokenBatch:
    """A packed batch from plain lists, as a rank of `groups` sees it."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
    packing = packing_of(ends, len(tokens), torch.device("cpu"), groups)
    return TokenBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64), labels=torch.tensor(labels, dtype=torch.int64), packing=packing
    )


def empty_batch(groups: RankGroups | None = None) -> TokenBatch:
    """No token at all."""
    return batch_of([], [], [], groups)


def losses_of(model: Stage, batch: TokenBatch, totals: Totals | None = None) -> PartOutput:
    """All losses of a model that lies in one part, divided by the counts of this batch or by `totals`."""
    groups = model.place.groups
    totals = totals or model.totals_of(batch)
    balance = BalanceInputs(totals=totals, seen={}, sequence=groups.sequence, tokens=groups.tokens)
    return model.run(0, None, batch, purpose="training", balance=balance)


def total_of(model: Stage, batch: TokenBatch, totals: Totals | None = None) -> Tensor:
    """What of `losses_of` is differentiated."""
    share = losses_of(model, batch, totals).share
    assert share is not None
    return share


def microbatches(
    step: int, position: int = 0, replicas: int = 1, microbatch: int = 8, groups: RankGroups | None = None
) -> list[TokenBatch]:
    """The microbatches of `microbatch` windows that one replica has of the global batch of eight windows of a step."""
    generator = np.random.default_rng(1000 + step)
    windows = generator.integers(0, VOCAB, (len(DOCUMENTS), WINDOW + 1))
    # Every document begins with a token of its own, and does not repeat it: equal beginnings, also `a` and `a a`, are one and the
    # same to a router, and which of them an expert has room for would be up to the last bit of a sum.
    starts = [(row, sum(lengths[:i])) for row, lengths in enumerate(DOCUMENTS) for i in range(len(lengths))]
    rows, columns = (np.array(places) for places in zip(*starts, strict=True))
    windows[rows, columns] = generator.permutation(VOCAB)[: len(starts)]
    repeated = windows[rows, columns + 1] == windows[rows, columns]
    windows[rows, columns + 1] = (windows[rows, columns + 1] + repeated) % VOCAB
    starts = range(position * microbatch, len(DOCUMENTS), replicas * microbatch)
    return [
        replace(
            _pack(windows, range(i, i + microbatch), groups),
            position=BatchPosition(seed=7, step=step, first=i * WINDOW),
        )
        for i in starts
    ]


def _pack(windows: np.ndarray, rows: Sequence[int], groups: RankGroups | None) -> TokenBatch:
    """Labels are the next token of the same document; behind every second window's end it is known, as loaders may."""
    tokens, labels, lengths = [], [], []
    for row in rows:
        known = windows[row, 1:].tolist()
        for start, end in pairwise((0, *accumulate(DOCUMENTS[row]))):
            if end < WINDOW or row % 2:
                known[end - 1] = IGNORE
            lengths.append(end - start)
        tokens += windows[row, :-1].tolist()
        labels += known
    return batch_of(tokens, labels, lengths, groups)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run: the same global batches, some mapping and split."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    microbatch: int = 8
    steps: int = 3
    optimizer: OptimizerConfig = PLAIN
    dtype: torch.dtype = torch.float64
    memory: MemoryConfig = MemoryConfig()
    recipe: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank knows after training: the steps' results, and (name, shape, box, data) of its pieces of the model."""

    results: list[StepResult]
    pieces: list[tuple[str, tuple[int, ...], Box, Tensor]]


def train(case: Case) -> Trained:
    """Train this rank's share of `case`, in the initialised world or alone."""
    layout = layout_of(case.model, case.parallel)
    groups = groups_for(case.parallel, embedding_stages=layout.embedding_stages(case.model.tied_embeddings))
    model = build_model(
        case.model,
        groups=groups,
        parallel=case.parallel,
        memory=case.memory,
        recipe=case.recipe,
        seed=7,
        dtype=case.dtype,
    )
    initialise(model, 7)
    optimizer = make_optimizer(model, case.optimizer, groups, case.parallel)
    results = []
    for step in range(case.steps):
        batches = microbatches(step, groups.dp.position, groups.dp.size, case.microbatch, groups)
        results.append(train_step(model, optimizer, batches, rate=case.optimizer.learning_rate, groups=groups))
    optimizer.wait_all()
    pieces = [(p.name, p.shape, p.box, p.data) for p in inventory(model, groups).values()]
    return Trained(results=results, pieces=pieces)


def train_all(rank: int, world: int, cases: Sequence[Case]) -> list[Trained]:
    """`train` of several cases one after the other, for the pool of ranks."""
    return [train(case) for case in cases]


def assemble(ranks: Sequence[Trained]) -> dict[str, Tensor]:
    """The whole tensors by canonical name, from all ranks' pieces. Copies of a piece must be bitwise the same."""
    held: dict[str, dict[Box, Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for trained in ranks:
        for name, shape, box, data in trained.pieces:
            assert shapes.setdefault(name, shape) == shape, name
            known = held.setdefault(name, {}).setdefault(box, data)
            assert torch.equal(known, data), f"copies of {name} {box} differ"
    found = {}
    for name, boxes in held.items():
        full = torch.full(shapes[name], torch.nan, dtype=torch.float64)
        assert sum(box.elements for box in boxes) == whole(shapes[name]).elements, name
        for box, data in boxes.items():
            full[box.slices] = data.double()
        assert not full.isnan().any(), f"{name} has holes or holds NaN"
        found[name] = full
    return found
