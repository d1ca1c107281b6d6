"""`--set` changes what it names, by type, and says what it could have been."""

from dataclasses import replace

import pytest

from core.config.architecture import (
    GQA,
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
from core.config.mapping import ParallelConfig
from core.config.override import Assignment, override, parse_assignment, settings
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.errors import ConfigError
from tests.core.said import sentence

ATTENTION = GQA(heads=6, kv_heads=3, head_dim=10)
EXPERTS = MoE(
    experts=12,
    top_k=3,
    expert_ffn=16,
    router=Router(score="softmax", normalise=True, groups=Groups(total=3, kept=2)),
    shared=SharedExperts(count=1),
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
        layers=repeat(2, Layer(attention=ATTENTION, mlp=Dense(ffn=23)))
        + repeat(3, Layer(attention=ATTENTION, mlp=EXPERTS)),
        predict_ahead=MultiToken(depth=1, loss_weight=0.3),
    ),
    parallel=ParallelConfig(),
    train=TrainConfig(steps=3, sequence_tokens=8, global_batch=4, microbatch=2),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    data=DataConfig(),
    precision=PrecisionConfig(),
    checkpoint=CheckpointConfig(),
)


def changed(*texts: str, run: RunConfig = RUN) -> RunConfig:
    new, faults = override(run, [parse_assignment(text) for text in texts])
    assert not faults, faults
    return new


def faults_of(*texts: str, run: RunConfig = RUN) -> list[str]:
    _, faults = override(run, [parse_assignment(text) for text in texts])
    return [sentence(fault) for fault in faults]


def test_each_section_takes_its_types() -> None:
    new = changed(
        "train.steps=7",
        "train.schedule_steps=11",
        "optimizer.learning_rate=1e-2",
        "optimizer.clip_norm=none",
        "optimizer.schedule=wsd",
        "data.path=a=b.txt",
        "precision.compute=bfloat16",
        "model.tied_embeddings=true",
        "checkpoint.keep=5",
        "parallel.ep=2",
    )
    assert (new.train.steps, new.train.schedule_steps) == (7, 11)
    assert (new.optimizer.learning_rate, new.optimizer.clip_norm, new.optimizer.schedule) == (0.01, None, "wsd")
    assert (new.data.path, new.precision.compute, new.model.tied_embeddings) == ("a=b.txt", "bfloat16", True)
    assert (new.checkpoint.keep, new.parallel.ep) == (5, 2)
    assert RUN.train.steps == 3


def test_a_virtual_part_reaches_every_layer_that_has_it_and_no_other() -> None:
    new = changed(
        "model.moe.router.groups.kept=1", "model.moe.experts=24", "model.dense.ffn=5", "model.attention.heads=9"
    )
    assert [layer.attention.heads for layer in new.model.layers] == [9] * 5
    assert [layer.mlp for layer in new.model.layers[:2]] == [Dense(ffn=5)] * 2
    wanted = replace(EXPERTS, experts=24, router=replace(EXPERTS.router, groups=Groups(total=3, kept=1)))
    assert [layer.mlp for layer in new.model.layers[2:]] == [wanted] * 3


def test_a_part_is_left_out_with_none() -> None:
    new = changed("model.moe.router.groups=none", "model.moe.shared=none", "model.predict_ahead=none")
    assert new.model.layers[-1].mlp.router.groups is None
    assert new.model.layers[-1].mlp.shared is None
    assert new.model.predict_ahead is None


@pytest.mark.parametrize("depth", [3, 4, 61])
def test_depth_keeps_the_leading_dense_layers(depth: int) -> None:
    layers = changed(f"model.num_layers={depth}").model.layers
    assert layers == RUN.model.layers[:2] + (RUN.model.layers[-1],) * (depth - 2)


def test_a_depth_that_loses_the_experts_is_refused() -> None:
    assert faults_of("model.num_layers=2") == [
        "model.num_layers=2: keeps the 2 leading dense layers and needs one more. Works: 3 or more."
    ]


def test_a_misspelt_key_names_the_closest_and_all_of_its_section() -> None:
    (fault,) = faults_of("train.step=5")
    assert "did you mean train.steps" in fault
    assert "train.eval_interval" in fault
    (fault,) = faults_of("moe.experts=5")
    assert "did you mean model.moe.experts" in fault
    (fault,) = faults_of("weather=5")
    assert "is in no section" in fault and "optimizer.…" in fault


def test_a_part_that_this_model_lacks_has_no_settings() -> None:
    run = changed("model.predict_ahead=none")
    (fault,) = faults_of("model.predict_ahead.depth=2", run=run)
    assert "is not a setting of this run's model" in fault
    (fault,) = faults_of("model.attention.query_rank=2")
    assert "is not a setting of this run's model" in fault


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train.steps=many", "must be a whole number. Works: for example 64"),
        ("train.steps=1.5", "must be a whole number"),
        ("train.steps=", "must be a whole number"),
        ("train.schedule_steps=x", "or none"),
        ("optimizer.eps=nan", "must be a finite number"),
        ("model.tied_embeddings=1", "must be true or false"),
        ("optimizer.schedule=cosin", "did you mean cosine?"),
        ("model.rope=none", "did you mean model.rope.theta"),
        ("model.predict_ahead=2", "it can only be left out. Works: model.predict_ahead=none"),
        ("data.path=", "must be a text that is not empty"),
        ("model.layers=3", "is not a setting"),
    ],
)
def test_a_value_of_the_wrong_type_says_the_type_and_an_example(text: str, part: str) -> None:
    (fault,) = faults_of(text)
    assert part in fault


def test_all_that_is_wrong_is_said_at_once_and_the_rest_is_applied() -> None:
    new, faults = override(RUN, [parse_assignment(t) for t in ("train.steps=x", "train.seed=9", "trian.steps=1")])
    assert len(faults) == 2
    assert new.train.seed == 9


def test_one_key_with_two_values_is_a_fault_that_names_both_origins() -> None:
    items = [Assignment(key="train.steps", text="5", origin="--steps"), parse_assignment("train.steps=6")]
    _, faults = override(RUN, items)
    assert [sentence(fault) for fault in faults] == [
        "train.steps=6: was also given as 5 by --steps. Works: one of the two."
    ]
    assert not override(RUN, [items[0], parse_assignment("train.steps=5")])[1]


def test_text_without_an_equals_sign_is_refused() -> None:
    for text in ("train.steps", "=5", ""):
        with pytest.raises(ConfigError, match="key=value"):
            parse_assignment(text)


def test_settings_lists_several_values_where_the_layers_differ() -> None:
    model = replace(
        RUN.model,
        layers=(*RUN.model.layers, Layer(attention=replace(ATTENTION, heads=3), mlp=EXPERTS)),
    )
    found = settings(replace(RUN, model=model))
    assert found["model.attention.heads"] == (6, 3)
    assert found["model.attention.kv_heads"] == 3
    assert found["model.num_layers"] == 6


def test_every_key_that_is_listed_accepts_its_own_value() -> None:
    for key, value in settings(RUN).items():
        text = "none" if value in (None, "present") else str(value).lower() if isinstance(value, bool) else str(value)
        new, faults = override(RUN, [Assignment(key=key, text=text)])
        assert not faults, faults
        assert value == "present" or new == RUN or key == "model.num_layers"
