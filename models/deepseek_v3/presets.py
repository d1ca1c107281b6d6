"""Set-ups per hardware. First of a size and hardware: what is taken without `--preset`."""

from dataclasses import replace

from core.config.execution import ExecutionConfig
from core.config.family import Preset
from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.run import OptimizerConfig
from core.config.small import CONTINUED_CPU, CONTINUED_GPU, TINY_CPU, TINY_GPU
from core.config.tuned import (
    BF16,
    DEEPEP_NOTE,
    FP8_ATTENTION_NOTE,
    FP8_BLOCKWISE,
    FULL_GRAPH,
    FULL_GRAPH_BUDGET,
    FULL_GRAPH_NOTE,
    HYBRIDEP_NOTE,
    LAYER_GRAPHS,
    MXFP8,
    REPORT,
    batch,
    bridge,
    low_moments,
    low_states,
    model_zoo,
    reported,
    summary,
)

# Section 4.2 of the paper: warm-up over 2,000 steps to 2.2e-4, later a cosine to a tenth of it.
OPTIMIZER = OptimizerConfig(learning_rate=2.2e-4, min_learning_rate=2.2e-5, warmup_steps=2000)

SIXTEEN_STAGES = "Et*4|(t*4|)*14tmL"
THIRTY_TWO_STAGES = "Et|(tt|)*30mL"

BATCH_NOTE = (
    "Global batch: a choice of training, and sources differ (8192 in the report and ModelZoo, 4096 in Bridge on Blackwell and in the "
    "report's BF16 row, 16384 in Bridge on H100; ModelZoo has 4096 on GB300 and 2048 for B200 in one script)."
)
GRADIENTS_NOTE = (
    "Main gradients: bfloat16 in most of Bridge's set-ups, float32 in ModelZoo's and Bridge's development ones; "
    "precision.main_gradients=float32 is the careful choice."
)
RATES_NOTE = (
    "Learning rates in sources of set-ups are placeholders (3.9e-6 in ModelZoo, 3e-4 in Bridge): the paper's are here."
)
GB300_NOTE = (
    "On GB300 sources differ in scale and means: 256 GPUs with pp 4, ep 64 (report, 1,233 TFLOPS), 128 with pp 4, ep 32 (ModelZoo, no "
    "figure), 256 with pp 2, ep 32 under a full graph (Bridge, 1,635). Each is a set-up here."
)
GB200_NOTE = (
    "On GB200 the report and ModelZoo do not overlap the exchange of tokens, recompute mlp and offload optimizer states; Bridge overlaps "
    "under a full graph and recomputes mla_up_proj, or offloads expert_fc1 under partial graphs. Generations of the software; two are here."
)
GB200_BF16_NOTE = "For BF16 on GB200 the report has pp 8, ep 32 (857 TFLOPS), Bridge pp 4, ep 64 (782, without MTP)."
B200_NOTE = (
    "On B200 sources differ: pp 8, ep 32 with DeepEP (ModelZoo, 2 or 4 virtual stages; Bridge, with overlap and graphs), and pp 16, ep 8 "
    "with HybridEP (Bridge's BF16 and older summaries)."
)
DEEPEP_CRASH_NOTE = (
    "Unsafe: Megatron-Bridge has withdrawn DeepEP between nodes for this set-up, because it crashed with an illegal memory access "
    "(pull requests 6020 and 6021). Taken only by its name."
)
B300_NOTE = (
    "Two virtual stages were said to make iterations fluctuate (Megatron-Bridge pull request 2627); if so, try pp 8 without, at a "
    "microbatch of 2. The summary's 920 TFLOPS is of that one, so no figure stands here."
)
H100_PP_NOTE = (
    "Pipeline on H100: table 20 of the report says pp 4; table 17, its section 9.2.2, ModelZoo and Bridge say 8, which a layout of 32 "
    "stages with 4 virtual ones needs."
)
H100_RECOMPUTE_NOTE = (
    "Recomputation on H100: mla_up_proj and mlp in every script and in appendix B.2; table 17 adds moe_act and layernorm, and long "
    "sequences moe."
)
H100_LAYOUT_NOTE = (
    "Layout on H100: Et|(tt|)*30mL in ModelZoo and Bridge, Et*3|(tt|)*29m|L in the report, Et*2|(tt|)*22t|(tt|)*7mL for long "
    "sequences. All hold 61 layers and the prediction module."
)
H100_HYBRIDEP_NOTE = (
    "HybridEP at tp 2 was reported to run out of H100's memory (Megatron-Bridge issue 1731); DeepEP, which the report and ModelZoo use, is "
    "the alternative: parallel.dispatcher=deepep."
)
H100_NOTES = (H100_PP_NOTE, H100_RECOMPUTE_NOTE, H100_LAYOUT_NOTE)
COMMON_NOTES = (BATCH_NOTE, RATES_NOTE)
BRIDGE_NOTES = (*COMMON_NOTES, GRADIENTS_NOTE, HYBRIDEP_NOTE)

PP4 = ParallelConfig(pp=4, vpp=4, ep=64, layout=SIXTEEN_STAGES, dispatcher="hybridep")
PP8 = ParallelConfig(pp=8, vpp=2, ep=8, layout=SIXTEEN_STAGES, dispatcher="hybridep")
PP16 = replace(PP8, pp=16, vpp=1)
TP2 = ParallelConfig(tp=2, pp=8, vpp=4, ep=64, layout=THIRTY_TWO_STAGES, dispatcher="deepep", schedule="combined")

# --------------------------------------------------------------------------------------------------------------- GB300

GB300_MXFP8 = Preset(
    name="mxfp8",
    size="671b",
    hardware="gb300",
    ranks=256,
    parallel=replace(PP4, pp=2, vpp=8, ep=32, schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    train=batch(4096),
    optimizer=OPTIMIZER,
    precision=low_states(MXFP8),
    execution=ExecutionConfig(graphs=FULL_GRAPH, dispatcher_sms=32),
    status="published",
    source=bridge("perf_recipes/deepseek/gb300/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_gb300_fp8mx_config"),
    figure=summary("26.08", 6288, 1635),
    notes=(GB300_NOTE, FULL_GRAPH_NOTE, FP8_ATTENTION_NOTE, *BRIDGE_NOTES),
)
GB300_BF16 = replace(
    GB300_MXFP8,
    name="bf16",
    parallel=PP4,
    precision=low_states(BF16),
    memory=MemoryConfig(recompute=("moe_act",)),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=32),
    source=bridge("perf_recipes/deepseek/gb300/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_gb300_bf16_config"),
    figure=None,
    notes=BRIDGE_NOTES,
)
GB300_MXFP8_PAPER = replace(
    GB300_BF16,
    name="mxfp8-paper",
    parallel=replace(PP4, schedule="combined"),
    train=batch(8192),
    precision=low_moments(MXFP8),
    memory=MemoryConfig(),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS),
    status="derived",
    source=REPORT,
    figure=reported(4730, 1233),
    notes=(
        "The table gives no layout, and 61 layers do not divide over its 16 stages: this is the layout that the report gives for GB200.",
        "The table does not say how weights are held: in MXFP8, as in the scripts of the same authors.",
        "Bridge's development set-up of the same row says vpp 2, a slip: its 16 stages on 4 ranks make 4.",
        GB300_NOTE,
        *COMMON_NOTES,
    ),
)
GB300_MXFP8_128 = replace(
    GB300_BF16,
    name="mxfp8-128gpus",
    ranks=128,
    parallel=replace(PP4, ep=32),
    precision=low_moments(MXFP8),
    memory=MemoryConfig(recompute=("mlp",)),
    source=model_zoo("best_practice/deepseek-v3/run_deepseek_v3_gb300.sh"),
    notes=(GB300_NOTE, *COMMON_NOTES, HYBRIDEP_NOTE),
)

# --------------------------------------------------------------------------------------------------------------- GB200

HOST_MASTERS_NOTE = "The script holds weights in MXFP8; here, where masters wait on the host, weights are bfloat16."

GB200_MXFP8 = replace(
    GB300_BF16,
    name="mxfp8",
    hardware="gb200",
    train=batch(8192),
    precision=replace(low_moments(MXFP8), primary=False),
    memory=MemoryConfig(recompute=("mlp",), optimizer_offload=1.0),
    source=model_zoo("best_practice/deepseek-v3/run_deepseek_v3_gb200.sh"),
    figure=reported(4020, 1048),
    notes=(
        "The figure is the report's, whose row is this set-up.",
        HOST_MASTERS_NOTE,
        GB200_NOTE,
        *COMMON_NOTES,
        HYBRIDEP_NOTE,
    ),
)
GB200_BF16 = replace(
    GB200_MXFP8,
    name="bf16",
    parallel=replace(PP4, pp=8, ep=32, layout=THIRTY_TWO_STAGES),
    train=batch(4096),
    precision=low_moments(BF16),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS),
    status="derived",
    source=REPORT,
    figure=reported(3298, 857),
    notes=(
        "The table gives no layout, and 61 layers do not divide over its 32 stages: this is the 32-stage layout of the H100 scripts.",
        GB200_BF16_NOTE,
        *COMMON_NOTES,
    ),
)
GB200_MXFP8_PAPER = replace(
    GB200_MXFP8,
    name="mxfp8-paper",
    execution=ExecutionConfig(graphs=LAYER_GRAPHS),
    source=f"{REPORT}; layout of section 9.2.2",
    notes=(
        "ModelZoo's script of the same row also says how many processors HybridEP takes: the set-up mxfp8.",
        "The table does not say how weights are held: here, where masters wait on the host, in bfloat16.",
        GB200_NOTE,
        *COMMON_NOTES,
    ),
)
GB200_MXFP8_FULL_GRAPH = replace(
    GB300_MXFP8,
    name="mxfp8-full-graph",
    hardware="gb200",
    parallel=replace(PP4, schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    memory=MemoryConfig(recompute=("mla_up_proj",)),
    source=bridge("perf_recipes/deepseek/gb200/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_gb200_fp8mx_config"),
    figure=summary("26.08", 4912, 1276),
    notes=(GB200_NOTE, FULL_GRAPH_NOTE, *BRIDGE_NOTES),
)
GB200_BF16_EP64 = replace(
    GB300_BF16,
    name="bf16-ep64",
    hardware="gb200",
    memory=MemoryConfig(recompute=("mla_up_proj",)),
    source=bridge("perf_recipes/deepseek/gb200/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_gb200_bf16_config"),
    figure=summary("25.11", 3139, 782),
    notes=("The figure is without the prediction module.", GB200_BF16_NOTE, *BRIDGE_NOTES),
)

# ------------------------------------------------------------------------------------------------------ B300 and B200

B300_MXFP8 = replace(
    GB200_MXFP8_FULL_GRAPH,
    name="mxfp8",
    hardware="b300",
    parallel=replace(PP8, schedule="combined", expert_budget=FULL_GRAPH_BUDGET),
    source=bridge("perf_recipes/deepseek/b300/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_b300_fp8mx_config"),
    figure=None,
    notes=(B300_NOTE, FULL_GRAPH_NOTE, FP8_ATTENTION_NOTE, *BRIDGE_NOTES),
)
B300_BF16 = replace(
    GB200_BF16_EP64,
    name="bf16",
    hardware="b300",
    parallel=PP8,
    source=bridge("perf_recipes/deepseek/b300/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_b300_bf16_config"),
    figure=None,
    notes=(B300_NOTE, *BRIDGE_NOTES),
)
B200_BF16 = replace(
    B300_BF16,
    hardware="b200",
    parallel=PP16,
    execution=ExecutionConfig(dispatcher_sms=32),
    source=bridge("perf_recipes/deepseek/b200/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_b200_bf16_config"),
    notes=(B200_NOTE, *BRIDGE_NOTES),
)
B200_MXFP8 = replace(
    B200_BF16,
    name="mxfp8",
    precision=low_states(MXFP8),
    status="derived",
    source=bridge(
        "perf_recipes/deepseek/b200/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_b200_fp8mx_large_scale_config"
    ),
    figure=summary("26.02.01", 2790, 725),
    notes=(
        "The source's batch of 256 sequences is raised to the 4096 of the other set-ups and of the figure.",
        "The mapping that Bridge went back to when it withdrew DeepEP on B200 (pull requests 6020 and 6021).",
        B200_NOTE,
        *BRIDGE_NOTES,
    ),
)
B200_MXFP8_DEEPEP = replace(
    B200_MXFP8,
    name="mxfp8-deepep",
    parallel=replace(PP8, ep=32, dispatcher="deepep", schedule="combined"),
    memory=MemoryConfig(recompute=("mla_up_proj", "mlp")),
    execution=ExecutionConfig(graphs=LAYER_GRAPHS, dispatcher_sms=16),
    status="published",
    source=bridge("perf_recipes/deepseek/b200/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_b200_fp8mx_config"),
    figure=summary("26.04.01", 3328, 864),
    notes=(DEEPEP_CRASH_NOTE, B200_NOTE, DEEPEP_NOTE, GRADIENTS_NOTE, *COMMON_NOTES),
)
B200_MXFP8_DEEPEP_ZOO = replace(
    B200_MXFP8_DEEPEP,
    name="mxfp8-deepep-zoo",
    parallel=replace(PP8, ep=32, dispatcher="deepep"),
    train=batch(8192),
    precision=low_moments(MXFP8),
    execution=ExecutionConfig(dispatcher_sms=24),
    source=model_zoo("best_practice/deepseek-v3/run_deepseek_v3_b200.sh"),
    figure=None,
    notes=(
        "The script sets no vpp: its layout of 16 stages makes two on each rank.",
        "No overlap here; the B200 line of ModelZoo's script for H100 has it.",
        DEEPEP_CRASH_NOTE,
        B200_NOTE,
        DEEPEP_NOTE,
        *COMMON_NOTES,
    ),
)

# -------------------------------------------------------------------------------------------- H100, and from it others

H100_FP8 = replace(
    GB200_MXFP8,
    name="fp8-blockwise",
    hardware="h100",
    ranks=1024,
    parallel=TP2,
    precision=low_moments(FP8_BLOCKWISE),
    memory=MemoryConfig(recompute=("mla_up_proj", "mlp")),
    execution=ExecutionConfig(dispatcher_sms=20),
    source=model_zoo("best_practice/deepseek-v3/run_deepseek_v3_h100.sh"),
    figure=reported(1412, 368),
    notes=("The figure is the report's.", *H100_NOTES, DEEPEP_NOTE, *COMMON_NOTES),
)
H100_FP8_PAPER = replace(
    H100_FP8,
    name="fp8-blockwise-paper",
    parallel=replace(TP2, layout="Et*3|(tt|)*29m|L"),
    memory=MemoryConfig(recompute=("mlp", "mla_up_proj", "moe_act", "layernorm")),
    execution=ExecutionConfig(),
    status="derived",
    source=f"{REPORT}; pipeline and recomputation of table 17, layout of section 9.2.2",
    notes=("Table 20's pp 4 cannot hold the layout with 4 virtual stages: 8 is taken.", *H100_NOTES, *COMMON_NOTES),
)
H100_FP8_HYBRIDEP = replace(
    H100_FP8,
    name="fp8-blockwise-hybridep",
    parallel=replace(PP8, tp=2, ep=64),
    train=batch(16384),
    precision=replace(low_states(FP8_BLOCKWISE), primary=False),
    execution=ExecutionConfig(dispatcher_sms=32),
    source=bridge("perf_recipes/deepseek/h100/deepseek_v3.py", "deepseek_v3_pretrain_1024gpu_h100_fp8sc_config"),
    figure=None,
    notes=(H100_HYBRIDEP_NOTE, *H100_NOTES, *BRIDGE_NOTES),
)
H100_BF16 = replace(
    H100_FP8_HYBRIDEP,
    name="bf16",
    parallel=replace(TP2, dispatcher="hybridep", schedule="1f1b"),
    precision=low_states(BF16),
    source=bridge("perf_recipes/deepseek/h100/deepseek_v3.py", "deepseek_v3_pretrain_1024gpu_h100_bf16_config"),
)
H100_BF16_256 = replace(
    H100_BF16,
    name="bf16-256gpus",
    ranks=256,
    parallel=replace(PP8, tp=2, vpp=1, ep=32, layout="Et*8|(t*8|)*6t*5mL"),
    train=batch(4096),
    memory=MemoryConfig(recompute=("full",)),
    execution=ExecutionConfig(dispatcher_sms=16),
    source=bridge("recipes/deepseek/h100/deepseek_v3.py", "deepseek_v3_pretrain_256gpu_h100_bf16_32nodes_config"),
    notes=(H100_HYBRIDEP_NOTE, *BRIDGE_NOTES),
)
H200_NOTE = (
    "No source has a set-up for H200: this is H100's; H200 has the same units and links, and more memory. Untested."
)
H200_FP8 = replace(
    H100_FP8, hardware="h200", status="derived", figure=None, notes=(H200_NOTE, *H100_NOTES, DEEPEP_NOTE, *COMMON_NOTES)
)
H200_BF16 = replace(
    H100_BF16, hardware="h200", status="derived", notes=(H200_NOTE, H100_HYBRIDEP_NOTE, *H100_NOTES, *BRIDGE_NOTES)
)
A100_BF16 = replace(
    H100_BF16,
    hardware="a100",
    parallel=replace(TP2, dispatcher="alltoall", schedule="1f1b"),
    execution=ExecutionConfig(),
    status="derived",
    notes=(
        "No source has a set-up for A100: this is H100's BF16 one with plain all-to-all, as the packages of kernels are for Hopper and "
        "later. Untested.",
        GRADIENTS_NOTE,
        *COMMON_NOTES,
    ),
)

# ------------------------------------------------------------------------------------------------------------ Moonlight

MOONLIGHT_NOTE = "The source's learning rate is a placeholder, and so is this, which is DeepSeek-V3's."
MOONLIGHT_H100 = Preset(
    name="bf16",
    size="16b",
    hardware="h100",
    ranks=16,
    parallel=ParallelConfig(ep=8, dispatcher="hybridep", schedule="combined"),
    train=batch(1024, 2),
    optimizer=OPTIMIZER,
    precision=low_states(BF16),
    status="published",
    source=bridge("recipes/moonlight/h100/moonlight_16b.py", "moonlight_16b_pretrain_16gpu_h100_bf16_config"),
    notes=("No figure is stated.", MOONLIGHT_NOTE, GRADIENTS_NOTE, HYBRIDEP_NOTE),
)

PRESETS = (
    TINY_CPU,
    TINY_GPU,
    *(GB300_MXFP8, GB300_BF16, GB300_MXFP8_PAPER, GB300_MXFP8_128),
    *(GB200_MXFP8, GB200_BF16, GB200_MXFP8_PAPER, GB200_MXFP8_FULL_GRAPH, GB200_BF16_EP64),
    *(B300_MXFP8, B300_BF16),
    *(B200_MXFP8, B200_BF16, B200_MXFP8_DEEPEP, B200_MXFP8_DEEPEP_ZOO),
    *(H200_FP8, H200_BF16),
    *(H100_FP8, H100_BF16, H100_FP8_PAPER, H100_FP8_HYBRIDEP, H100_BF16_256),
    A100_BF16,
    MOONLIGHT_H100,
)
CONTINUED = (CONTINUED_CPU, CONTINUED_GPU)
