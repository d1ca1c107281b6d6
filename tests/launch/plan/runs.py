"""Runs of tiny models and of DeepSeek-V3, for what plans are asked about."""

from __future__ import annotations

from dataclasses import replace

from core.config.family import find_family
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.precision import PrecisionConfig
from core.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from tests.core import tiny

# So many tokens that every rank of tp * cp uses all experts alike when they are dealt out evenly.
TOKENS = 48
MODELS = {
    name: replace(model, max_tokens=TOKENS, vocab=257)
    for name, model in (("mixtral", tiny.mixtral()), ("qwen3", tiny.qwen3()), ("deepseek", tiny.deepseek()))
}


def tiny_run(
    model: str,
    parallel: ParallelConfig,
    ranks: int,
    memory: MemoryConfig | None = None,
    precision: PrecisionConfig | None = None,
) -> RunConfig:
    """A run of a tiny model over two microbatches a replica."""
    replicas = ranks // (parallel.tp * parallel.cp * parallel.pp)
    return RunConfig(
        family=model,
        size="tiny",
        hardware="cpu",
        ranks=ranks,
        model=MODELS[model],
        parallel=parallel,
        train=TrainConfig(steps=1, sequence_tokens=TOKENS, global_batch=2 * replicas, microbatch=1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        data=DataConfig(),
        precision=precision or PrecisionConfig(),
        checkpoint=CheckpointConfig(),
        memory=memory or MemoryConfig(),
    )


def deepseek_run(ranks: int = 256, memory: MemoryConfig | None = None, **mapping: object) -> RunConfig:
    """DeepSeek-V3 in bfloat16 as the report's Table 3 has it: 256 ranks, TP 1, PP 4, VPP 4, EP 64; `mapping` changes that."""
    named: dict[str, object] = {"pp": 4, "vpp": 4, "ep": 64, "layout": "Et*4|(tttt|)*14tmL"}
    model = find_family("deepseek_v3").size("671b").model
    return RunConfig(
        family="deepseek_v3",
        size="671b",
        hardware="gb200",
        ranks=ranks,
        model=model,
        parallel=ParallelConfig(**(named | mapping)),  # type: ignore[arg-type]
        train=TrainConfig(steps=1, sequence_tokens=4096, global_batch=8192, microbatch=1),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        data=DataConfig(),
        precision=PrecisionConfig(compute="bfloat16"),
        checkpoint=CheckpointConfig(),
        memory=memory or MemoryConfig(),
    )
