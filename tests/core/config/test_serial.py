"""A configuration goes to JSON and back unchanged; what does not fit is refused by its path."""

import json
from dataclasses import replace

import pytest

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
    QuantileBias,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    Sinkhorn,
    SquaredReLU,
    Yarn,
    ZLoss,
)
from core.config.mapping import ParallelConfig
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from core.config.serial import run_from_json, run_to_json
from core.errors import RequestError

NORM = RMSNorm(eps=1e-6)


def a_run() -> RunConfig:
    """A run that holds every union's every member."""
    mla = MLA(heads=3, query_rank=None, latent_rank=5, nope_dim=4, rope_dim=2, value_dim=7, latent_norm=NORM)
    gqa = GQA(heads=6, kv_heads=3, head_dim=10, head_norm=NORM)
    router = Router(
        score="sigmoid",
        normalise=True,
        groups=Groups(total=3, kept=2),
        scale=2.5,
        balance=(
            ExpertBias(rate=1e-3),
            AuxLoss(scope="sequence", coefficient=0.1 + 0.2),
            ZLoss(coefficient=1e-300),
            QuantileBias(ema=0.1 + 0.2),
        ),
        selection=Sinkhorn(tolerance=1e-300, rounds=3),
    )
    moe = MoE(experts=9, top_k=2, expert_ffn=11, router=router, shared=SharedExperts(count=1))
    return RunConfig(
        family="odd",
        size="tiny",
        hardware="cpu",
        ranks=2,
        model=ModelConfig(
            vocab=257,
            hidden=13,
            max_tokens=64,
            norm=NORM,
            rope=Yarn(theta=1e4, factor=40, trained_tokens=17),
            layers=(Layer(attention=mla, mlp=Dense(ffn=23)), Layer(attention=gqa, mlp=moe)),
            predict_ahead=MultiToken(depth=1, loss_weight=0.3),
        ),
        parallel=ParallelConfig(ep=2, dispatcher="allgather"),
        train=TrainConfig(steps=3, sequence_tokens=8, global_batch=4, microbatch=2),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=None),
        data=DataConfig(path="näme with spaces.txt"),
        precision=PrecisionConfig(compute="bfloat16"),
        checkpoint=CheckpointConfig(),
    )


def test_a_run_comes_back_equal_through_text() -> None:
    run = a_run()
    assert run_from_json(json.loads(json.dumps(run_to_json(run)))) == run


def test_the_other_members_of_the_unions_come_back_as_themselves() -> None:
    run = a_run()
    model = replace(run.model, rope=Rope(theta=7.0), predict_ahead=None)
    other = replace(run, model=model, optimizer=OptimizerConfig(learning_rate=1.0, clip_norm=0.5))
    assert run_from_json(json.loads(json.dumps(run_to_json(other)))) == other


@pytest.mark.parametrize(
    "activation", [GeGLU(tanh=True), ClampedSwiGLU(limit=0.1 + 0.2, alpha=1.702, shift=-1.0), SquaredReLU()]
)
def test_every_activation_and_biases_come_back_as_themselves(activation: Activation) -> None:
    run = a_run()
    attention, moe = run.model.layers[-1].attention, run.model.layers[-1].mlp
    assert isinstance(moe, MoE)
    mlps = Dense(ffn=3, activation=activation), replace(moe, activation=activation, bias=True)
    layers = tuple(Layer(attention=attention, mlp=mlp) for mlp in mlps)
    run = replace(run, model=replace(run.model, layers=layers))
    assert run_from_json(json.loads(json.dumps(run_to_json(run)))) == run


def test_a_missing_entry_takes_its_default_and_a_needed_one_is_named() -> None:
    data = run_to_json(a_run())
    del data["train"]["eval_interval"]
    assert run_from_json(data).train.eval_interval == 50
    del data["train"]["steps"]
    with pytest.raises(RequestError, match=r"run\.train\.steps: is missing"):
        run_from_json(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("train", "stepz"), 1, r"run\.train\.stepz: TrainConfig has no such entry"),
        (("train", "steps"), "3", r"run\.train\.steps: expected int, found '3'"),
        (("train", "steps"), True, r"run\.train\.steps: expected int, found True"),
        (("train", "steps"), 3.5, r"run\.train\.steps: expected int, found 3\.5"),
        (("optimizer", "schedule"), "linear", r"run\.optimizer\.schedule: expected one of cosine, wsd"),
        (("model", "rope"), {"kind": "Alibi"}, r"run\.model\.rope: expected one of Rope, Yarn, found kind 'Alibi'"),
        (("model", "layers"), {}, r"run\.model\.layers: expected a list"),
        (("parallel",), [], r"run\.parallel: expected ParallelConfig"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(path: tuple[str, ...], value: object, message: str) -> None:
    data = run_to_json(a_run())
    held = data
    for name in path[:-1]:
        held = held[name]
    held[path[-1]] = value
    with pytest.raises(RequestError, match=message):
        run_from_json(data)


def test_a_list_of_layers_names_the_layer_that_is_wrong() -> None:
    data = run_to_json(a_run())
    data["model"]["layers"][1]["mlp"]["router"]["balance"][2]["coefficient"] = None
    with pytest.raises(RequestError, match=r"run\.model\.layers\[1\]\.mlp\.router\.balance\[2\]\.coefficient"):
        run_from_json(data)
