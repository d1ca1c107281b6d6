"""The closed form of a step's traffic: equal to what ranks count and to what torch is asked to send, and right by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from core.config.architecture import GQA, MLA, ExpertChoice, Layer, ModelConfig, MoE, QuantileBias, Sinkhorn
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.moe.layer import MoELayer
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from core.parallel.traffic import TrainingStep, exchanges, expected_bytes
from core.pipeline.layout import layout_of
from core.state.inventory import initialise
from core.training.step import train_step
from core.transformer.stage import build_model
from tests.core.tiny import (
    DOCUMENTS,
    GLOBAL_LOSS,
    MICROBATCH_LOSS,
    SEQUENCE_LOSS,
    WINDOW,
    Z_LOSS,
    deepseek,
    mixtral,
    qwen3,
)
from tests.core.tiny import microbatches as tiny_microbatches
from tests.ranks import Ranks

Parallel = ParallelConfig
# Every parameter, cut or not, is then a multiple of what buckets are padded to, which no closed form knows of.
HIDDEN, VOCAB = 64, 33
MICROBATCH = 2  # of eight windows


def wide(model: ModelConfig) -> ModelConfig:
    """A tiny model with four heads, two of them for keys, of sizes that need no padding; widths that nothing divides stay."""
    layers = []
    for layer in model.layers:
        attention = replace(layer.attention, heads=4)
        if isinstance(attention, GQA):
            attention = replace(attention, kv_heads=2, head_dim=64 if attention.head_norm else 8)
        else:
            attention = replace(attention, query_rank=64, latent_rank=64)
        layers.append(Layer(attention=attention, mlp=layer.mlp))
    return replace(model, hidden=HIDDEN, vocab=VOCAB, layers=tuple(layers))


def uncompressed(model: ModelConfig) -> ModelConfig:
    """Latent attention whose query is not compressed, and no module ahead."""
    layers = []
    for layer in model.layers:
        assert isinstance(layer.attention, MLA)
        layers.append(replace(layer, attention=replace(layer.attention, query_rank=None)))
    return replace(model, layers=tuple(layers), predict_ahead=None)


def rerouted(**router: Any) -> ModelConfig:
    """Mixtral's layers with a softmax router of other fields. Four experts that choose take exactly half of a microbatch's tokens."""
    model = wide(mixtral())
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mlp, MoE)
        changed = replace(layer.mlp.router, **{"score": "softmax", "balance": (Z_LOSS,), **router})
        layers.append(replace(layer, mlp=replace(layer.mlp, router=changed)))
    return replace(model, layers=tuple(layers))


MODELS = {
    "mixtral": wide(mixtral((MICROBATCH_LOSS, SEQUENCE_LOSS, Z_LOSS))),
    "qwen3": wide(qwen3((GLOBAL_LOSS,))),
    "deepseek": wide(deepseek()),
    "uncompressed": uncompressed(wide(deepseek((SEQUENCE_LOSS,)))),
    "sinkhorn": rerouted(selection=Sinkhorn()),
    "expert choice": rerouted(selection=ExpertChoice()),
    "quantile": rerouted(balance=(QuantileBias(ema=0.5), Z_LOSS)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of one model under one mapping."""

    model: str
    parallel: ParallelConfig
    dtype: torch.dtype = torch.float32

    def step(self, world: int, remote_share: float | None = None) -> TrainingStep:
        """What the closed form is asked."""
        model = MODELS[self.model]
        return TrainingStep(
            model=model,
            parallel=self.parallel,
            world=world,
            parts=layout_of(model, self.parallel).parts,
            lengths=tuple(length for documents in DOCUMENTS for length in documents),
            microbatches=len(DOCUMENTS) // MICROBATCH,
            element_bytes=self.dtype.itemsize,
            remote_share=remote_share,
        )


CASES = {
    1: [Case(model="deepseek", parallel=Parallel())],
    2: [
        *(Case(model=model, parallel=Parallel(tp=2)) for model in MODELS),
        *(Case(model=model, parallel=Parallel(cp=2)) for model in ("mixtral", "deepseek")),
        *(Case(model=model, parallel=Parallel(cp=2, cp_alltoall=2, ep=2)) for model in ("qwen3", "uncompressed")),
        *(Case(model=model, parallel=Parallel(pp=2, vpp=2)) for model in ("mixtral", "qwen3", "deepseek")),
        Case(model="mixtral", parallel=Parallel(), dtype=torch.float64),
        Case(model="qwen3", parallel=Parallel(ep=2), dtype=torch.bfloat16),
        Case(model="deepseek", parallel=Parallel(ep=2, dispatcher="allgather"), dtype=torch.float64),
        Case(model="mixtral", parallel=Parallel(etp=2)),
        Case(model="expert choice", parallel=Parallel(cp=2, ep=2)),
        Case(model="quantile", parallel=Parallel(cp=2, ep=2), dtype=torch.float64),
    ],
    4: [
        Case(model="mixtral", parallel=Parallel(tp=4)),
        Case(model="mixtral", parallel=Parallel(cp=4)),
        Case(model="qwen3", parallel=Parallel(cp=4, cp_alltoall=2, ep=4)),
        Case(model="deepseek", parallel=Parallel(tp=2, cp=2, ep=4)),
        Case(model="deepseek", parallel=Parallel(pp=4, layout="Et|t|m|mL")),
        Case(model="mixtral", parallel=Parallel(pp=2, schedule="zero_bubble", tp=2, ep=2)),
        Case(model="qwen3", parallel=Parallel(etp=2, ep=2)),
        Case(model="mixtral", parallel=Parallel(etp=2, ep=2, dispatcher="allgather", tp=2)),
        Case(model="deepseek", parallel=Parallel(ep=2, cp=2)),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank sent by (axis, collective) as its meter counts it, in all as torch was asked for, and its routed rows: all,
    and those of experts on another rank of ep."""

    sent: Counter[tuple[str, str]]
    asked: int
    rows: int
    remote: int


class Wire(TorchDispatchMode):
    """Counts what leaves this rank at torch's own operations, by what those mean, without knowing who calls them.

    A gather and a sum are counted as rings do them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sent += self._sent(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _sent(name: str, args: Sequence[Any]) -> int:
        if name == "recv_":
            return 0
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if name == "send":
            return first.nbytes
        group = next(dist.ProcessGroup.unbox(a) for a in args[1:] if isinstance(a, torch.ScriptObject))
        others = group.size() - 1
        if name == "allreduce_":
            return 2 * others * first.nbytes // group.size()
        source = args[1]
        if name == "_allgather_base_":
            return others * source.nbytes
        assert name == "alltoall_base_", f"{name}: not known to this test"
        splits = args[4] or [source.shape[0] // group.size()] * group.size()
        kept = splits[group.rank()] * (source[:1].nbytes if source.shape[0] else 0)
        return source.nbytes - kept


def _measure(rank: int, world: int, cases: Sequence[Case]) -> list[Seen]:
    return [_train(case) for case in cases]


def _train(case: Case) -> Seen:
    """One step of this rank's share."""
    config, meter, wire = MODELS[case.model], Meter(), Wire()
    stages = layout_of(config, case.parallel).embedding_stages(config.tied_embeddings)
    groups = groups_for(case.parallel, embedding_stages=stages, meter=meter)
    model = build_model(config, groups=groups, parallel=case.parallel, dtype=case.dtype)
    initialise(model, 7)
    optimizer = ChainedOptimizer(model, OptimizerConfig(learning_rate=1e-3), groups)
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(
                lambda module, given, made: chosen.append(made[1].experts_TK[made[1].experts_TK >= 0])
            )
    batches = tiny_microbatches(0, groups.dp.position, groups.dp.size, MICROBATCH, groups)
    with wire:
        train_step(model, optimizer, batches, rate=1e-3, groups=groups)
        optimizer.wait_all()
    experts = next(layer.mlp.experts for layer in config.layers if isinstance(layer.mlp, MoE))
    mine = [picked // (experts // groups.ep.size) == groups.ep.position for picked in chosen]
    rows, home = sum(x.numel() for x in mine), sum(int(x.sum()) for x in mine)
    return Seen(sent=meter.sent_bytes, asked=wire.sent, rows=rows, remote=rows - home)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_axis_sends_what_its_closed_form_says_and_the_meter_misses_nothing(ranks: Ranks, world: int) -> None:
    by_rank = ranks.run(_measure, world, CASES[world], timeout_seconds=120.0)
    for case, *seen in zip(CASES[world], *by_rank, strict=True):
        rows = sum(of_rank.rows for of_rank in seen)
        share = sum(of_rank.remote for of_rank in seen) / rows
        measured: Counter[str] = Counter()
        for of_rank in seen:
            assert sum(of_rank.sent.values()) == of_rank.asked, f"{case}: the meter and torch count differently"
            measured.update(Meter(sent_bytes=of_rank.sent).by_axis())
        found = {axis: sent / world for axis, sent in measured.items() if sent}
        assert found == pytest.approx(expected_bytes(case.step(world, share)), rel=1e-12, abs=0), str(case)
        moes = [layer.mlp for _, layer in MODELS[case.model].all_layers() if isinstance(layer.mlp, MoE)]
        assert rows == len(DOCUMENTS) * WINDOW * sum(moe.top_k for moe in moes), "the hooks saw every choice"


def test_one_rank_sends_nothing() -> None:
    assert all(expected_bytes(Case(model=model, parallel=Parallel()).step(1)) == {} for model in MODELS)


def test_even_routing_sends_all_but_one_part_of_the_rows() -> None:
    """T * K * h * (EP - 1) / EP, four times, with a float32 weight twice; 8 * E of counts a microbatch."""
    tokens, layers, top_k, experts = 104, 2, 2, 4
    for ep in (2, 4):
        found = expected_bytes(Case(model="mixtral", parallel=Parallel(ep=ep)).step(4))["ep"]
        per_rank = tokens / 4 * top_k * (4 * 64 * 4 + 2 * 4) + 8 * experts  # each rank has one microbatch
        assert found == layers * per_rank * (ep - 1) / ep


def test_a_ring_sends_a_token_to_every_place_that_reads_it_by_counting_them() -> None:
    """Place by place and token by token: who holds a token of the sequence that comes later."""
    for places in (1, 2, 4):
        readers = 0
        for length in (length for documents in DOCUMENTS for length in documents):
            holder = [
                min(chunk, 2 * places - 1 - chunk)
                for chunk in range(2 * places)
                for _ in range(length * chunk // (2 * places), length * (chunk + 1) // (2 * places))
            ]
            # Chunks may be empty where sequences are short, and nobody asks whether the reader's is.
            owners = [set(range(places)) if t < length // 2 else set(range(holder[t])) for t in range(length)]
            readers += sum(len(owners[t] - {holder[t]}) for t in range(length))
        step = Case(model="mixtral", parallel=Parallel(cp=places)).step(4)
        sent = sum(e.sent_bytes for e in exchanges(step) if e.axis == "ring")
        assert sent == 2 * 3 * 4 * readers * 2 * (8 + 8)  # layers; k, v twice and once their gradients, of two heads


def test_what_heads_share_of_a_key_is_sent_once_by_hand() -> None:
    """Two layers and one ahead of four heads of nope 8, value 8, and a rope key that is not sent for each."""
    attention = MODELS["deepseek"].layers[0].attention
    assert isinstance(attention, MLA)
    layers = len(tuple(MODELS["deepseek"].all_layers()))
    nope, value, rope = attention.nope_dim, attention.value_dim, attention.rope_dim
    step = Case(model="deepseek", parallel=Parallel(cp=4, cp_alltoall=4)).step(4)
    traded = (
        4 * (nope + rope + value) + 4 * (nope + value) + 4 * rope
    )  # q and output, k and v, the shared key to four ranks
    assert expected_bytes(step)["heads"] == layers * 104 / 4 * 2 * 4 * traded * 3 / 4


def test_the_same_rows_cross_ep_whatever_the_dense_folding() -> None:
    foldings = [Parallel(ep=4), Parallel(ep=4, tp=2), Parallel(ep=4, cp=4), Parallel(ep=4, tp=2, cp=2)]
    for kind in foldings:
        step = Case(model="qwen3", parallel=kind).step(4)
        rows = [e for e in exchanges(step) if e.axis == "ep"]
        counts = 8 * 12 * 4 * (4 // step.dp) * 3 / 4  # every rank of the stage, for each of its replica's microbatches
        assert [e.sent_bytes - counts for e in rows] == [104 * 3 * (4 * 64 * 4 + 8) * 3 / 4] * 2


def test_a_purpose_is_told_for_every_byte() -> None:
    step = Case(model="deepseek", parallel=Parallel(tp=2, pp=2, ep=2)).step(4)
    sent = [exchange for exchange in exchanges(step) if exchange.sent_bytes]
    assert sum(e.sent_bytes for e in sent) / 4 == pytest.approx(sum(expected_bytes(step).values()))
    of_tp = {exchange.purpose for exchange in sent if exchange.axis == "tp"}
    assert of_tp == {"attention", "mlp", "shared experts", "embedding", "head"}


@pytest.mark.parametrize("parallel", [Parallel(ep=2, dispatcher="flex"), Parallel(ep=2, expert_budget=1.5)])
def test_what_the_routing_decides_has_no_closed_form(parallel: ParallelConfig) -> None:
    with pytest.raises(ValueError, match="decided by the routing"):
        expected_bytes(Case(model="mixtral", parallel=parallel).step(2))


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.sharding=fsdp"):
        expected_bytes(Case(model="mixtral", parallel=Parallel(sharding="fsdp")).step(2))


def test_the_norm_and_the_losses_of_a_step_are_summed_once() -> None:
    step = Case(model="qwen3", parallel=Parallel(tp=2, ep=2, pp=2)).step(4)
    assert [e.purpose for e in exchanges(step) if e.axis == "world"] == [
        "losses and choices",
        "largest logits",
        "gradient norm",
    ]
    # loss, balance, 12 experts, drops, saved rows and logits of each layer; its largest logit; norm
    assert expected_bytes(step)["world"] == 2 * 3 / 4 * 8 * (1 + 2 + 2 * (12 + 3) + 2 + 1)
