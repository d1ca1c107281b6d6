"""Set-ups per hardware. First of a size and hardware: what is taken without `--preset`."""

from dataclasses import replace

from core.config.family import Preset, Published
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.config.small import CONTINUED_CPU, CONTINUED_GPU, TINY_CPU, TINY_GPU
from core.config.tuned import BF16, FP8_BLOCKWISE, MXFP8, batch, low_moments, model_zoo

# Mistral publishes no learning rates. This is the one with which Megatron-LM's release tests train 8x7b from random weights.
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=500)

MEGATRON = "NVIDIA/Megatron-LM {} at d98e8a6"
ROPE_NOTE = (
    "ModelZoo's file leaves the norm's epsilon and the base of the rotation at its software's own 1e-5 and 10,000; the released model, "
    "which is trained here, has 1e-5 and 1,000,000. It makes no difference to speed."
)
HARDWARE_NOTE = "The source does not write its hardware; H100 is that of its Mixtral figures. No figure is stated."
DERIVED_NOTE = "No source has a set-up of Mixtral for this hardware: this is H100's. Untested."
BLACKWELL_NOTE = "MXFP8 stands for H100's blocks of 128, which Blackwell's units do not take."

BLACKWELL = ("gb300", "gb200", "b300", "b200")


def derived(preset: Preset, hardware: str) -> Preset:
    """A set-up of H100 for hardware that no source has one for, in a format that its units take."""
    notes = (DERIVED_NOTE, *preset.notes)
    made = replace(preset, hardware=hardware, status="derived", figure=None, notes=notes)
    if preset.precision.recipe is None or hardware not in BLACKWELL:
        return made
    return replace(made, name="mxfp8", precision=low_moments(MXFP8), notes=(*notes, BLACKWELL_NOTE))


# One layer a stage: 56 stages.
LARGE_H100_BF16 = Preset(
    name="bf16",
    size="8x22b",
    hardware="h100",
    ranks=128,
    parallel=ParallelConfig(tp=2, pp=8, vpp=7, ep=8),
    train=batch(256),
    optimizer=OPTIMIZER,
    precision=BF16,
    status="published",
    source=model_zoo("best_practice/mixtral/run_mixtral_8x22B.sh"),
    figure=Published(tflops=445, source="yanring/Megatron-MoE-ModelZoo best_practice/mixtral, as it routes by itself"),
    notes=("465 TFLOPS are stated for routing forced to be balanced, and 470 with dropped tokens.", ROPE_NOTE),
)
LARGE_H100_FP8 = replace(
    LARGE_H100_BF16,
    name="fp8-blockwise",
    precision=low_moments(FP8_BLOCKWISE),
    figure=Published(tflops=560, source="yanring/Megatron-MoE-ModelZoo best_practice/mixtral, balanced by force"),
    notes=(ROPE_NOTE,),
)
# One layer a stage: 32 stages.
SMALL_H100_BF16 = replace(
    LARGE_H100_BF16,
    size="8x7b",
    ranks=64,
    parallel=ParallelConfig(pp=4, vpp=8, ep=8),
    source=model_zoo("runtime_configs/benchmarking/runtime.conf"),
    figure=None,
    notes=(HARDWARE_NOTE, ROPE_NOTE),
)
SMALL_H100_BF16_TP2 = replace(
    SMALL_H100_BF16,
    name="bf16-tp2",
    parallel=ParallelConfig(tp=2, pp=4, vpp=8, ep=8),
    status="derived",
    source=MEGATRON.format("tests/functional_tests/test_cases/mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release"),
    notes=(
        "The source states no number of GPUs: 64, as ModelZoo's set-up of this size.",
        "Its folder's name says tp 1, the file in it 2, which is taken.",
    ),
)
# The README writes this one for H100 and A100.
SMALL_A100_BF16 = replace(
    SMALL_H100_BF16,
    hardware="a100",
    ranks=32,
    parallel=ParallelConfig(pp=4, ep=8),
    train=batch(128),
    source=MEGATRON.format("megatron/core/transformer/moe/README.md, example of 32 H100 or A100"),
    notes=("8 layers a stage on 4 pipeline ranks make one stage on each.", "No figure is stated."),
)
NEWER = (*BLACKWELL, "h200")

PRESETS = (
    TINY_CPU,
    TINY_GPU,
    *(derived(SMALL_H100_BF16, hardware) for hardware in NEWER),
    *(SMALL_H100_BF16, SMALL_H100_BF16_TP2, SMALL_A100_BF16),
    *(derived(preset, hardware) for hardware in NEWER for preset in (LARGE_H100_BF16, LARGE_H100_FP8)),
    *(LARGE_H100_BF16, LARGE_H100_FP8, derived(LARGE_H100_BF16, "a100")),
)
CONTINUED = (CONTINUED_CPU, CONTINUED_GPU)
