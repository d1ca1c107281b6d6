"""Set-ups per hardware. First of a size and hardware: what is taken without `--preset`."""

from dataclasses import replace

from core.config.execution import ExecutionConfig
from core.config.family import Preset, Published
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.run import OptimizerConfig
from core.config.small import CONTINUED_CPU, CONTINUED_GPU, TINY_CPU, TINY_GPU
from core.config.tuned import (
    BF16,
    DEEPEP_NOTE,
    FP8_ATTENTION_NOTE,
    FP8_CURRENT,
    FULL_GRAPH,
    FULL_GRAPH_BUDGET,
    FULL_GRAPH_NOTE,
    HYBRIDEP_NOTE,
    LAYER_GRAPHS,
    MXFP8,
    REPORT,
    ROUTER_GRAPHS,
    batch,
    bridge,
    ends_counted,
    low_moments,
    model_zoo,
    reported,
    summary,
)

# Neither the paper nor its authors publish learning rates. These are what Megatron-Bridge fills in, with a warm-up.
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=500)

LAYOUT_NOTE = "94 layers divide over no pipeline of 4 or 8: sources count embedding and loss as a layer each, 96 in all, which is written out here."
RATES_NOTE = "Learning rates of the release are not published: these are placeholders."
GB300_NOTE = (
    "On GB300 sources differ: 256 GPUs, pp 4, ep 64, 6 virtual stages, batch 3072 (report, 974 TFLOPS), 64 GPUs without pipeline (ModelZoo, "
    "1,055), 256 with 12 virtual stages, ep 32 and a full graph (Bridge, 1,306). Bridge's older summary has the report's two figures for "
    "ep 32 and batch 8192, so one of the two mappings is misreported."
)
GB200_BF16_NOTE = (
    "For BF16 on GB200 the report has pp 4, ep 32, 12 virtual stages, recomputation and overlap (750 TFLOPS); ModelZoo and Bridge pp 8, "
    "ep 8 without (ModelZoo: 750 too); an older summary pp 8, ep 32, 3 virtual stages (728)."
)
LONG_NOTE = (
    "The same numbers stand under GB300 in the report and under GB200 in ModelZoo, whose script also recomputes moe_act and layernorm and "
    "captures no graph."
)
H100_NOTE = (
    "On H100 sources differ: graphs of attn too (report) or of router and preprocessing alone (ModelZoo's newer script), both 320 TFLOPS at "
    "batch 2048; none (ModelZoo's older one: 245 to 276); plain all-to-all at batch 8192 (Bridge); HybridEP with 3 virtual stages (Bridge's "
    "development)."
)
DISPATCHER_NOTE = "Dispatcher of the 30B: Bridge takes HybridEP; ModelZoo's file says alltoall, but its launcher appends DeepEP's flags, and the last win."
H200_NOTE = (
    "No source has a set-up for H200: this is H100's; H200 has the same units and links, and more memory. Untested."
)
A100_NOTE = (
    "No source has a set-up for A100: this is H100's with plain all-to-all, as the packages of kernels are for Hopper and later, and "
    "without graphs. Untested."
)
NOTES = (LAYOUT_NOTE, RATES_NOTE)
MIXED_NOTES = (*NOTES, HYBRIDEP_NOTE)

# By the number of virtual stages; four pipeline ranks on Blackwell's NVLink racks, eight elsewhere.
PP4 = ParallelConfig(pp=4, vpp=6, ep=64, layout=ends_counted(94, 24), dispatcher="hybridep")
PP8 = ParallelConfig(pp=8, vpp=3, ep=8, layout=ends_counted(94, 24), dispatcher="hybridep")
PP8_WHOLE = replace(PP8, vpp=1, layout=ends_counted(94, 8))
TWELVE = replace(PP4, vpp=12, ep=32, layout=ends_counted(94, 48))
TP2 = ParallelConfig(tp=2, pp=8, vpp=4, ep=32, layout=ends_counted(94, 32), dispatcher="deepep", schedule="combined")
ACTIVATION_AND_NORMS = MemoryConfig(recompute=("moe_act", "layernorm"))

# ------------------------------------------------------------------------------------------------- 235B on GB300, GB200

GB300_MXFP8 = Preset(
    name="mxfp8",
    size="235b_a22b",
    hardware="gb300",
    ranks=256,
    parallel=replace(TWELVE, schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    train=batch(8192, 2),
    optimizer=OPTIMIZER,
    precision=MXFP8,
    execution=ExecutionConfig(graphs=FULL_GRAPH, dispatcher_sms=32),
    status="published",
    source=bridge("perf_recipes/qwen/gb300/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_gb300_fp8mx_config"),
    figure=summary("26.08", 8816, 1306),
    notes=(GB300_NOTE, FULL_GRAPH_NOTE, FP8_ATTENTION_NOTE, *MIXED_NOTES),
)
GB300_BF16 = replace(
    GB300_MXFP8,
    name="bf16",
    parallel=replace(TWELVE, vpp=1, layout=ends_counted(94, 4)),
    precision=BF16,
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=32),
    source=bridge("perf_recipes/qwen/gb300/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_gb300_bf16_config"),
    figure=None,
    notes=MIXED_NOTES,
)
GB300_MXFP8_PAPER = replace(
    GB300_MXFP8,
    name="mxfp8-paper",
    parallel=PP4,
    train=batch(3072, 2),
    precision=low_moments(MXFP8),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS),
    source=REPORT,
    figure=reported(6583, 974),
    notes=(
        "The tables do not say how weights and moments are held: as in ModelZoo's script for GB200.",
        GB300_NOTE,
        *NOTES,
    ),
)
GB300_MXFP8_64 = replace(
    GB300_MXFP8,
    name="mxfp8-64gpus",
    ranks=64,
    parallel=ParallelConfig(ep=64, dispatcher="hybridep", schedule="combined"),
    train=batch(8192),
    precision=low_moments(MXFP8),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=32),
    source=model_zoo("best_practice/qwen3/run_gb300_235b.sh"),
    figure=Published(tflops=1055, source="yanring/Megatron-MoE-ModelZoo best_practice/qwen3"),
    notes=(GB300_NOTE, RATES_NOTE, HYBRIDEP_NOTE),
)
GB300_128K = replace(
    GB300_MXFP8_PAPER,
    name="128k",
    size="235b_a22b_128k",
    ranks=128,
    parallel=replace(TWELVE, tp=4, cp=4),
    train=batch(1024, sequence_tokens=131072),
    figure=reported(1556, 1150),
    notes=(LONG_NOTE, *NOTES),
)
GB200_MXFP8 = replace(
    GB300_MXFP8_PAPER,
    name="mxfp8",
    hardware="gb200",
    parallel=replace(PP4, schedule="combined"),
    train=batch(3072, 3),
    memory=replace(ACTIVATION_AND_NORMS, offload=("expert_fc1", "moe_act")),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=32),
    source=model_zoo("best_practice/qwen3/run_gb200_235b.sh"),
    figure=reported(6212, 919),
    notes=("The source needs unreleased changes of its software to offload under graphs.", *MIXED_NOTES),
)
GB200_BF16 = replace(
    GB300_BF16,
    hardware="gb200",
    parallel=PP8_WHOLE,
    train=batch(8192),
    source=model_zoo("best_practice/qwen3/run_gb200_235b.sh")
    + "; the same in Megatron-Bridge's qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config",
    figure=Published(tflops=750, source="yanring/Megatron-MoE-ModelZoo best_practice/qwen3"),
    notes=(GB200_BF16_NOTE, *MIXED_NOTES),
)
GB200_MXFP8_PAPER = replace(
    GB200_MXFP8,
    name="mxfp8-paper",
    memory=ACTIVATION_AND_NORMS,
    execution=ExecutionConfig(graphs=LAYER_GRAPHS),
    source=REPORT,
    notes=(
        "The report names no offloading for this row, which ModelZoo's script of the same figure has: the set-up mxfp8. With what our "
        "layers keep it does not fit.",
        *NOTES,
    ),
)
GB200_MXFP8_FULL_GRAPH = replace(
    GB300_MXFP8,
    name="mxfp8-full-graph",
    hardware="gb200",
    parallel=replace(PP8, ep=32, schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    train=batch(8192),
    source=bridge("perf_recipes/qwen/gb200/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_config"),
    figure=summary("26.08", 7280, 1077),
    notes=(FULL_GRAPH_NOTE, FP8_ATTENTION_NOTE, *MIXED_NOTES),
)
GB200_BF16_PAPER = replace(
    GB200_MXFP8_PAPER,
    name="bf16-paper",
    parallel=replace(TWELVE, schedule="combined"),
    train=batch(8192),
    precision=BF16,
    figure=reported(5100, 750),
    notes=(GB200_BF16_NOTE, *NOTES),
)
GB200_128K = replace(
    GB300_128K,
    hardware="gb200",
    memory=ACTIVATION_AND_NORMS,
    execution=ExecutionConfig(dispatcher_sms=32),
    source=model_zoo("best_practice/qwen3/run_gb200_235b.sh"),
    figure=Published(tflops=1150, source="yanring/Megatron-MoE-ModelZoo best_practice/qwen3"),
    notes=(LONG_NOTE, *MIXED_NOTES),
)

# ------------------------------------------------------------------------------------------- 235B on B300, B200, Hopper

B300_MXFP8 = replace(
    GB200_MXFP8_FULL_GRAPH,
    name="mxfp8",
    hardware="b300",
    parallel=replace(PP8, schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    train=batch(8192, 2),
    source=bridge("perf_recipes/qwen/b300/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_b300_fp8mx_config"),
    figure=None,
)
B300_BF16 = replace(
    B300_MXFP8,
    name="bf16",
    parallel=PP8_WHOLE,
    precision=BF16,
    execution=ExecutionConfig(dispatcher_sms=32),
    source=bridge("perf_recipes/qwen/b300/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config"),
    notes=MIXED_NOTES,
)
B200_MXFP8 = replace(
    B300_MXFP8,
    hardware="b200",
    train=batch(8192),
    source=bridge("perf_recipes/qwen/b200/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_b200_fp8mx_config"),
)
B200_BF16 = replace(
    B300_BF16,
    hardware="b200",
    parallel=replace(PP8, vpp=4, layout=ends_counted(94, 32), dispatcher="alltoall"),
    train=batch(8192),
    execution=ExecutionConfig(),
    source=bridge("perf_recipes/qwen/b200/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config"),
    notes=NOTES,
)
B200_BF16_128 = replace(
    B200_BF16,
    name="bf16-128gpus",
    ranks=128,
    parallel=replace(PP4, vpp=24, ep=16, layout=ends_counted(94, 96), dispatcher="deepep", schedule="combined"),
    train=batch(1024),
    execution=ExecutionConfig(dispatcher_sms=20),
    source=model_zoo("best_practice/qwen3/run_235b.sh"),
    notes=(*NOTES, DEEPEP_NOTE),
)
H100_BF16 = replace(
    B200_BF16,
    hardware="h100",
    parallel=TP2,
    train=batch(2048),
    memory=ACTIVATION_AND_NORMS,
    execution=ExecutionConfig(graphs=ROUTER_GRAPHS, dispatcher_sms=20),
    source=model_zoo("best_practice/qwen3/run_h100_235b.sh"),
    figure=reported(2132, 320),
    notes=(H100_NOTE, *NOTES, DEEPEP_NOTE),
)
H100_BF16_PAPER = replace(
    H100_BF16,
    name="bf16-paper",
    execution=ExecutionConfig(graphs=LAYER_GRAPHS),
    source=REPORT,
    notes=(H100_NOTE, *NOTES),
)
H100_BF16_ALLTOALL = replace(
    H100_BF16,
    name="bf16-alltoall",
    parallel=replace(TP2, dispatcher="alltoall"),
    train=batch(8192),
    memory=MemoryConfig(),
    execution=ExecutionConfig(),
    source=bridge("perf_recipes/qwen/h100/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config"),
    figure=None,
    notes=(H100_NOTE, *NOTES),
)
H100_FP8 = replace(
    H100_BF16_ALLTOALL,
    name="fp8-current",
    precision=FP8_CURRENT,
    source=bridge("perf_recipes/qwen/h100/qwen3_moe.py", "qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs_config"),
    figure=summary("26.04.01", 1712, 253),
    notes=NOTES,
)
H200_BF16 = replace(
    H100_BF16, hardware="h200", status="derived", figure=None, notes=(H200_NOTE, H100_NOTE, *NOTES, DEEPEP_NOTE)
)
H200_FP8 = replace(H100_FP8, hardware="h200", status="derived", figure=None, notes=(H200_NOTE, *NOTES))
A100_BF16 = replace(
    H100_BF16_ALLTOALL,
    name="bf16",
    hardware="a100",
    memory=ACTIVATION_AND_NORMS,
    status="derived",
    notes=(A100_NOTE, "Recomputation is that of H100's other set-ups.", *NOTES),
)

# ----------------------------------------------------------------------------------------------------------------- 30B

SMALL_GB300_MXFP8 = replace(
    GB300_MXFP8,
    size="30b_a3b",
    ranks=8,
    parallel=ParallelConfig(ep=8, dispatcher="hybridep", schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    train=batch(512, 8),
    source=bridge("perf_recipes/qwen/gb300/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_gb300_fp8mx_config"),
    figure=summary("26.08", 44544, 1029),
    notes=(FULL_GRAPH_NOTE, FP8_ATTENTION_NOTE, DISPATCHER_NOTE, RATES_NOTE, HYBRIDEP_NOTE),
)
SMALL_GB300_BF16 = replace(
    SMALL_GB300_MXFP8,
    name="bf16",
    parallel=ParallelConfig(ep=8, dispatcher="hybridep"),
    precision=BF16,
    execution=ExecutionConfig(graphs=ROUTER_GRAPHS, dispatcher_sms=32),
    source=bridge("perf_recipes/qwen/gb300/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_gb300_bf16_config"),
    figure=None,
    notes=(DISPATCHER_NOTE, RATES_NOTE, HYBRIDEP_NOTE),
)
SMALL_GB200_MXFP8 = replace(
    SMALL_GB300_MXFP8,
    hardware="gb200",
    train=batch(512, 4),
    source=bridge("perf_recipes/qwen/gb200/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config"),
    figure=summary("26.08", 39936, 923),
)
SMALL_GB200_BF16 = replace(
    SMALL_GB300_BF16,
    hardware="gb200",
    train=batch(512, 4),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=32),
    source=bridge("perf_recipes/qwen/gb200/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_gb200_bf16_config"),
)
SMALL_B300_MXFP8 = replace(
    SMALL_GB300_MXFP8,
    hardware="b300",
    source=bridge("perf_recipes/qwen/b300/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_b300_fp8mx_config"),
    figure=summary("26.06", 40769, 938),
)
SMALL_B300_BF16 = replace(
    SMALL_GB300_BF16,
    hardware="b300",
    source=bridge("perf_recipes/qwen/b300/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config"),
    notes=(
        "With what our layers keep it does not fit, by a gigabyte: --set memory.recompute=layernorm makes room.",
        *SMALL_GB300_BF16.notes,
    ),
)
SMALL_B200_BF16 = replace(
    SMALL_GB200_BF16,
    hardware="b200",
    source=bridge("perf_recipes/qwen/b200/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config"),
)
SMALL_B200_MXFP8 = replace(
    SMALL_B200_BF16,
    name="mxfp8",
    parallel=ParallelConfig(ep=8, dispatcher="hybridep", schedule="combined"),
    precision=MXFP8,
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=64),
    source=bridge("perf_recipes/qwen/b200/qwen3_moe.py", "qwen3_30b_a3b_pretrain_8gpu_b200_fp8mx_config"),
    figure=summary("26.04.01", 27136, 619),
)
SMALL_H100_BF16 = replace(
    SMALL_GB300_BF16,
    hardware="h100",
    ranks=16,
    parallel=ParallelConfig(ep=16, dispatcher="hybridep", schedule="combined"),
    train=batch(1024),
    source=bridge("perf_recipes/qwen/h100/qwen3_moe.py", "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"),
)
SMALL_H100_FP8 = replace(
    SMALL_H100_BF16,
    name="fp8-current",
    parallel=ParallelConfig(ep=16, dispatcher="hybridep"),
    precision=FP8_CURRENT,
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=32),
    source=bridge("perf_recipes/qwen/h100/qwen3_moe.py", "qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config"),
    figure=summary("26.06", 8826, 203),
    notes=(DISPATCHER_NOTE, RATES_NOTE, HYBRIDEP_NOTE),
)
SMALL_H100_BF16_32 = replace(
    SMALL_H100_BF16,
    name="bf16-32gpus",
    ranks=32,
    parallel=ParallelConfig(ep=8, dispatcher="deepep"),
    train=batch(256),
    execution=ExecutionConfig(dispatcher_sms=20),
    source=model_zoo("best_practice/qwen3/run_30b.sh"),
    notes=(DISPATCHER_NOTE, RATES_NOTE, DEEPEP_NOTE),
)
SMALL_H200_BF16 = replace(
    SMALL_H100_BF16, hardware="h200", status="derived", notes=(H200_NOTE, DISPATCHER_NOTE, RATES_NOTE, HYBRIDEP_NOTE)
)
SMALL_H200_FP8 = replace(
    SMALL_H100_FP8, hardware="h200", status="derived", figure=None, notes=(H200_NOTE, *SMALL_H100_FP8.notes)
)
SMALL_A100_BF16 = replace(
    SMALL_H100_BF16_32,
    name="bf16",
    hardware="a100",
    parallel=ParallelConfig(ep=8, dispatcher="alltoall"),
    execution=ExecutionConfig(),
    status="derived",
    notes=(A100_NOTE, DISPATCHER_NOTE, RATES_NOTE),
)

PRESETS = (
    TINY_CPU,
    TINY_GPU,
    *(GB300_MXFP8, GB300_BF16, GB300_MXFP8_PAPER, GB300_MXFP8_64),
    *(GB200_MXFP8, GB200_BF16, GB200_MXFP8_PAPER, GB200_MXFP8_FULL_GRAPH, GB200_BF16_PAPER),
    *(B300_MXFP8, B300_BF16),
    *(B200_MXFP8, B200_BF16, B200_BF16_128),
    *(H200_BF16, H200_FP8),
    *(H100_BF16, H100_FP8, H100_BF16_PAPER, H100_BF16_ALLTOALL),
    A100_BF16,
    *(GB300_128K, GB200_128K),
    *(SMALL_GB300_MXFP8, SMALL_GB300_BF16, SMALL_GB200_MXFP8, SMALL_GB200_BF16),
    *(SMALL_B300_MXFP8, SMALL_B300_BF16, SMALL_B200_MXFP8, SMALL_B200_BF16),
    *(SMALL_H200_BF16, SMALL_H200_FP8),
    *(SMALL_H100_BF16, SMALL_H100_FP8, SMALL_H100_BF16_32),
    SMALL_A100_BF16,
)
CONTINUED = (CONTINUED_CPU, CONTINUED_GPU)
