"""`launch doctor`: is this machine what a set-up needs, and how to get what is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ckpt.files.url import is_remote
from core.check.built import not_built
from core.config.counts import count_parameters
from core.config.family import find_family
from core.config.mapping import PACKAGES
from core.config.run import RunConfig
from launch.doctor_gpus import gpu_findings, read_gpus
from launch.finding import Finding, Needs, State, found
from launch.machine import Machine, Probe
from launch.profiles import find_profile
from launch.request import Request, new_run
from launch.start import cache_folder
from launch.tables import print_table

GIB = 2**30
PYTHON, TORCH, TRITON = (3, 11), (2, 10), (3, 7)
# NCCL keeps buffers for every pair of GPUs of a node there; containers start with 64 MiB.
SHARED_BYTES_PER_GPU = GIB
# Every rank opens sockets to the others of its groups, files of the data and of checkpoints.
FILES = {"cpu": 1024, "cuda": 65536}
# Of a parameter in a checkpoint: float32 master weights and two moments.
CHECKPOINT_BYTES = 12
# And while it trains on a CPU: these, gradients and the activations' share that grows with them.
TRAINING_BYTES = 20
INSTALL = {
    "deepep": "DeepEP: NVSHMEM first, then `pip install --no-build-isolation deep-ep` on a machine with CUDA's compiler",
    "hybridep": "DeepEP from the branch hybrid-ep of its repository, on a machine with CUDA's compiler",
}


def doctor(model: str | None, request: Request, *, imports: bool = False, probe: Probe | None = None) -> bool:
    """Print what was found, and whether the machine has all that is needed. imports: import packages too, each in its own process.

    Raises RequestError where the set-up that is asked for is none.
    """
    machine = probe or Machine()
    needs = needs_of(model, request, machine)
    findings = examine(needs, machine, imports=imports)
    rows = [(item.what, item.found, item.needed, item.state, item.fix) for item in findings]
    print_table(("what", "found", "needed", "state", "how to get it"), rows)
    for fault in () if needs.run is None else not_built(needs.run):
        click.echo(f"not of this machine: {fault}")
    missing = [item.what for item in findings if item.state == "missing"]
    name = " ".join(filter(None, (model, f"--hw {needs.profile.name}")))
    click.echo(f"{name}: {'missing ' + ', '.join(missing) if missing else 'all that is needed is here'}")
    return not missing


def needs_of(model: str | None, request: Request, probe: Probe) -> Needs:
    """What is needed for the set-up of a model, or for a kind of hardware alone; without either, for the machine at hand."""
    if model is not None:
        run = new_run(request, find_family(model)).run
        profile = find_profile(run.hardware)
        each = run.ranks if profile.fabric is None else min(run.ranks, profile.fabric.gpus_per_node)
        return Needs(profile=profile, gpus=each, nodes=math.ceil(run.ranks / each), run=run)
    profile = find_profile(request.hardware or ("gpu" if read_gpus(probe) else "cpu"))
    return Needs(profile=profile, gpus=1 if profile.fabric is None else profile.fabric.gpus_per_node, nodes=1)


def examine(needs: Needs, probe: Probe, *, imports: bool = False) -> tuple[Finding, ...]:
    """Every finding, in the order of the table. The machine is asked through `probe` alone."""
    on_gpus = needs.profile.device == "cuda"
    _, torch_cuda = torch_build(probe)
    findings = [_python(probe)]
    if on_gpus:
        findings += gpu_findings(needs, probe, torch_cuda)
    else:
        findings += _cores(needs, probe)
    findings += _packages(needs, probe, on_gpus)
    if imports:
        findings += _imports(needs, probe, on_gpus)
    findings += _limits(needs, probe, on_gpus)
    if on_gpus and needs.nodes > 1:
        findings += _network(needs, probe)
    findings += _host(needs, probe)
    findings += _folders(needs.run, probe)
    return tuple(findings)


def torch_build(probe: Probe) -> tuple[str | None, tuple[int, int] | None]:
    """The version of the installed torch and the CUDA that it was built for; None for what is not there. torch is not imported."""
    package = probe.package("torch")
    if package is None:
        return None, None
    text = probe.read(f"{package.folder}/version.py") or ""
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"^cuda\b[^=]*= '(\d+)\.(\d+)", text, flags=re.MULTILINE)
    return version[1] if version else package.version, (int(cuda[1]), int(cuda[2])) if cuda else None


def _python(probe: Probe) -> Finding:
    there = probe.python()
    state: State = "ok" if there >= PYTHON else "missing"
    return found("Python", _dotted(there), f"{_dotted(PYTHON)} or newer", state, "`make install PYTHON=python3.11`")


def _cores(needs: Needs, probe: Probe) -> Iterator[Finding]:
    """A process on each core, and room for the model in memory."""
    cores = probe.cores()
    state: State = "ok" if cores >= needs.gpus else "warn"
    yield found("CPU cores", str(cores), f"{needs.gpus}, one for each rank", state, f"--ranks {cores}")
    free = re.search(r"MemAvailable:\s+(\d+) kB", probe.read("/proc/meminfo") or "")
    if free is not None and needs.run is not None:
        there, wanted = int(free[1]) * 1024, count_parameters(needs.run.model).total * TRAINING_BYTES
        state = "ok" if there >= wanted else "missing"
        yield found("memory", _bytes(there), f"{_bytes(wanted)} or more", state, "a smaller --size")


# --------------------------------------------------------------------------------------------------------- packages


def _packages(needs: Needs, probe: Probe, on_gpus: bool) -> Iterator[Finding]:
    yield from _torch(probe, on_gpus)
    triton = probe.package("triton")
    enough = triton is not None and _numbers(triton.version) >= TRITON
    state: State = "ok" if enough or not on_gpus else "warn"
    needed = f"{_dotted(TRITON)} or newer, for fast kernels" if on_gpus else "nothing: kernels are for GPUs"
    yield found("Triton", _shown(triton.version if triton else None), needed, state, "`pip install 'triton>=3.7'`")
    if on_gpus:
        yield _transformer_engine(needs, probe)
        yield _deep_ep(needs, probe)


def _torch(probe: Probe, on_gpus: bool) -> Iterator[Finding]:
    version, cuda = torch_build(probe)
    build = "" if version is None else f", built for CUDA {_dotted(cuda)}" if cuda else ", built for CPUs"
    fits = version is not None and _numbers(version) >= TORCH and (cuda is not None or not on_gpus)
    fix = f"install its build for {'CUDA 13' if on_gpus else 'CPUs'}, as pytorch.org tells"
    needed = f"{_dotted(TORCH)} or newer{', built for CUDA' if on_gpus else ''}"
    yield found("torch", f"{_shown(version)}{build}", needed, "ok" if fits else "missing", fix)
    if on_gpus and cuda is not None:
        nccl = probe.package("nvidia.nccl", f"nvidia-nccl-cu{cuda[0]}")
        # a torch that was built on the spot holds NCCL inside, where only an import could ask for it
        yield found("NCCL", nccl.version if nccl else "inside torch", "any", "ok")


def _transformer_engine(needs: Needs, probe: Probe) -> Finding:
    """The package is a shell that needs a part for torch beside it."""
    shell = probe.package("transformer_engine", "transformer-engine")
    part = probe.package("transformer_engine_torch", "transformer-engine-torch")
    there = "not installed" if shell is None else _shown(shell.version) if part else "without its part for torch"
    if needs.recipe is None:
        return found("Transformer Engine", there, "nothing: no precision.recipe", "ok")
    state: State = "ok" if shell and part else "missing"
    fix = "`pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2'`, with CUDA's compiler"
    return found("Transformer Engine", there, f"for precision.recipe={needs.recipe.name}", state, fix)


def _deep_ep(needs: Needs, probe: Probe) -> Finding:
    """Both dispatchers are one package, whose branch for HybridEP has one more class."""
    package = probe.package("deep_ep", "deep-ep")
    hybrid = package is not None and "HybridEPBuffer" in (probe.read(f"{package.folder}/__init__.py") or "")
    there = _shown(package.version if package else None) + (", with HybridEP" if hybrid else "")
    dispatcher = needs.dispatcher
    if dispatcher not in PACKAGES:
        return found("DeepEP, HybridEP", there, f"nothing: parallel.dispatcher={dispatcher or 'alltoall'}", "ok")
    fits = package is not None and (dispatcher == "deepep" or hybrid)
    fix = f"install {INSTALL[dispatcher]}; or parallel.dispatcher=flex"
    needed = f"for parallel.dispatcher={dispatcher}"
    return found("DeepEP, HybridEP", there, needed, "ok" if fits else "missing", fix)


def _imports(needs: Needs, probe: Probe, on_gpus: bool) -> Iterator[Finding]:
    """What is installed can still fail to load: for a library that is not there, or another version of torch."""
    wanted = {"torch": True, "triton": on_gpus}
    wanted["transformer_engine.pytorch"] = on_gpus and needs.recipe is not None
    wanted["deep_ep"] = on_gpus and needs.dispatcher in PACKAGES
    for module, needed in wanted.items():
        if needed and probe.package(module.split(".", maxsplit=1)[0]) is not None:
            why = probe.imports(module)
            fix = "install it again, beside the torch that is here"
            yield found(f"import {module}", why or "works", "works", "missing" if why else "ok", fix)


# ------------------------------------------------------------------------------------------------------- the system


def _limits(needs: Needs, probe: Probe, on_gpus: bool) -> Iterator[Finding]:
    """Shared memory, open files, locked memory."""
    if on_gpus:
        shared, wanted = probe.size("/dev/shm"), needs.gpus * SHARED_BYTES_PER_GPU
        enough = shared is not None and shared >= wanted
        state: State = "ok" if enough else "missing" if needs.gpus > 1 else "warn"
        fix = f"`docker run --shm-size={max(wanted // GIB, 1)}g …`, or `sudo mount -o remount,size={wanted // GIB}G /dev/shm`"
        yield found("shared memory", "none" if shared is None else _bytes(shared), _bytes(wanted), state, fix)
    files, least = probe.limit("files"), FILES[needs.profile.device]
    state = "ok" if files is None or files >= least else "missing" if files < FILES["cpu"] else "warn"
    yield found("open files", _limit(files), f"{least:,}", state, f"`ulimit -n {least}`")
    if on_gpus and needs.nodes > 1:
        locked = probe.limit("locked")
        fix = "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1 …`"
        there = "unlimited" if locked is None else _bytes(locked)
        yield found("locked memory", there, "unlimited, for network cards", "ok" if locked is None else "missing", fix)


def _network(needs: Needs, probe: Probe) -> Iterator[Finding]:
    """Cards of InfiniBand or RoCE, and the channels of an NVLink domain that is wider than a node."""
    top = "/sys/class/infiniband"
    ports = [f"{top}/{card}/ports/{port}" for card in probe.names(top) for port in probe.names(f"{top}/{card}/ports")]
    active = [port for port in ports if "ACTIVE" in (probe.read(f"{port}/state") or "")]
    rates = sorted({(probe.read(f"{port}/rate") or "").split(" (")[0].strip() for port in active})
    shown = f"{len(active)} of {len(ports)} ports active" + (f", {', '.join(filter(None, rates))}" if active else "")
    state: State = "ok" if len(active) >= needs.gpus else "warn"
    fix = "`ibstat` tells what is down; containers need `--device=/dev/infiniband`; without, NCCL uses slow TCP"
    yield found("InfiniBand", shown if ports else "no card", f"{needs.gpus} active ports, one for each GPU", state, fix)
    fabric = needs.profile.fabric
    if fabric is not None and fabric.domain > fabric.gpus_per_node:
        channels = probe.names("/dev/nvidia-caps-imex-channels")
        fix = "start nvidia-imex on every node and make its channel (NVIDIA's IMEX guide), or ask who runs the cluster"
        there = ", ".join(channels) or "none"
        state = "ok" if channels else "missing"
        yield found("IMEX channels", there, f"one, for NVLink between nodes of {fabric.gpus_per_node}", state, fix)


def _host(needs: Needs, probe: Probe) -> Iterator[Finding]:
    """Ranks find each other by the host's name."""
    name, address = probe.host()
    state: State = "ok" if address else "missing" if needs.gpus * needs.nodes > 1 else "warn"
    fix = f"`echo 127.0.0.1 {name} | sudo tee -a /etc/hosts`, or the cluster's own address for it"
    yield found("host name", f"{name} is {address or 'unknown'}", "an address", state, fix)


def _folders(run: RunConfig | None, probe: Probe) -> Iterator[Finding]:
    """Where runs and prepared data are written, and room for the checkpoints of one run."""
    address = None if run is None else run.checkpoint.address
    checkpoints = 0
    if run is not None and not (address and is_remote(address)):
        checkpoints = count_parameters(run.model).total * CHECKPOINT_BYTES * (run.checkpoint.keep + 1)
    here = Path("runs").absolute()
    places: Sequence[tuple[str, Path, int]] = (
        ("folder of runs", here, 0 if address else checkpoints),
        *((("folder of checkpoints", Path(address), checkpoints),) if address and not is_remote(address) else ()),
        ("cache of tokens", cache_folder(), 0),
    )
    for what, path, wanted in places:
        free, needed = probe.room(str(path)), max(wanted, GIB)
        if free is None:
            fix = f"`mkdir -p {path}` as a user who may, or another folder"
            yield found(what, f"{path}: cannot be written", "writable", "missing", fix)
        else:
            state: State = "ok" if free >= needed else "missing" if free < needed / 2 else "warn"
            fix = "free some, or write checkpoints elsewhere: --set checkpoint.address=…"
            yield found(what, f"{path}: {_bytes(free)} free", _bytes(needed), state, fix)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _shown(version: str | None) -> str:
    return "not installed" if version is None else version or "of unknown version"


def _limit(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _bytes(number: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(number, 1), 1024)), len(units) - 1)
    return f"{number / 1024**power:.{0 if power < 3 else 1}f} {units[power]}"
