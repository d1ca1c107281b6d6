"""Kinds of hardware that a run can be asked for, as data with its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.config.precision import RecipeName
from core.errors import ConfigError, Fault

GB = 10**9
TB = 10**12
TFLOPS = 10**12


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

    products, low_products: share of the peak that matrix products reach in bfloat16 and in a recipe's format. attention: FLOP a
    second of attention, forward and backward. streamed: how many times the bytes of a layer's activations pass memory. hidden: share
    of the communication that no set-up names as overlapped, which is hidden all the same. launch_seconds: of a layer and microbatch,
    during which a GPU waits for its host; nothing where graphs are captured.
    """

    products: float
    low_products: float
    attention: tuple[float, float]
    streamed: float
    hidden: float
    launch_seconds: float


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


PROFILES = (
    Profile(name="cpu", title="CPU cores of this machine", device="cpu", collectives="gloo"),
    Profile(name="gpu", title="CUDA devices of this machine", device="cuda", collectives="nccl"),
)


def find_profile(name: str) -> Profile:
    """The hardware called `name`. Raises ConfigError naming those there are."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    works = ", ".join(profile.name for profile in PROFILES)
    raise ConfigError([Fault(setting="--hw", value=name, rule="is not a known kind of hardware", works=works)])
