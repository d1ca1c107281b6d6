"""What the tuned set-ups of several families share: number formats, batches, layouts, and how their sources are cited.

Learning rates, lengths and intervals are no part of a source's tuning: each family has one set of them for all hardware. Routing that
a source forces to be balanced while it measures is never part of a set-up.
"""

from __future__ import annotations

from dataclasses import replace

from core.config.execution import GraphName
from core.config.family import Published
from core.config.precision import PrecisionConfig
from core.config.recipe import RECIPES
from core.config.run import TrainConfig

BF16 = PrecisionConfig(compute="bfloat16")
MXFP8 = replace(BF16, recipe=RECIPES["mxfp8"], primary=True)
FP8_BLOCKWISE = replace(BF16, recipe=RECIPES["fp8_blockwise"], primary=True)
FP8_CURRENT = replace(BF16, recipe=RECIPES["fp8_current"], primary=True)

# What Transformer Engine captures of a layer, while the experts' shapes change: report section 4.3.5.
LAYER_GRAPHS: tuple[GraphName, ...] = ("attn", "moe_router", "moe_preprocess")
ROUTER_GRAPHS: tuple[GraphName, ...] = ("moe_router", "moe_preprocess")
FULL_GRAPH: tuple[GraphName, ...] = ("full_iteration",)
# Under a full graph every rank has buffers for this many times an even load.
FULL_GRAPH_BUDGET = 1.5

REPORT = "arXiv 2603.07685 tables 11 and 20, appendix B.2"
SUMMARY = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md"

FULL_GRAPH_NOTE = (
    "A rank drops what exceeds 1.5 times an even load (parallel.expert_budget), which gives the full graph its fixed shapes; the source "
    "pages part of those buffers out instead of holding them."
)
FP8_ATTENTION_NOTE = (
    "The source also computes attention in FP8; no setting here asks for that, and its figure includes it."
)
HYBRIDEP_NOTE = (
    "Processors for HybridEP: sources give 16 (Bridge's library and its development set-ups), 32 (its performance set-ups and ModelZoo's "
    "launcher) and 64 (for a small model on B200)."
)
DEEPEP_NOTE = "Processors for DeepEP: 20 by default; ModelZoo takes 24 on B200, and Bridge 16, by way of the setting that it has for HybridEP."


def low_moments(precision: PrecisionConfig) -> PrecisionConfig:
    """The same with the optimizer's two moments in bfloat16."""
    return replace(precision, moments="bfloat16")


def low_states(precision: PrecisionConfig) -> PrecisionConfig:
    """The same with the optimizer's two moments and the gradients summed over microbatches in bfloat16."""
    return replace(precision, moments="bfloat16", main_gradients="bfloat16")


def batch(sequences: int, microbatch: int = 1, sequence_tokens: int = 4096) -> TrainConfig:
    """A run of ten thousand steps over batches of so many sequences. No text is sampled on a cluster."""
    return TrainConfig(
        steps=10_000,
        sequence_tokens=sequence_tokens,
        global_batch=sequences,
        microbatch=microbatch,
        eval_interval=500,
        eval_sequences=max(32, sequences // 8),
        sample_tokens=0,
    )


def ends_counted(num_layers: int, stages: int) -> str:
    """The layout in which embedding and loss count as a layer each, so that the first and the last stage hold one layer less.

    Raises ValueError unless num_layers + 2 divides over `stages`, two or more.
    """
    each, left_over = divmod(num_layers + 2, stages)
    if left_over or stages < 2:
        raise ValueError(f"{num_layers} layers, embedding and loss do not divide over {stages} stages, two or more")
    middle = "(" + layers_text(each) + "|)" + f"*{stages - 2}" if stages > 2 else ""
    return f"E{layers_text(each - 1)}|{middle}{layers_text(each - 1)}L"


def layers_text(number: int) -> str:
    """So many layers in the language of layouts."""
    return "t" * number if number < 3 else f"t*{number}"


def bridge(path: str, name: str) -> str:
    """A set-up of NVIDIA's Megatron-Bridge, by file and name."""
    return f"NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/{path} at 067f987, {name}"


def model_zoo(path: str) -> str:
    """A script of the Megatron MoE ModelZoo, with what its launcher adds."""
    return f"yanring/Megatron-MoE-ModelZoo {path} at e865051, with sbatch_benchmarking.sh"


def summary(container: str, tokens_per_second: float, tflops: float) -> Published:
    """A row of Megatron-Bridge's performance summary: of one GPU."""
    return Published(tokens_per_second=tokens_per_second, tflops=tflops, source=f"{SUMMARY}, container {container}")


def reported(tokens_per_second: float, tflops: float) -> Published:
    """A row of the report's tables: of one GPU."""
    return Published(tokens_per_second=tokens_per_second, tflops=tflops, source="arXiv 2603.07685 table 11")
