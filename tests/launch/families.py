"""A small family for the tests of the launcher, so that they do not hang on the numbers of a real one."""

from dataclasses import dataclass
from typing import Any

from core.config.architecture import GQA, Layer, ModelConfig, MoE, RMSNorm, Rope, Router, repeat
from core.config.family import Family, Preset, Size
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig, TrainConfig

EXPERTS = MoE(experts=6, top_k=2, expert_ffn=8, router=Router(score="softmax", normalise=True))
MODEL = ModelConfig(
    vocab=300,
    hidden=12,
    max_tokens=64,
    norm=RMSNorm(eps=1e-6),
    rope=Rope(theta=1e4),
    layers=repeat(2, Layer(attention=GQA(heads=3, kv_heads=1, head_dim=4), mlp=EXPERTS)),
)


@dataclass(frozen=True, kw_only=True)
class NoHuggingFace:
    """A family that was never published."""

    def read_config(self, config: Any) -> ModelConfig:
        raise NotImplementedError

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        raise NotImplementedError

    def rules(self, model: ModelConfig) -> tuple[Any, ...]:
        raise NotImplementedError


TRAIN = TrainConfig(steps=50, sequence_tokens=32, global_batch=8, microbatch=2)
FAMILY = Family(
    name="odd",
    title="Odd",
    model_type="odd",
    sizes=(Size(name="tiny", model=MODEL, source="here"), Size(name="huge", model=MODEL, source="here")),
    presets=(
        Preset(
            size="tiny",
            hardware="cpu",
            ranks=2,
            parallel=ParallelConfig(ep=2),
            train=TRAIN,
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20),
        ),
    ),
    huggingface=NoHuggingFace(),
)
