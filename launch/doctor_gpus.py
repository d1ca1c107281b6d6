"""What the doctor asks about GPUs: what `nvidia-smi` says of them, against the hardware that a set-up is for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.config.recipe import ScalingName
from launch.finding import Finding, Needs, State, found
from launch.machine import Probe

# In the order of preference; what an older driver does not know is asked no more.
FIELDS = (
    *("name", "memory.total", "compute_cap", "driver_version", "persistence_mode", "mig.mode.current"),
    *("clocks.max.sm", "power.limit", "power.default_limit"),
)
UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
MEBIBYTE = 2**20
# The first CUDA that makes code for a generation of GPUs, by the major compute capability (CUDA's release notes).
FIRST_CUDA = {8: (11, 0), 9: (11, 8), 10: (12, 8)}
# The first compute capability whose matrix units take scales of a kind, and the first that does not any more (report section 5).
CAPABLE: dict[ScalingName, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "delayed": ((8, 9), None),
    "tensor": ((8, 9), None),
    "1x128": ((9, 0), (10, 0)),
    "128x128": ((9, 0), (10, 0)),
    "mx": ((10, 0), None),
    "nv": ((10, 0), None),
    "nv16x16": ((10, 0), None),
}
DRIVER = "install NVIDIA's driver: on Debian and Ubuntu `sudo apt-get install nvidia-driver-580-server`, then restart"
# How little less than a profile's memory a GPU may have: makers' figures are rounded.
ROUNDED = 0.97


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi: its answers by field; a field that it does not know is absent."""

    answers: dict[str, str]

    def text(self, field: str) -> str | None:
        """The answer; None where there is none."""
        answer = self.answers.get(field)
        return None if answer is None or answer in ("N/A", "[N/A]", "[Not Supported]", "") else answer

    def number(self, field: str) -> float | None:
        """The answer as a number."""
        try:
            return float(self.text(field) or "")
        except ValueError:
            return None

    def capability(self) -> tuple[int, int] | None:
        """Its compute capability."""
        match = re.fullmatch(r"(\d+)\.(\d+)", self.text("compute_cap") or "")
        return (int(match[1]), int(match[2])) if match else None


def read_gpus(probe: Probe) -> tuple[Gpu, ...] | None:
    """The GPUs that nvidia-smi lists; None where it is not there or cannot reach its driver."""
    fields, said = list(FIELDS), _ask(probe, FIELDS)
    while said is not None and (unknown := UNKNOWN_FIELD.search(said)) and unknown[1] in fields:
        fields.remove(unknown[1])
        said = _ask(probe, fields)
    if said is None:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]
    if not rows or any(len(row) != len(fields) for row in rows):
        return () if "No devices were found" in said else None
    return tuple(Gpu(answers=dict(zip(fields, row, strict=True))) for row in rows)


def _ask(probe: Probe, fields: Sequence[str]) -> str | None:
    return probe.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def driver_cuda(probe: Probe) -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, from the head of nvidia-smi's table."""
    match = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", probe.run("nvidia-smi") or "")
    return (int(match[1]), int(match[2])) if match else None


def gpu_findings(needs: Needs, probe: Probe, torch_cuda: tuple[int, int] | None) -> Iterator[Finding]:
    """GPUs, driver and CUDA against what is needed. torch_cuda: what the installed torch was built for."""
    gpus = read_gpus(probe)
    wanted = f"{needs.gpus} of {needs.profile.title}"
    if gpus is None:
        yield found("driver", "nvidia-smi is not there, or reaches no driver", "a driver", "missing", DRIVER)
    if not gpus:
        yield found("GPUs", "none", wanted, "missing", "start on a machine that has them, or choose --hw cpu")
        return
    yield _count(needs, gpus, wanted)
    yield from _kind(needs, gpus)
    yield from _cuda(gpus, driver_cuda(probe), torch_cuda)
    yield from _recipe(needs, gpus[0])
    yield from _state(gpus)


def _count(needs: Needs, gpus: tuple[Gpu, ...], wanted: str) -> Finding:
    names = sorted({gpu.text("name") or "unnamed" for gpu in gpus})
    fix = f"ask for {needs.gpus} GPUs on each node, or take fewer --ranks"
    what = f"{len(gpus)} of {' and '.join(names)}"
    if len(names) > 1:
        return found("GPUs", what, wanted, "warn", "use GPUs of one kind: the slowest one sets the pace")
    return found("GPUs", what, wanted, "ok" if len(gpus) >= needs.gpus else "missing", fix)


def _kind(needs: Needs, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Compute capability and memory against the profile."""
    profile, least = needs.profile, min((gpu.number("memory.total") or 0) * MEBIBYTE for gpu in gpus)
    capability = gpus[0].capability()
    if profile.capability is not None:
        said = "unknown: the driver is too old to tell" if capability is None else _version(capability)
        state: State = "warn" if capability is None else "ok" if capability == profile.capability else "missing"
        fix = DRIVER if capability is None else "choose the --hw that this is (`launch list`), or another machine"
        yield found("compute capability", said, _version(profile.capability), state, fix)
    elif capability is not None and capability < (8, 0):
        yield found(
            "compute capability", _version(capability), "8.0", "missing", "use GPUs from A100 on: they have bfloat16"
        )
    if profile.chip is not None:
        enough = least >= ROUNDED * profile.chip.memory
        fix = "choose the --hw that this is, or plan with less memory"
        yield found(
            "GPU memory",
            f"{least / 1e9:.0f} GB",
            f"{profile.chip.memory / 1e9:.0f} GB",
            "ok" if enough else "warn",
            fix,
        )


def _cuda(
    gpus: tuple[Gpu, ...], driver: tuple[int, int] | None, torch_cuda: tuple[int, int] | None
) -> Iterator[Finding]:
    """A driver runs what is built for its own major version of CUDA or an older one, and a build knows GPUs up to its time."""
    said = gpus[0].text("driver_version") or "of unknown version"
    shown = f"{said}, for CUDA up to {_version(driver)}" if driver else said
    if torch_cuda is not None:
        late = driver is not None and driver[0] < torch_cuda[0]
        state: State = "missing" if late else "ok" if driver else "warn"
        fix = f"{DRIVER}; or install a torch for CUDA {driver[0]}" if driver else DRIVER
        yield found("driver", shown, f"CUDA {torch_cuda[0]} or newer, as torch", state, fix)
        capability = gpus[0].capability()
        first = FIRST_CUDA.get(capability[0]) if capability else None
        if first is not None:
            fix = "install torch's build for CUDA 13, as pytorch.org tells"
            enough = torch_cuda >= first
            yield found("torch's CUDA", _version(torch_cuda), f"{_version(first)} or newer for these GPUs", "ok" if enough else "missing", fix)  # fmt: skip
    else:
        yield found("driver", shown, "any", "ok")


def _recipe(needs: Needs, gpu: Gpu) -> Iterator[Finding]:
    recipe, capability = needs.recipe, gpu.capability()
    if recipe is None or capability is None:
        return
    spans = [CAPABLE[scaling] for scaling in recipe.scalings]
    first = max((first for first, _ in spans), default=(0, 0))
    past = min((past for _, past in spans if past is not None), default=None)
    fits = first <= capability and (past is None or capability < past)
    wanted = f"{_version(first)} or newer" if past is None else f"from {_version(first)}, before {_version(past)}"
    fix = "choose another precision.recipe, or precision.recipe=none"
    yield found(f"matrix units for {recipe.name}", f"compute capability {_version(capability)}", wanted, "ok" if fits else "missing", fix)  # fmt: skip


def _state(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Clocks, power and modes: what makes a GPU slower than it is."""
    state: State
    limits = [(gpu.number("power.limit"), gpu.number("power.default_limit")) for gpu in gpus]
    known = [(limit, default) for limit, default in limits if limit is not None and default is not None]
    if known:
        limit, default = min(known, key=lambda pair: pair[0] / pair[1])
        state = "ok" if limit >= default else "warn"
        yield found("power limit", f"{limit:.0f} W", f"{default:.0f} W", state, f"`sudo nvidia-smi -pl {default:.0f}`")
    clocks = [clock for gpu in gpus if (clock := gpu.number("clocks.max.sm")) is not None]
    if clocks:
        low, high = min(clocks), max(clocks)
        shown = f"up to {low:.0f} MHz" if low == high else f"up to {low:.0f} to {high:.0f} MHz"
        state = "ok" if low == high else "warn"
        yield found("clocks", shown, "alike on all GPUs", state, "`sudo nvidia-smi -rgc` lets locked clocks free")
    if any(gpu.text("persistence_mode") == "Disabled" for gpu in gpus):
        yield found("persistence mode", "off", "on", "warn", "`sudo nvidia-smi -pm 1`: starts are slow without")
    if any(gpu.text("mig.mode.current") == "Enabled" for gpu in gpus):
        yield found("MIG", "on", "off", "missing", "`sudo nvidia-smi -mig 0`: parts of a GPU cannot talk to others")


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
