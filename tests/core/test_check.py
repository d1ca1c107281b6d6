"""Every rule says its setting, its value and what would do; a run that keeps them all has no fault."""

import sys
from dataclasses import replace
from subprocess import run as run_process

import pytest

from core.check import check, check_model
from core.config.architecture import (
    GQA,
    MLA,
    Activation,
    AuxLoss,
    ClampedSwiGLU,
    Dense,
    ExpertBias,
    GeGLU,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    MultiToken,
    RMSNorm,
    Rope,
    Router,
    SquaredReLU,
    ZLoss,
    repeat,
)
from core.config.mapping import ParallelConfig
from core.config.override import override, parse_assignment
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from tests.core.said import sentence

ATTENTION = GQA(heads=6, kv_heads=3, head_dim=10)
EXPERTS = MoE(
    experts=12,
    top_k=3,
    expert_ffn=16,
    router=Router(score="sigmoid", normalise=True, groups=Groups(total=3, kept=2)),
)
RUN = RunConfig(
    family="odd",
    size="tiny",
    hardware="cpu",
    ranks=2,
    model=ModelConfig(
        vocab=257,
        hidden=13,
        max_tokens=64,
        norm=RMSNorm(eps=1e-6),
        rope=Rope(theta=1e4),
        layers=(Layer(attention=ATTENTION, mlp=Dense(ffn=23)), *repeat(3, Layer(attention=ATTENTION, mlp=EXPERTS))),
        predict_ahead=MultiToken(depth=1, loss_weight=0.3),
    ),
    parallel=ParallelConfig(ep=2),
    train=TrainConfig(steps=30, sequence_tokens=64, global_batch=12, microbatch=3),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
    data=DataConfig(),
    precision=PrecisionConfig(),
    checkpoint=CheckpointConfig(),
)


def faults(*texts: str, ranks: int = 2) -> list[str]:
    run, wrong = override(replace(RUN, ranks=ranks), [parse_assignment(text) for text in texts])
    assert not wrong
    return [sentence(fault) for fault in check(run)]


def with_router(router: Router) -> ModelConfig:
    return replace(RUN.model, layers=(Layer(attention=ATTENTION, mlp=replace(EXPERTS, router=router)),))


def test_a_run_that_keeps_every_rule_has_no_fault() -> None:
    assert faults() == []


CASES = [
    ("model.hidden=0", "model.hidden=0: must be positive. Works: 1 or more."),
    ("model.vocab=256", "model.vocab=256: must hold the 256 bytes and the mark between documents. Works: 257 or more."),
    ("model.attention.kv_heads=4", "model.attention.kv_heads=4: must divide model.attention.heads=6. Works: 3 or 6."),
    (
        "model.attention.head_dim=7",
        "model.attention.head_dim=7: must be even, because the rotation turns pairs. Works: 6 or 8.",
    ),
    ("model.moe.router.groups.total=5", "must divide model.moe.experts=12. Works: 4 or 6."),
    ("model.moe.router.groups.kept=4", "in groups of 4. Works: 1 to 3."),
    ("model.moe.router.groups.kept=0", "model.moe.router.groups.kept=0: must be positive"),
    ("model.moe.expert_ffn=-1", "model.moe.expert_ffn=-1: must be positive"),
    ("model.dense.ffn=0", "model.dense.ffn=0: must be positive"),
    (
        "model.moe.router.jitter=0",
        "model.moe.router.jitter=0.0: must lie between 0 and 1, both excluded. Works: 0.01, or none.",
    ),
    ("model.moe.router.jitter=1.0", "model.moe.router.jitter=1.0: must lie between 0 and 1, both excluded"),
    ("model.moe.router.scale=0", "model.moe.router.scale=0.0: must be positive"),
    ("model.predict_ahead.depth=0", "model.predict_ahead.depth=0: must be positive"),
    ("model.norm.eps=-1", "model.norm.eps=-1.0: must be positive"),
    ("parallel.ep=0", "parallel.ep=0: must be positive"),
    ("parallel.vpp=0", "parallel.vpp=0: must be positive"),
    ("parallel.cp_alltoall=-1", "parallel.cp_alltoall=-1: must be positive"),
    ("train.global_batch=13", "times 2 data-parallel ranks. Works: 12 or 18."),
    ("train.steps=0", "train.steps=0: must be positive"),
    ("train.eval_interval=0", "train.eval_interval=0: must be positive"),
    ("train.sequence_tokens=65", "train.sequence_tokens=65: must be at most model.max_tokens=64. Works: 64 or less."),
    ("optimizer.learning_rate=0", "optimizer.learning_rate=0.0: must be positive"),
    ("optimizer.min_learning_rate=1", "must lie between 0 and optimizer.learning_rate=0.001"),
    ("optimizer.beta2=1", "optimizer.beta2=1.0: must lie in [0, 1). Works: 0.9 or 0.95."),
    ("optimizer.warmup_steps=31", "must fit into the schedule of train.steps=30 steps. Works: 30 or less."),
    ("optimizer.clip_norm=0", "Works: 1.0, or none."),
    ("data.validation_fraction=0", "data.validation_fraction=0.0: must lie between 0 and 1"),
    ("data.validation_fraction=1", "data.validation_fraction=1.0: must lie between 0 and 1"),
    ("checkpoint.keep=0", "checkpoint.keep=0: must be positive"),
]


@pytest.mark.parametrize(("text", "part"), CASES, ids=[text for text, _ in CASES])
def test_one_broken_rule_gives_one_fault_with_values_that_work(text: str, part: str) -> None:
    (fault,) = faults(text)
    assert part in fault
    assert fault.startswith(text.split("=", maxsplit=1)[0])


def test_a_hot_rank_needs_ranks_and_forced_routing_needs_experts() -> None:
    assert faults("train.forced_routing=hot_rank") == faults("train.forced_routing=balanced") == []
    (fault,) = faults("train.forced_routing=hot_rank", "parallel.ep=1")
    assert fault.startswith(
        "train.forced_routing=hot_rank: needs several ranks that share the experts, and parallel.ep=1"
    )
    dense = replace(RUN.model, layers=(Layer(attention=ATTENTION, mlp=Dense(ffn=8)),), predict_ahead=None)
    forced = replace(RUN.train, forced_routing="balanced")
    found = [
        fault for fault in check(replace(RUN, model=dense, train=forced)) if fault.setting == "train.forced_routing"
    ]
    assert [fault.rule for fault in found] == ["needs layers with experts to force tokens to"]


def test_top_k_beyond_the_experts_is_refused() -> None:
    assert "model.moe.top_k=13: must be at most model.moe.experts=12. Works: 1 to 12." in faults("model.moe.top_k=13")


def test_ranks_that_do_not_fold_name_the_nearest_worlds_and_degrees() -> None:
    (fault,) = faults("train.global_batch=9", ranks=3)
    assert fault == "--ranks=3: must be a multiple of parallel.etp*ep*pp=2. Works: 2 or 4, or parallel.ep=1 or 3."
    assert faults("train.global_batch=3", ranks=0) == ["--ranks=0: must be positive. Works: 1 or more."]


def test_expert_parallelism_must_divide_the_experts() -> None:
    fault = faults("model.moe.experts=8", "model.moe.router.groups=none", "train.global_batch=9", ranks=3)[-1]
    assert fault.endswith("Works: 2 or 4, or parallel.ep=1."), "three ranks would not divide eight experts"
    (fault,) = faults("parallel.ep=5", "train.global_batch=15", ranks=5)
    assert fault == "parallel.ep=5: must divide model.moe.experts=12. Works: 4 or 6."


def test_expert_parallelism_without_experts_is_refused() -> None:
    dense = replace(RUN.model, layers=(RUN.model.layers[0],))
    (fault,) = check(replace(RUN, model=dense))
    assert sentence(fault) == "parallel.ep=2: spreads experts, and this model has none. Works: 1."


def test_warmup_and_decay_share_the_schedule() -> None:
    (fault,) = faults("optimizer.schedule=wsd", "optimizer.decay_steps=25", "train.schedule_steps=33")
    assert "plus optimizer.decay_steps=25 must fit into the schedule of train.schedule_steps=33" in fault
    assert "Works: 8 or less" in fault
    assert faults("optimizer.schedule=cosine", "optimizer.decay_steps=25") == []


def test_groups_that_cannot_hold_top_k_are_refused() -> None:
    (fault,) = faults("model.moe.top_k=5", "model.moe.router.groups.kept=1")
    assert "in groups of 4. Works: 2 to 3." in fault


@pytest.mark.parametrize(
    ("router", "part"),
    [
        (Router(score="softmax_after_top_k", normalise=True), "whose weights sum to one already"),
        (Router(score="softmax", normalise=True, balance=(ExpertBias(rate=1e-3),)), "cannot carry an ExpertBias"),
        (
            Router(
                score="softmax",
                normalise=True,
                balance=(
                    AuxLoss(scope="sequence", coefficient=0.1),
                    AuxLoss(scope="sequence", coefficient=0.2),
                ),
            ),
            "sequence: stands twice",
        ),
        (Router(score="softmax", normalise=True, balance=(ZLoss(coefficient=-1),)), "must be at least 0"),
        (Router(score="softmax", normalise=True, balance=(ZLoss(coefficient=float("nan")),)), "must be at least 0"),
    ],
)
def test_a_router_that_contradicts_itself_is_refused(router: Router, part: str) -> None:
    (fault,) = check_model(with_router(router))
    assert part in str(fault)


def test_a_router_with_losses_of_different_scopes_is_right() -> None:
    balance = (AuxLoss(scope="sequence", coefficient=0.1), AuxLoss(scope="microbatch", coefficient=0.0))
    assert check_model(with_router(Router(score="softmax_after_top_k", normalise=False, balance=balance))) == ()


def test_latent_attention_needs_even_rotated_dimensions_and_positive_ranks() -> None:
    mla = MLA(heads=3, query_rank=0, latent_rank=5, nope_dim=4, rope_dim=3, value_dim=7, latent_norm=RMSNorm(eps=1e-6))
    model = replace(RUN.model, layers=(Layer(attention=mla, mlp=Dense(ffn=3)),))
    text = "\n".join(map(str, check_model(model)))
    assert "model.attention.query_rank=0: must be positive" in text
    assert "model.attention.rope_dim=3: must be even" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("activation", "part"),
    [
        (ClampedSwiGLU(limit=0.0, alpha=1.702, shift=1.0), "activation.limit=0.0: must be positive"),
        (ClampedSwiGLU(limit=7.0, alpha=-1.0, shift=1.0), "activation.alpha=-1.0: must be positive"),
        (ClampedSwiGLU(limit=float("inf"), alpha=1.702, shift=1.0), "activation.limit=inf: must be finite"),
        (ClampedSwiGLU(limit=7.0, alpha=1.702, shift=float("nan")), "activation.shift=nan: must be finite"),
    ],
)
def test_a_clamp_that_leaves_nothing_or_is_none_is_refused(activation: ClampedSwiGLU, part: str) -> None:
    router = Router(score="softmax", normalise=True)
    moe = MoE(experts=3, top_k=1, expert_ffn=5, router=router, activation=activation, bias=True)
    attention = RUN.model.layers[0].attention
    for mlp, prefix in ((moe, "model.moe."), (Dense(ffn=3, activation=activation), "model.dense.")):
        (fault,) = check_model(replace(RUN.model, layers=(Layer(attention=attention, mlp=mlp),)))
        assert prefix + part in str(fault)


@pytest.mark.parametrize(
    "activation", [GeGLU(tanh=True), SquaredReLU(), ClampedSwiGLU(limit=7.0, alpha=1.702, shift=-1.0)]
)
def test_every_other_activation_is_right(activation: Activation) -> None:
    mlp = Dense(ffn=3, activation=activation)
    model = replace(RUN.model, layers=(Layer(attention=RUN.model.layers[0].attention, mlp=mlp),))
    assert check_model(model) == ()


def test_everything_that_is_wrong_is_said_at_once_and_shared_parts_once() -> None:
    found = faults("model.attention.kv_heads=4", "parallel.ep=5", "train.steps=0", "optimizer.beta1=2")
    assert [fault.split("=")[0] for fault in found[:2]] == ["model.attention.kv_heads", "parallel.ep"]
    assert len(found) == 5  # ep breaks two rules: the experts and the world


def test_checking_needs_no_torch() -> None:
    code = "import sys, core.check, core.config.override, core.config.serial; sys.exit('torch' in sys.modules)"
    assert run_process([sys.executable, "-c", code], check=False).returncode == 0
