"""Kinds of hardware that a run can be asked for, as data with its sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from core.config.recipe import RECIPES, Recipe, RecipeName
from core.errors import ConfigError, Fault

GB = 10**9
TB = 10**12
TFLOPS = 10**12
PFLOPS = 10**15


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of a kind, by its maker's figures: bytes, bytes a second, and dense FLOP a second; None where it has none.

    memory: usable by a job. host_link: to host memory, one way. recipes: formats of low precision that its matrix units take.
    """

    memory: float
    memory_bandwidth: float
    host_link: float
    bfloat16: float
    float32: float
    fp8: float | None = None
    fp4: float | None = None
    recipes: tuple[RecipeName, ...] = ()

    def has(self, recipe: Recipe) -> bool:
        """Whether its matrix units take every format of a recipe: those of the recipes that it is known to take."""
        return recipe.scalings <= {scaling for name in self.recipes for scaling in RECIPES[name].scalings}


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """How devices are joined: so many in a node, so many in one NVLink domain; bytes a second one way of one device.

    nvlink: inside a domain, network: outside it, by the makers' figures. all_to_all_*: what an all-to-all was measured to reach,
    token_once_*: what a dispatcher that sends a token once to each rank (NVLink) or node (network) was measured to reach, by the
    bytes that such a one sends.
    """

    gpus_per_node: int
    domain: int
    nvlink: float
    network: float
    all_to_all_nvlink: float
    all_to_all_network: float
    token_once_nvlink: float
    token_once_network: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What was measured to be reached, or fitted to published runs (benchmarks/throughput_model.py); docs/throughput.md says how.

    products, low_products: share of the peak that matrix products reach in bfloat16 and in a recipe's format. attention, long_attention:
    FLOP a second of attention, forward and backward, at 4,096 and at 16,384 tokens. streamed: how many times as long as at the maker's
    bandwidth the activations of a layer take to pass memory. overlapped: share of the exchange with experts elsewhere that a combined
    schedule hides. launch_seconds: that a host takes to start the kernels of a layer and microbatch; a GPU that is done earlier waits.
    combined_launches: how many times as long where two halves go together, in smaller pieces.
    """

    products: float
    low_products: float
    attention: tuple[float, float]
    long_attention: tuple[float, float]
    streamed: float
    overlapped: float
    launch_seconds: float
    combined_launches: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of hardware. device: torch's device type; collectives: the process-group backend that serves it.

    chip, fabric, speeds: None for the machine at hand (`cpu`, `gpu`), of which nothing is known beforehand.
    capability: compute capability of a GPU. sources: where the figures stand, a sentence each.
    """

    name: str
    title: str
    device: Literal["cpu", "cuda"]
    collectives: Literal["gloo", "nccl"]
    capability: tuple[int, int] | None = None
    chip: Chip | None = None
    fabric: Fabric | None = None
    speeds: Speeds | None = None
    sources: tuple[str, ...] = ()


_PER_TENSOR: tuple[RecipeName, ...] = ("fp8_delayed", "fp8_current")

_H100_CHIP = Chip(
    memory=80 * GB,
    memory_bandwidth=3.35 * TB,
    host_link=64 * GB,
    bfloat16=989.4 * TFLOPS,
    float32=67 * TFLOPS,
    fp8=1978.9 * TFLOPS,
    recipes=(*_PER_TENSOR, "fp8_blockwise"),
)
_GB200_CHIP = Chip(
    memory=186 * GB,
    memory_bandwidth=8 * TB,
    host_link=225 * GB,
    bfloat16=2.5 * PFLOPS,
    float32=80 * TFLOPS,
    fp8=5 * PFLOPS,
    fp4=10 * PFLOPS,
    recipes=(*_PER_TENSOR, "mxfp8", "nvfp4"),
)
_B200_CHIP = replace(
    _GB200_CHIP,
    memory=180 * GB,
    memory_bandwidth=7.7 * TB,
    host_link=64 * GB,
    bfloat16=2.25 * PFLOPS,
    float32=75 * TFLOPS,
    fp8=4.5 * PFLOPS,
    fp4=9 * PFLOPS,
)

_H100_FABRIC = Fabric(
    gpus_per_node=8,
    domain=8,
    nvlink=450 * GB,
    network=50 * GB,
    all_to_all_nvlink=323 * GB,
    all_to_all_network=43.9 * GB,
    token_once_nvlink=290 * GB,
    token_once_network=39.6 * GB,
)
_GB200_FABRIC = Fabric(
    gpus_per_node=4,
    domain=72,
    nvlink=900 * GB,
    network=50 * GB,
    all_to_all_nvlink=566 * GB,
    all_to_all_network=43.9 * GB,
    token_once_nvlink=558 * GB,
    token_once_network=39.6 * GB,
)
_GB300_FABRIC = replace(_GB200_FABRIC, network=100 * GB, all_to_all_network=87.8 * GB, token_once_network=79.2 * GB)
# As the H100's, by the ratio of what the makers promise.
_A100_FABRIC = Fabric(
    gpus_per_node=8,
    domain=8,
    nvlink=300 * GB,
    network=25 * GB,
    all_to_all_nvlink=215 * GB,
    all_to_all_network=22 * GB,
    token_once_nvlink=193 * GB,
    token_once_network=19.8 * GB,
)

# Attention: report Table 9, of DeepSeek-V3.
_HOPPER_SPEEDS = Speeds(
    products=0.653,
    low_products=0.453,
    attention=(553 * TFLOPS, 422 * TFLOPS),
    long_attention=(638 * TFLOPS, 523 * TFLOPS),
    streamed=1.778,
    overlapped=0.683,
    launch_seconds=10.4e-3,
    combined_launches=1.229,
)
_BLACKWELL_SPEEDS = replace(
    _HOPPER_SPEEDS,
    low_products=0.634,
    attention=(1324 * TFLOPS, 1083 * TFLOPS),
    long_attention=(1698 * TFLOPS, 1298 * TFLOPS),
)

# GB300 and B300 compute so much faster than the others, by the same figures: 1,400 W instead of 1,200 and 1,000.
_ULTRA = 1.08
_ULTRA_SPEEDS = replace(
    _BLACKWELL_SPEEDS,
    products=_ULTRA * _BLACKWELL_SPEEDS.products,
    low_products=_ULTRA * _BLACKWELL_SPEEDS.low_products,
    attention=(_ULTRA * 1324 * TFLOPS, _ULTRA * 1083 * TFLOPS),
    long_attention=(_ULTRA * 1698 * TFLOPS, _ULTRA * 1298 * TFLOPS),
    streamed=_BLACKWELL_SPEEDS.streamed / _ULTRA,
)

_TABLE_9 = "Attention: report Table 9, at 4,096 and 16,384 tokens."
_TABLE_7 = (
    "All-to-all and token-once rates: from the times of report Table 7 (benchmarks/throughput_model.py recounts them)."
)
_FITTED = "Shares of peaks, streaming, overlapped share and launch times: fitted, docs/throughput.md."
_HOPPER_SOURCES = (
    "Peaks without sparsity and 3.35 or 4.8 TB/s: NVIDIA's H100 and H200 data sheets, by way of pages that quote them.",
    "80 GB, eight GPUs in an NVLink domain: report sections 8 and 9.2.2. 141 GB: H200 data sheet, quoted.",
    "NVLink 900 GB/s both ways, PCIe 5 x16 at 128 GB/s both ways: data sheets, quoted; here one way.",
    "50 GB/s InfiniBand for each GPU: report section 4.2.1.",
    "Recipes: per tensor, and blocks of 128 that only Hopper's matrix units scale (report section 5).",
)
_BLACKWELL_SOURCES = (
    "NVLink 1.8 TB/s both ways and 192 GB of GB200: report section 9.2.2; here one way.",
    "Recipes: per tensor, MXFP8 and NVFP4, whose scales only Blackwell's matrix units take (report section 5).",
)

PROFILES = (
    Profile(name="cpu", title="CPU cores of this machine", device="cpu", collectives="gloo"),
    Profile(name="gpu", title="CUDA devices of this machine", device="cuda", collectives="nccl"),
    Profile(
        name="gb300",
        title="NVIDIA GB300 NVL72",
        device="cuda",
        collectives="nccl",
        capability=(10, 3),
        chip=replace(_GB200_CHIP, memory=279 * GB, fp4=15 * PFLOPS),
        fabric=_GB300_FABRIC,
        speeds=_ULTRA_SPEEDS,
        sources=(
            "Peaks: GB300 NVL72 data sheet (360 PFLOPS FP8, 180 BF16 and 1,080 dense FP4 of 72 GPUs), quoted by two pages.",
            "279 GB usable of 288, 576 TB/s of 72 GPUs: GB300 NVL72 data sheet, quoted; usable bytes unchecked on a machine.",
            "Host link: NVLink-C2C of 900 GB/s both ways shared by a Grace CPU's two GPUs; the sharing is unchecked.",
            "Network: one 800 Gb/s ConnectX-8 for each GPU, quoted. What is reached of it: as H100 reaches of its 400, unmeasured.",
            *_BLACKWELL_SOURCES,
            _TABLE_7 + " Measured on GB200.",
            _TABLE_9,
            _FITTED,
        ),
    ),
    Profile(
        name="gb200",
        title="NVIDIA GB200 NVL72",
        device="cuda",
        collectives="nccl",
        capability=(10, 0),
        chip=_GB200_CHIP,
        fabric=_GB200_FABRIC,
        speeds=_BLACKWELL_SPEEDS,
        sources=(
            "Peaks: NVIDIA's Blackwell brief for the 1,200 W GPU, by way of a page that quotes it (another has B200's 2,250 and 4,500).",
            "186 GB usable of 192 and 8 TB/s: quoted from the GB200 NVL72 data sheet; usable bytes unchecked on a machine.",
            "Host link: NVLink-C2C of 900 GB/s both ways shared by a Grace CPU's two GPUs; the sharing is unchecked.",
            "Network: one 400 Gb/s ConnectX-7 for each GPU, unchecked. What is reached of it: as measured on H100.",
            *_BLACKWELL_SOURCES,
            _TABLE_7,
            _TABLE_9,
            _FITTED,
        ),
    ),
    Profile(
        name="b300",
        title="NVIDIA B300 (HGX, eight GPUs)",
        device="cuda",
        collectives="nccl",
        capability=(10, 3),
        chip=replace(_B200_CHIP, memory=270 * GB, fp4=13.5 * PFLOPS),
        fabric=replace(_GB300_FABRIC, gpus_per_node=8, domain=8),
        speeds=_ULTRA_SPEEDS,
        sources=(
            "Peaks: HGX B300 data sheet (36 PFLOPS FP8, 18 BF16 and 108 dense FP4 of 8 GPUs), quoted; one page has 3,500 BF16.",
            "270 GB usable of 288 and 7.7 TB/s: quoted by a page from HGX B300's data sheet; unchecked on a machine.",
            "Host link: PCIe 5 x16, 128 GB/s both ways (PCIe 6 where the host has it); unchecked.",
            "Network: one 800 Gb/s ConnectX-8 for each GPU, quoted. What is reached of it: as H100 reaches of its 400, unmeasured.",
            *_BLACKWELL_SOURCES,
            _TABLE_7 + " Measured on GB200, for eight ranks.",
            _TABLE_9,
            _FITTED,
        ),
    ),
    Profile(
        name="b200",
        title="NVIDIA B200 (HGX, eight GPUs)",
        device="cuda",
        collectives="nccl",
        capability=(10, 0),
        chip=_B200_CHIP,
        fabric=replace(_GB200_FABRIC, gpus_per_node=8, domain=8),
        speeds=_BLACKWELL_SPEEDS,
        sources=(
            "Peaks, 180 GB and 7.7 TB/s: HGX B200 data sheet, quoted by two pages.",
            "Host link: PCIe 5 x16, 128 GB/s both ways; unchecked.",
            "Network: one 400 Gb/s ConnectX-7 for each GPU; unchecked. What is reached of it: as measured on H100.",
            *_BLACKWELL_SOURCES,
            _TABLE_7 + " Measured on GB200, for eight ranks.",
            _TABLE_9,
            _FITTED,
        ),
    ),
    Profile(
        name="h200",
        title="NVIDIA H200 (SXM)",
        device="cuda",
        collectives="nccl",
        capability=(9, 0),
        chip=replace(_H100_CHIP, memory=141 * GB, memory_bandwidth=4.8 * TB),
        fabric=_H100_FABRIC,
        speeds=_HOPPER_SPEEDS,
        sources=(
            *_HOPPER_SOURCES,
            _TABLE_7 + " Measured on H100.",
            _TABLE_9,
            _FITTED + " No published run is on H200.",
        ),
    ),
    Profile(
        name="h100",
        title="NVIDIA H100 (SXM)",
        device="cuda",
        collectives="nccl",
        capability=(9, 0),
        chip=_H100_CHIP,
        fabric=_H100_FABRIC,
        speeds=_HOPPER_SPEEDS,
        sources=(*_HOPPER_SOURCES, _TABLE_7, _TABLE_9, _FITTED),
    ),
    Profile(
        name="a100",
        title="NVIDIA A100 80 GB (SXM)",
        device="cuda",
        collectives="nccl",
        capability=(8, 0),
        chip=Chip(
            memory=80 * GB,
            memory_bandwidth=2.039 * TB,
            host_link=32 * GB,
            bfloat16=312 * TFLOPS,
            float32=19.5 * TFLOPS,
        ),
        fabric=_A100_FABRIC,
        speeds=replace(
            _HOPPER_SPEEDS,
            attention=(174 * TFLOPS, 133 * TFLOPS),
            long_attention=(201 * TFLOPS, 165 * TFLOPS),
        ),
        sources=(
            "Peaks without sparsity, 80 GB, 2,039 GB/s, NVLink 600 GB/s and PCIe 4 x16 at 64 GB/s both ways: A100 data sheet, quoted.",
            "Network: one 200 Gb/s ConnectX-6 for each GPU, as in DGX A100; unchecked.",
            "Reached rates of NVLink, network and attention: as H100 reaches of its peaks, unmeasured.",
            _FITTED + " On Hopper: no published run is on A100.",
        ),
    ),
)


def find_profile(name: str) -> Profile:
    """The hardware called `name`. Raises ConfigError naming those there are."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    works = ", ".join(profile.name for profile in PROFILES)
    raise ConfigError([Fault(setting="--hw", value=name, rule="is not a known kind of hardware", works=works)])
