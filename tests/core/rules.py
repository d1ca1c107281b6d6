"""For every rule a request that breaks it and one that just does not: the table of test_rules.py, and three ways to ask."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from core.config.architecture import (
    GQA,
    MLA,
    ClampedSwiGLU,
    Dense,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    repeat,
)
from core.config.capacity_text import parse_capacity
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from core.config.recipe_text import parse_names, parse_operand, parse_recipe
from core.config.router_text import parse_balance, parse_selection
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.config.serial import to_json

ATTENTION = GQA(heads=12, kv_heads=4, head_dim=16)
ROUTER = Router(score="softmax", normalise=True, groups=Groups(total=3, kept=2))
EXPERTS = MoE(experts=12, top_k=3, expert_ffn=96, router=ROUTER, shared=SharedExperts(count=1))
DENSE_LAYER = Layer(attention=ATTENTION, mlp=Dense(ffn=192))
MODEL = ModelConfig(
    vocab=300,
    hidden=96,
    max_tokens=64,
    norm=RMSNorm(eps=1e-6),
    rope=Rope(theta=1e4),
    layers=(DENSE_LAYER, *repeat(3, Layer(attention=ATTENTION, mlp=EXPERTS))),
    predict_ahead=MultiToken(depth=1, loss_weight=0.3),
)
RUN = RunConfig(
    family="odd",
    size="tiny",
    hardware="gpu",
    ranks=4,
    model=MODEL,
    parallel=ParallelConfig(),
    train=TrainConfig(steps=30, schedule_steps=30, sequence_tokens=64, global_batch=24, microbatch=1),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
    data=DataConfig(),
    precision=PrecisionConfig(),
    checkpoint=CheckpointConfig(),
)
DENSE = replace(RUN, model=replace(MODEL, layers=(DENSE_LAYER,) * 2, predict_ahead=None))
SPARSE = replace(RUN, model=replace(MODEL, layers=MODEL.layers[1:]))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A rule's code, settings (separated by spaces) that break it, and settings with which nothing is wrong.

    base: what they change. ranks, hardware: of both. keeps_ranks: of the second, where the rule is about them.
    """

    code: str
    breaks: str
    keeps: str
    base: RunConfig = RUN
    ranks: int = 4
    keeps_ranks: int | None = None
    hardware: str = "gpu"


def pair(code: str, breaks: str, keeps: str, **more: Any) -> Pair:
    return Pair(code=code, breaks=breaks, keeps=keeps, **more)


R = "model.moe.router"
PLAIN = f"{R}.groups=none {R}.normalise=false"
DEEPEP = "parallel.dispatcher=deepep precision.compute=bfloat16"
PAIRS = (
    pair("model.vocab-of-bytes", "model.vocab=256", "model.vocab=257"),
    pair("model.kv-heads-divide-heads", "model.attention.kv_heads=5", "model.attention.kv_heads=6"),
    pair("model.top-k-experts", f"{R}.groups=none model.moe.top_k=13", f"{R}.groups=none model.moe.top_k=12"),
    pair("model.jitter-range", f"{R}.jitter=1.0", f"{R}.jitter=0.999"),
    pair("model.normalise-after-top-k", f"{R}.score=softmax_after_top_k", f"{R}.score=softmax_after_top_k {R}.normalise=false"),
    pair("model.groups-divide-experts", f"{R}.groups.total=5", f"{R}.groups.total=4"),
    pair("model.groups-hold-top-k", f"{R}.groups.kept=1 model.moe.top_k=5", f"{R}.groups.kept=2 model.moe.top_k=5"),
    pair("balance.bias-score", f"{R}.balance=bias:0.1", f"{R}.balance=bias:0.1 {R}.score=sigmoid"),
    pair("balance.ema", f"{R}.groups=none {R}.balance=quantile:1", f"{R}.groups=none {R}.balance=quantile:0.999"),
    pair("balance.twice", f"{R}.balance=aux:sequence:1+aux:sequence:2", f"{R}.balance=aux:sequence:1+aux:microbatch:2"),
    pair("balance.quantile-alone", f"{R}.groups=none {R}.balance=quantile:0.5+aux:sequence:0.1", f"{R}.groups=none {R}.balance=quantile:0.5+z:0.1"),
    pair("balance.quantile-groups", f"{R}.balance=quantile:0.5", f"{R}.groups=none {R}.balance=quantile:0.5"),
    pair("balance.quantile-spare-expert", f"{R}.groups=none {R}.balance=quantile:0.5 model.moe.top_k=12", f"{R}.groups=none {R}.balance=quantile:0.5 model.moe.top_k=11"),
    pair("selection.alone", f"{PLAIN} {R}.selection=sinkhorn {R}.balance=aux:sequence:0.1", f"{PLAIN} {R}.selection=sinkhorn {R}.balance=z:0.1"),
    pair("selection.groups", f"{R}.normalise=false {R}.selection=sinkhorn", f"{PLAIN} {R}.selection=sinkhorn"),
    pair("selection.capacity", f"{PLAIN} {R}.selection=expert_choice model.moe.capacity=1.5", f"{PLAIN} {R}.selection=sinkhorn model.moe.capacity=1.5"),
    pair("selection.score", f"{PLAIN} {R}.selection=sinkhorn {R}.score=sigmoid", f"{PLAIN} {R}.selection=sinkhorn {R}.score=sigmoid model.moe.top_k=1"),
    pair("selection.normalise", f"{R}.groups=none {R}.selection=expert_choice", f"{PLAIN} {R}.selection=expert_choice"),
    pair("capacity.positive", "model.moe.capacity=0", "model.moe.capacity=0.01"),
    pair("mapping.world-attention", "parallel.tp=4", "parallel.tp=4", ranks=6, keeps_ranks=8),
    pair("mapping.world-experts", "parallel.ep=3", "parallel.ep=3", ranks=4, keeps_ranks=6),
    pair("mapping.tp-divides-heads", "parallel.tp=8", "parallel.tp=4", ranks=8),
    pair("mapping.tp-kv-heads", "parallel.tp=3", "parallel.tp=3 model.attention.kv_heads=6", ranks=3),
    pair("mapping.tp-width", "parallel.tp=4 model.dense.ffn=3", "parallel.tp=4 model.dense.ffn=4"),
    pair("mapping.cp-alltoall-divides-cp", "parallel.cp=4 parallel.cp_alltoall=3", "parallel.cp=4 parallel.cp_alltoall=2"),
    pair("mapping.cp-alltoall-heads", "parallel.cp=8 parallel.cp_alltoall=8", "parallel.cp=8 parallel.cp_alltoall=4", ranks=8),
    pair("mapping.cp-alltoall-kv-heads", "parallel.cp=6 parallel.cp_alltoall=6", "parallel.cp=6 parallel.cp_alltoall=6 model.attention.kv_heads=6", ranks=6),
    pair("mapping.ep-divides-experts", "parallel.ep=8", "parallel.ep=4", ranks=8),
    pair("mapping.ep-needs-experts", "parallel.ep=2", "parallel.ep=1", base=DENSE),
    pair("mapping.etp-needs-experts", "parallel.etp=2", "parallel.etp=1", base=DENSE),
    pair("mapping.etp-width", "parallel.etp=4 model.moe.expert_ffn=3", "parallel.etp=4 model.moe.expert_ffn=4"),
    pair("mapping.fsdp-schedule", "parallel.sharding=fsdp parallel.schedule=combined", "parallel.sharding=fsdp parallel.schedule=gpipe"),
    pair("mapping.fsdp-replicas-divide-dp", "parallel.sharding=fsdp parallel.fsdp_replicas=3", "parallel.sharding=fsdp parallel.fsdp_replicas=2"),
    pair("mapping.fsdp-replicas-need-fsdp", "parallel.fsdp_replicas=2", "parallel.fsdp_replicas=2 parallel.sharding=fsdp"),
    pair("layout.text", "parallel.layout=Ettt|mL parallel.pp=2", "parallel.layout=Etttt|mL parallel.pp=2"),
    pair("layout.pp", "parallel.layout=Ett|tt|mL parallel.pp=2", "parallel.layout=Ett|tt||mL parallel.pp=2"),
    pair("layout.vpp", "parallel.layout=Ett|tt||mL parallel.pp=2 parallel.vpp=4", "parallel.layout=Ett|tt||mL parallel.pp=2 parallel.vpp=2"),
    pair("layout.stages", "parallel.pp=2 parallel.vpp=50001", "parallel.pp=2 parallel.vpp=50000"),
    pair("dispatcher.limit", "parallel.dispatcher=flex model.moe.capacity=1.5:weight:pad", "parallel.dispatcher=flex model.moe.capacity=1.5:weight"),
    pair("dispatcher.package-bfloat16", "parallel.dispatcher=hybridep", "parallel.dispatcher=hybridep precision.compute=bfloat16"),
    pair("dispatcher.package-whole-experts", f"{DEEPEP} parallel.etp=2", f"{DEEPEP} parallel.ep=2"),
    pair("dispatcher.nodes-need-flex", "parallel.ep=4 parallel.ep_per_node=2", "parallel.ep=4 parallel.ep_per_node=2 parallel.dispatcher=flex"),
    pair("dispatcher.nodes-divide-ep", "parallel.ep=4 parallel.ep_per_node=3 parallel.dispatcher=flex", "parallel.ep=4 parallel.ep_per_node=4 parallel.dispatcher=flex"),
    pair("dispatcher.sms-package", "execution.dispatcher_sms=20 parallel.dispatcher=flex", f"execution.dispatcher_sms=20 {DEEPEP}"),
    pair("dispatcher.sms-number", f"execution.dispatcher_sms=21 {DEEPEP}", f"execution.dispatcher_sms=22 {DEEPEP}"),
    pair("budget.positive", "parallel.expert_budget=0", "parallel.expert_budget=0.01"),
    pair("budget.or-capacity", "parallel.expert_budget=1.5 model.moe.capacity=1.5", "parallel.expert_budget=1.5"),
    pair("budget.experts", "parallel.expert_budget=1.5", "parallel.expert_budget=none", base=DENSE),
    pair("graphs.whole-alone", "execution.graphs=full_iteration,attn parallel.expert_budget=1.5", "execution.graphs=full_iteration parallel.expert_budget=1.5"),
    pair("graphs.moe-alone", "execution.graphs=moe,moe_router parallel.expert_budget=1.5", "execution.graphs=moe,attn,mlp parallel.expert_budget=1.5"),
    pair("graphs.preprocess-needs-router", "execution.graphs=attn,moe_preprocess", "execution.graphs=attn,moe_router,moe_preprocess"),
    pair("graphs.nothing-there", "execution.graphs=attn,mlp", "execution.graphs=attn,moe_router", base=SPARSE),
    pair("graphs.static-shapes", "execution.graphs=full_iteration model.moe.capacity=1.5", "execution.graphs=full_iteration model.moe.capacity=1.5:weight:pad"),
    pair("graphs.combined", "execution.graphs=attn,mlp parallel.schedule=combined", "execution.graphs=attn,moe_router parallel.schedule=combined"),
    pair("recompute.combined", "memory.recompute=moe,core_attn parallel.schedule=combined", "memory.recompute=core_attn parallel.schedule=combined"),
    pair("recompute.full-alone", "memory.recompute=full,mlp", "memory.recompute=full"),
    pair("recompute.needs-mla", "memory.recompute=layernorm,mla_up_proj", "memory.recompute=layernorm"),
    pair("recompute.nothing-there", "memory.recompute=mlp,moe,moe_act,shared_experts", "memory.recompute=mlp", base=DENSE),
    pair("recompute.nothing-there", "memory.recompute=mlp,moe_act", "memory.recompute=moe,moe_act,shared_experts", base=SPARSE),
    pair("memory.optimizer-share", "memory.optimizer_offload=1.1", "memory.optimizer_offload=1.0"),
    pair("precision.primary-needs-recipe", "precision.primary=true", "precision.primary=true precision.recipe=fp8_current"),
    pair("precision.primary-sharding", "precision.primary=true precision.recipe=fp8_current parallel.sharding=fsdp", "precision.primary=true precision.recipe=fp8_current"),
    pair("precision.primary-operands", "precision.primary=true precision.recipe=fp8_current precision.recipe.input_gradient.weight=e4m3/delayed", "precision.primary=true precision.recipe=fp8_current"),
    pair("precision.main-gradients-compute", "precision.main_gradients=bfloat16", "precision.main_gradients=bfloat16 precision.compute=bfloat16"),
    pair("precision.moments-decay", "precision.moments=bfloat16 optimizer.beta1=0.9962", "precision.moments=bfloat16 optimizer.beta1=0.996"),
    pair("precision.moments-decay", "precision.moments=bfloat16 optimizer.beta2=0.999", "precision.moments=bfloat16 optimizer.beta2=0.996"),
    pair("precision.moments-decay", "precision.moments=float16 optimizer.beta1=0.9996", "precision.moments=float16 optimizer.beta1=0.9995"),
    pair("precision.moments-decay", "precision.moments=float16 optimizer.beta2=0.9991", "precision.moments=float16 optimizer.beta2=0.999"),
    pair("precision.remainder-compute", "precision.masters=remainder", "precision.masters=remainder precision.compute=bfloat16"),
    pair("precision.remainder-sharding", "precision.masters=remainder precision.compute=bfloat16 parallel.sharding=fsdp", "precision.masters=remainder precision.compute=bfloat16 parallel.sharding=zero1"),
    pair("precision.remainder-primary", "precision.masters=remainder precision.compute=bfloat16 precision.primary=true precision.recipe=fp8_current", "precision.masters=remainder precision.compute=bfloat16 precision.recipe=fp8_current"),
    pair("precision.primary-offload", "memory.optimizer_offload=0.5 precision.primary=true precision.recipe=fp8_current", "memory.optimizer_offload=0.5 precision.recipe=fp8_current"),
    pair("precision.loss-scale-compute", "precision.loss_scale=1024.0", "precision.loss_scale=1024.0 precision.compute=float16"),
    pair("precision.loss-scale-power", "precision.loss_scale=1000.0 precision.compute=float16", "precision.loss_scale=0.5 precision.compute=float16"),
    pair("precision.recipe-blocks", "precision.recipe=mxfp8 model.hidden=112", "precision.recipe=mxfp8 model.hidden=128"),
    pair("precision.recipe-blocks", "precision.recipe=mxfp8 parallel.tp=4 model.dense.ffn=256 model.moe.expert_ffn=128", "precision.recipe=mxfp8 parallel.tp=4 model.dense.ffn=256 model.moe.expert_ffn=128 model.attention.head_dim=32"),
    pair("precision.delayed-etp", "precision.recipe=fp8_delayed parallel.etp=2", "precision.recipe=fp8_current parallel.etp=2"),
    pair("precision.dispatch-scaling", "precision.recipe=fp8_current precision.recipe.dispatch=true", "precision.recipe=mxfp8 precision.recipe.dispatch=true"),
    pair("precision.dispatch-scaling", "precision.recipe=mxfp8 precision.recipe.dispatch=true precision.recipe.forward.input=e4m3/1x128", "precision.recipe=mxfp8 precision.recipe.dispatch=true precision.recipe.forward.input=e4m3/1x128+power_of_two model.hidden=128 model.dense.ffn=256 model.moe.expert_ffn=128"),
    pair("recipe.dispatch-package", f"precision.recipe=mxfp8 precision.recipe.dispatch=true {DEEPEP}", "precision.recipe=mxfp8 precision.recipe.dispatch=true parallel.dispatcher=flex precision.compute=bfloat16"),
    pair("precision.operand-both", "precision.recipe=fp8_current precision.recipe.forward.input=none", "precision.recipe=fp8_current precision.recipe.forward.input=none precision.recipe.forward.weight=none"),
    pair("precision.operand-hadamard", "precision.recipe=fp8_current precision.recipe.forward.input=e4m3/tensor+hadamard", "precision.recipe=fp8_current precision.recipe.forward.input=e4m3/tensor+hadamard precision.recipe.forward.weight=e4m3/tensor+hadamard"),
    pair("precision.operand-element", "precision.recipe=fp8_current precision.recipe.forward.input=e2m1/tensor", "precision.recipe=fp8_current precision.recipe.forward.input=e2m1/mx"),
    pair("precision.operand-element", "precision.recipe=fp8_current precision.recipe.forward.input=e5m2/nv", "precision.recipe=fp8_current precision.recipe.forward.input=e2m1/nv"),
    pair("precision.operand-square", "precision.recipe=nvfp4 precision.recipe.forward.input=e2m1/nv16x16", "precision.recipe=nvfp4 precision.recipe.forward.weight=e2m1/nv16x16"),
    pair("precision.recipe-align", "precision.recipe=mxfp8 precision.recipe.align=16", "precision.recipe=mxfp8 precision.recipe.align=64"),
    pair("precision.recipe-pattern", "precision.recipe=mxfp8 precision.recipe.high=layers.7.*", "precision.recipe=mxfp8 precision.recipe.high=layers.*.attention.*"),
    pair("precision.recipe-layers", "precision.recipe=mxfp8 precision.recipe.high_last=4", "precision.recipe=mxfp8 precision.recipe.high_last=3"),
    pair("train.sequence-fits-model", "train.sequence_tokens=65", "train.sequence_tokens=64"),
    pair("train.batch-divides", "train.global_batch=23", "train.global_batch=20"),
    pair("train.forced-experts", "train.forced_routing=balanced", "train.forced_routing=none", base=DENSE),
    pair("train.forced-ranks", "train.forced_routing=hot_rank", "train.forced_routing=hot_rank parallel.ep=2"),
    pair("optimizer.min-learning-rate", "optimizer.min_learning_rate=0.0011", "optimizer.min_learning_rate=0.001"),
    pair("optimizer.beta", "optimizer.beta2=1.0", "optimizer.beta2=0.999"),
    pair("optimizer.warmup-fits", "optimizer.warmup_steps=31", "optimizer.warmup_steps=30"),
    pair("data.validation-fraction", "data.validation_fraction=1.0", "data.validation_fraction=0.999"),
    pair("value.at-least", "train.steps=0", "train.steps=1"),
    pair("value.above", "optimizer.eps=0.0", "optimizer.eps=1e-30"),
    pair("value.even", "model.attention.head_dim=15", "model.attention.head_dim=14"),
    pair("hardware.package-gpu", DEEPEP, "parallel.dispatcher=flex", hardware="cpu"),
    pair("hardware.graphs-gpu", "execution.graphs=attn", "execution.graphs=none", hardware="cpu"),
    pair("hardware.recipe", "precision.recipe=mxfp8", "precision.recipe=fp8_current", hardware="h100"),
    pair("hardware.recipe", "precision.recipe=fp8_blockwise model.hidden=128 model.dense.ffn=128 model.moe.expert_ffn=128", "precision.recipe=nvfp4", hardware="gb200"),
    pair("hardware.whole-nodes", "train.global_batch=48", "train.global_batch=48", hardware="h100", ranks=12, keeps_ranks=16),
)  # fmt: skip

# Rules over how a setting is written: what is no setting never reaches a run.
WRITTEN = (
    pair("setting.form", "train.steps", "train.steps=1"),
    pair("setting.twice", "train.steps=1 train.steps=2", "train.steps=2 train.steps=2"),
    pair("setting.unknown", "train.stepz=2", "train.steps=2"),
    pair("setting.value", "train.steps=2.5", "train.steps=2"),
    pair("setting.depth", "model.num_layers=1", "model.num_layers=2"),
)


def clamped(limit: float) -> RunConfig:
    activation = ClampedSwiGLU(limit=limit, alpha=1.7, shift=1.0)
    layer = Layer(attention=ATTENTION, mlp=Dense(ffn=192, activation=activation))
    return replace(RUN, model=replace(MODEL, layers=(layer,), predict_ahead=None))


LATENT = Layer(
    attention=MLA(
        heads=12, query_rank=None, latent_rank=8, nope_dim=8, rope_dim=4, value_dim=8, latent_norm=RMSNorm(eps=1e-6)
    ),
    mlp=Dense(ffn=192),
)
RAISED = replace(RUN, memory=MemoryConfig(recompute=("mla_up_proj",)))
# Rules over what no setting can say: the run that breaks it, and the one that does not.
VALUES: tuple[tuple[str, RunConfig, RunConfig], ...] = (
    ("model.activation-finite", clamped(float("inf")), clamped(7.0)),
    ("recompute.needs-mla", RAISED, replace(RAISED, model=replace(MODEL, layers=(LATENT,)))),
    ("model.some-layers", replace(RUN, model=replace(MODEL, layers=(), predict_ahead=None)), DENSE),
)


# ------------------------------------------------------------------------------------- the same settings, as values

WORDS: dict[str, Callable[[str], Any]] = {
    "balance": parse_balance,
    "selection": parse_selection,
    "capacity": parse_capacity,
    "graphs": lambda text: () if text == "none" else tuple(text.split(",")),
    "recompute": lambda text: () if text == "none" else tuple(text.split(",")),
    "recipe": parse_recipe,
    "high": parse_names,
    **dict.fromkeys(("input", "weight", "gradient"), parse_operand),
}
PARTS = {"attention": ("GQA", "MLA"), "moe": ("MoE",), "dense": ("Dense",)}


def value_of(key: str, text: str) -> Any:
    """The value that a setting's text means, as a user of Python would write it."""
    name = key.rsplit(".", maxsplit=1)[-1]
    if name in WORDS:
        return WORDS[name](text)
    if text in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def in_json(data: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """run.json with one entry edited by hand; `attention`, `moe` and `dense` are those of every layer that has the part."""
    name, *rest = path
    if not rest:
        assert name in data, f"{name} is no entry of {data['kind']}"
        return {**data, name: to_json(value)}
    if name in PARTS and "layers" in data:
        held = "attention" if name == "attention" else "mlp"
        layers = [
            {**layer, held: in_json(layer[held], rest, value)} if layer[held]["kind"] in PARTS[name] else layer
            for layer in data["layers"]
        ]
        return {**data, "layers": layers}
    return {**data, name: in_json(data[name], rest, value)}


def in_python(held: Any, path: list[str], value: Any) -> Any:
    """A declaration with one field replaced, as `in_json`."""
    name, *rest = path
    if not rest:
        return replace(held, **{name: value})
    if name in PARTS and isinstance(held, ModelConfig):
        part = "attention" if name == "attention" else "mlp"
        layers = tuple(
            replace(layer, **{part: in_python(vars(layer)[part], rest, value)})
            if type(vars(layer)[part]).__name__ in PARTS[name]
            else layer
            for layer in held.layers
        )
        return replace(held, layers=layers)
    return replace(held, **{name: in_python(vars(held)[name], rest, value)})
