"""Weights for an inference engine: the published tensors of a model under any mapping, in buckets, with few and small exchanges."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckpt.gather
from ckpt.export import export_weights
from ckpt.float8 import quantise
from core.config.architecture import ModelConfig
from core.config.mapping import ParallelConfig
from core.errors import RequestError
from core.parallel.groups import groups_for
from core.parallel.meter import Meter
from core.state.inventory import initialise
from core.training.step import train_step
from core.transformer.stage import build_model
from tests.core.optim.sharded import built, told
from tests.core.tiny import Case, Trained, assemble, microbatches
from tests.core.training.mappings import MODELS, label
from tests.ranks import Ranks

FAMILY = {"mixtral": "mixtral", "qwen3": "qwen3", "deepseek": "deepseek_v3"}
Found = list[list[tuple[str, Tensor]]]
Cases = list[tuple[str, ParallelConfig]]

OF_TWO: Cases = [
    ("mixtral", ParallelConfig(tp=2, ep=2)),
    ("qwen3", ParallelConfig(pp=2)),
    ("deepseek", ParallelConfig(sharding="fsdp")),
    ("mixtral", ParallelConfig(etp=2, vpp=2)),
]
OF_FOUR: Cases = [
    ("deepseek", ParallelConfig(tp=2, ep=2, pp=2)),
    ("deepseek", ParallelConfig(tp=4, etp=2, ep=2)),
    ("qwen3", ParallelConfig(tp=2, cp=2, ep=4)),
    ("mixtral", ParallelConfig(sharding="fsdp", tp=2, ep=2)),
    ("mixtral", ParallelConfig(sharding="fsdp", fsdp_replicas=2, ep=2)),
    ("qwen3", ParallelConfig(pp=2, ep=2, layout="E|ttttL")),
]
ATTENTION = {
    **{"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "query_norm": "q_norm"},
    "key_norm": "k_norm",
}
LATENT = {
    **{"query_down": "q_a_proj", "query_norm": "q_a_layernorm", "query_up": "q_b_proj", "output": "o_proj"},
    **{"latent_down": "kv_a_proj_with_mqa", "latent_norm": "kv_a_layernorm", "latent_up": "kv_b_proj"},
}
TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
AHEAD = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "final_norm": "shared_head.norm"}


def by_hand(model: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published tensors of a canonical state, name by name."""
    found = {TOP[name]: tensor for name, tensor in state.items() if name in TOP}
    layers = len(MODELS[model].layers)
    for name, tensor in state.items():
        ahead = re.fullmatch(r"mtp\.(\d+)\.(\w+)\.weight", name)
        layer = re.fullmatch(r"(layers\.|mtp\.)(\d+)\.(?:layer\.)?(.*)", name)
        if ahead:
            found[f"model.layers.{layers + int(ahead[1])}.{AHEAD[ahead[2]]}.weight"] = tensor
        elif layer:
            number = int(layer[2]) + (layers if layer[1] == "mtp." else 0)
            found |= {f"model.layers.{number}.{n}": t for n, t in of_layer(model, layer[3], tensor)}
    return found


def of_layer(model: str, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """One canonical tensor of a layer as the published ones."""
    block = "block_sparse_moe" if model == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    attention = LATENT if model == "deepseek" else ATTENTION
    fixed = {
        "attention_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": f"{block}.gate.weight",
        "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    }
    if name in fixed:
        return [(fixed[name], tensor)]
    if name.startswith("attention."):
        return [(f"self_attn.{attention[name.split('.')[1]]}.weight", tensor)]
    if name == "mlp.experts.gate_up":
        pairs = [(i, half) for i in range(len(tensor)) for half in (0, 1)]
        return [(f"{block}.experts.{i}.{(gate, up)[half]}.weight", tensor[i, half]) for i, half in pairs]
    if name == "mlp.experts.down":
        return [(f"{block}.experts.{i}.{down}.weight", expert) for i, expert in enumerate(tensor)]
    path = "mlp.shared_experts" if ".shared." in name else "mlp"
    if name.endswith("gate_up"):
        return [(f"{path}.gate_proj.weight", tensor[0]), (f"{path}.up_proj.weight", tensor[1])]
    return [(f"{path}.down_proj.weight", tensor)]


def exported(
    rank: int, world: int, cases: Cases, bucket_bytes: int, options: dict[str, Any]
) -> list[tuple[Found, Trained]]:
    """After a step of training, the buckets of every case, and this rank's pieces of the model."""
    found = []
    for name, parallel in cases:
        case = Case(model=MODELS[name], parallel=parallel, microbatch=1)
        model, optimizer, groups = built(case, dtype=torch.float32)
        batches = microbatches(0, groups.dp.position, groups.dp.size, 1, groups)
        result = train_step(model, optimizer, batches, rate=0.1, groups=groups)
        # Parameters are still on their way: the export waits for them, and nobody else has.
        buckets = list(export_weights(model, bucket_bytes=bucket_bytes, family=FAMILY[name], **options))
        optimizer.wait_all()
        found.append((buckets, told(model, groups, [result])))
    return found


def check_buckets(name: str, parallel: ParallelConfig, ranks: list[tuple[Found, Trained]], bucket_bytes: int) -> None:
    """Every rank has every tensor once, equal to the truth, in buckets of the size that was asked for."""
    truth = by_hand(name, assemble([trained for _, trained in ranks]))
    for buckets, _ in ranks:
        tensors = [pair for bucket in buckets for pair in bucket]
        assert len(tensors) == len(dict(tensors)), label(parallel)
        assert set(dict(tensors)) == set(truth), label(parallel)
        for published, tensor in tensors:
            assert tensor.is_contiguous() and torch.equal(tensor.double(), truth[published]), (
                label(parallel),
                published,
            )
        for bucket in buckets:
            assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes


@pytest.mark.parametrize(("world", "cases"), [(1, [("deepseek", ParallelConfig())]), (2, OF_TWO), (4, OF_FOUR)])
def test_every_rank_gets_the_whole_model_from_any_mapping(ranks: Ranks, world: int, cases: Cases) -> None:
    answers = ranks.run(exported, world, cases, 3000, {}, timeout_seconds=120)
    for number, (name, parallel) in enumerate(cases):
        check_buckets(name, parallel, [answer[number] for answer in answers], 3000)


def test_one_rank_alone_gets_it_where_only_one_is_asked_for(ranks: Ranks) -> None:
    answers = ranks.run(exported, 4, OF_FOUR[:1], 3000, {"to": 2}, timeout_seconds=60)
    buckets = [answer[0][0] for answer in answers]
    assert len({len(found) for found in buckets}) == 1
    assert all(not bucket for rank in (0, 1, 3) for bucket in buckets[rank])
    truth = by_hand("deepseek", assemble([answer[0][1] for answer in answers]))
    got = dict(pair for bucket in buckets[2] for pair in bucket)
    assert set(got) == set(truth) and all(torch.equal(got[name].double(), truth[name]) for name in truth)


def test_bfloat16_leaves_the_expert_bias_as_it_is(ranks: Ranks) -> None:
    answers = ranks.run(exported, 4, OF_FOUR[:1], 3000, {"dtype": torch.bfloat16}, timeout_seconds=60)
    truth = by_hand("deepseek", assemble([answer[0][1] for answer in answers]))
    for answer in answers:
        got = dict(pair for bucket in answer[0][0] for pair in bucket)
        assert set(got) == set(truth)
        for name, tensor in got.items():
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            assert tensor.dtype == dtype and torch.equal(tensor, truth[name].float().to(dtype)), name
    assert any(truth[name].any() for name in truth if name.endswith("e_score_correction_bias"))


def test_float8_blocks_are_those_of_the_whole_tensors(ranks: Ranks) -> None:
    answers = ranks.run(exported, 4, OF_FOUR[:2], 3000, {"dtype": "float8_blocks"}, timeout_seconds=90)
    for number in (0, 1):
        truth = by_hand("deepseek", assemble([answer[number][1] for answer in answers]))
        linear = {n for n in truth if re.search(r"(_proj|_proj_with_mqa|_[ab]_proj|down_proj)\.weight$", n)}
        linear -= {n for n in truth if "eh_proj" in n}
        got = dict(pair for bucket in answers[3][number][0] for pair in bucket)
        assert set(got) == set(truth) | {f"{name}_scale_inv" for name in linear}
        for name in truth:
            if name in linear:
                numbers, scale = quantise(truth[name].float())
                assert torch.equal(got[name].view(torch.uint8), numbers.view(torch.uint8)), name
                assert torch.equal(got[f"{name}_scale_inv"], scale), name
            elif not name.endswith("bias"):
                assert torch.equal(got[name], truth[name].float().bfloat16()), name


def many_experts(experts: int, width: int = 8, layers: int = 2) -> ModelConfig:
    model = MODELS["mixtral"]
    layer = model.layers[0]
    moe = replace(layer.mlp, experts=experts, expert_ffn=width)  # type: ignore[type-var]
    return replace(model, layers=(replace(layer, mlp=moe),) * layers)


def counted(rank: int, world: int, model: ModelConfig, parallel: ParallelConfig, bucket_bytes: int) -> dict[str, int]:
    """What an export takes: exchanges, bytes sent and got, buckets."""
    meter = Meter()
    groups = groups_for(parallel, meter=meter)
    stage = build_model(model, groups=groups, parallel=parallel)
    initialise(stage, 3)
    calls: list[int] = []
    original = ckpt.gather.start_hops

    def counting(*args: Any, **how: Any) -> Any:
        calls.append(1)
        return original(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.gather, "start_hops", counting)
        buckets = list(export_weights(stage, bucket_bytes=bucket_bytes))
    tensors = [tensor for bucket in buckets for _, tensor in bucket]
    return {
        "exchanges": len(calls),
        "sent": sum(meter.sent_bytes.values()),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "tensors": len(tensors),
        "held": sum(tensor.nbytes for tensor in (*stage.parameters(), *stage.buffers())),
    }


def test_a_thousand_small_tensors_take_an_exchange_per_bucket(ranks: Ranks) -> None:
    bucket = 40_000
    for took in ranks.run(counted, 2, many_experts(170), ParallelConfig(ep=2), bucket):
        assert took["tensors"] > 1000
        assert took["exchanges"] <= math.ceil(took["bytes"] / bucket) + 1


def test_what_every_rank_has_is_not_sent_and_the_rest_is_sent_once(ranks: Ranks) -> None:
    for took in ranks.run(counted, 2, many_experts(6), ParallelConfig(), 5000):
        assert (took["exchanges"], took["sent"]) == (0, 0)
    # Experts lie on one rank each: what the other one lacks of the model is what this one sends.
    took = ranks.run(counted, 2, many_experts(6), ParallelConfig(ep=2), 5000)
    assert [each["sent"] for each in took] == [each["bytes"] - each["held"] for each in took]


def test_copies_share_the_sending(ranks: Ranks) -> None:
    took = ranks.run(counted, 4, many_experts(8), ParallelConfig(ep=2), 5000)
    sent = [each["sent"] for each in took]
    assert max(sent) <= 1.1 * min(sent)
    lacking = took[0]["bytes"] - took[0]["held"]
    assert sum(sent) == 2 * lacking * 3  # each half of the experts once, to the three others


def peak(rank: int, world: int, model: ModelConfig, bucket_bytes: int) -> tuple[int, int]:
    """By how much this process grows at most while it exports, and the bytes that pass."""
    parallel = ParallelConfig(ep=2)
    stage = build_model(model, groups=groups_for(parallel), parallel=parallel)
    initialise(stage, 3)
    list(export_weights(stage, bucket_bytes=bucket_bytes))  # whatever is made once and kept
    Path("/proc/self/clear_refs").write_text("5")
    before, passed = _status("VmHWM"), 0
    for bucket in export_weights(stage, bucket_bytes=bucket_bytes):
        passed += sum(tensor.nbytes for _, tensor in bucket)
    return _status("VmHWM") - before, passed


def _status(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def test_fused_experts_pass_in_about_two_buckets_of_memory(ranks: Ranks) -> None:
    bucket = 4 << 20
    model = replace(many_experts(32, width=1024), hidden=256)
    for grew, passed in ranks.run(peak, 2, model, bucket, timeout_seconds=60):
        assert passed > 40 * bucket
        assert grew < 4 * bucket  # two, and what the caller has in hand; the allocator rounds


def test_a_rank_that_is_none_is_refused() -> None:
    model = build_model(MODELS["mixtral"])
    with pytest.raises(RequestError, match="to=1: is no rank of a world of 1"):
        next(export_weights(model, to=1))
