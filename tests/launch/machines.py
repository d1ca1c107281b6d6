"""Machines as they would answer: nodes with nothing amiss, in the formats of the tools' own documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from launch.machine import Package

GIB = 2**30
UNREACHABLE = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is "
    "installed and running.\n"
)
HEAD = """\
Mon Nov 30 09:12:44 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<25} Driver Version: {driver:<14} CUDA Version: {cuda:<8} |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
"""
TORCH = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = '0123'
hip: Optional[str] = None
"""


def gpu(name: str, mebibytes: int, capability: str, watts: int, driver: str = "570.133.20") -> dict[str, str]:
    """What nvidia-smi answers about one GPU, with --format=csv,noheader,nounits."""
    return {
        "name": name,
        "memory.total": str(mebibytes),
        "compute_cap": capability,
        "driver_version": driver,
        "persistence_mode": "Enabled",
        "mig.mode.current": "Disabled",
        "clocks.max.sm": "1980",
        "power.limit": f"{watts}.00",
        "power.default_limit": f"{watts}.00",
    }


H100 = gpu("NVIDIA H100 80GB HBM3", 81559, "9.0", 700)
GB200 = gpu("NVIDIA GB200", 189471, "10.0", 1200)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A Probe that knows one machine. driver: what nvidia-smi says instead of its answers. unknown: fields that it does not know."""

    gpus: tuple[Mapping[str, str], ...] = ()
    driver: str | None = None
    unknown: tuple[str, ...] = ()
    cuda: str = "13.0"
    packages: Mapping[str, Package] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    free: int | None = 100_000 * GIB
    shared: int | None = 512 * GIB
    open_files: int | None = 1_048_576
    locked: int | None = None
    address: str | None = "10.0.0.7"
    version: tuple[int, int] = (3, 12)

    def run(self, *command: str) -> str | None:
        if command[0] != "nvidia-smi" or not (self.gpus or self.driver):
            return None
        if self.driver is not None:
            return self.driver
        if len(command) == 1:
            return HEAD.format(driver=self.gpus[0]["driver_version"], cuda=self.cuda)
        assert command[2] == "--format=csv,noheader,nounits"
        fields = command[1].removeprefix("--query-gpu=").split(",")
        for name in fields:
            if name in self.unknown:
                return f'Field "{name}" is not a valid field to query.\n\n'
        return "".join(", ".join(gpu[name] for name in fields) + "\n" for gpu in self.gpus)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, path: str) -> tuple[str, ...]:
        return self.folders.get(path, ())

    def package(self, module: str, distribution: str = "") -> Package | None:
        return self.packages.get(module)

    def imports(self, module: str) -> str | None:
        return self.broken.get(module)

    def room(self, path: str) -> int | None:
        return self.free

    def size(self, path: str) -> int | None:
        return self.shared

    def limit(self, name: Literal["files", "locked"]) -> int | None:
        return self.open_files if name == "files" else self.locked

    def cores(self) -> int:
        return 64

    def python(self) -> tuple[int, int]:
        return self.version

    def host(self) -> tuple[str, str | None]:
        return "node7", self.address


def with_torch(version: str, cuda: str | None) -> dict[str, str]:
    """The file in which a torch says what it is."""
    return {"/site/torch/version.py": TORCH.format(version=version, cuda=repr(cuda))}


def cards(number: int, down: tuple[int, ...] = ()) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Files and folders of InfiniBand cards with a port each, as the kernel shows them; some of the ports down."""
    top = "/sys/class/infiniband"
    files, folders = {}, {top: tuple(f"mlx5_{i}" for i in range(number))}
    for i in range(number):
        folders[f"{top}/mlx5_{i}/ports"] = ("1",)
        files[f"{top}/mlx5_{i}/ports/1/state"] = "1: DOWN\n" if i in down else "4: ACTIVE\n"
        files[f"{top}/mlx5_{i}/ports/1/rate"] = "400 Gb/sec (4X NDR)\n"
    return files, folders


def package(version: str, folder: str = "") -> Package:
    return Package(version=version, folder=folder)


PACKAGES = {
    "torch": package("2.13.0", "/site/torch"),
    "nvidia.nccl": package("2.29.3"),
    "triton": package("3.9.0"),
    "transformer_engine": package("2.20.2"),
    "transformer_engine_torch": package("2.20.2"),
    "deep_ep": package("1.2.1", "/site/deep_ep"),
}
CARDS, SYS = cards(8)
FILES = {
    **with_torch("2.13.0+cu130", "13.0"),
    "/site/deep_ep/__init__.py": "from .buffer import Buffer\nfrom .hybrid_ep_buffer import HybridEPBuffer\n",
    **CARDS,
}
HOPPER = Recorded(gpus=(H100,) * 8, packages=PACKAGES, files=FILES, folders=SYS)
BLACKWELL = Recorded(
    gpus=(GB200,) * 4,
    packages=PACKAGES,
    files=FILES,
    folders={**SYS, "/dev/nvidia-caps-imex-channels": ("channel0",)},
)
