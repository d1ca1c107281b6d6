"""The doctor names what is missing on a machine, how to get it, and nothing that is there."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.config.mapping import DispatcherName
from core.config.recipe import RECIPES, RecipeName
from core.errors import ConfigError
from launch.cli import main
from launch.doctor import doctor, examine, needs_of, torch_build
from launch.doctor_gpus import driver_cuda, read_gpus
from launch.finding import Finding, Needs
from launch.machine import Machine
from launch.profiles import find_profile
from launch.request import Request
from tests.core.rules import RUN
from tests.launch.machines import (
    BLACKWELL,
    FILES,
    GB200,
    GIB,
    H100,
    HOPPER,
    PACKAGES,
    SYS,
    UNREACHABLE,
    Recorded,
    cards,
    package,
    with_torch,
)

ROOT = Path(__file__).resolve().parents[2]


def needs(
    hardware: str, *, nodes: int = 16, dispatcher: DispatcherName = "alltoall", recipe: RecipeName | None = None
) -> Needs:
    """What a run on so many whole nodes needs of each."""
    profile = find_profile(hardware)
    each = 1 if profile.fabric is None else profile.fabric.gpus_per_node
    run = replace(
        RUN,
        hardware=hardware,
        parallel=replace(RUN.parallel, dispatcher=dispatcher),
        precision=replace(RUN.precision, recipe=None if recipe is None else RECIPES[recipe], compute="bfloat16"),
    )
    return Needs(profile=profile, gpus=each, nodes=nodes, run=run)


ON_BLACKWELL = needs("gb200", dispatcher="hybridep", recipe="mxfp8")
ON_HOPPER = needs("h100", dispatcher="deepep", recipe="fp8_blockwise")


def amiss(what: Needs, machine: Recorded, **more: Any) -> dict[str, Finding]:
    return {item.what: item for item in examine(what, machine, **more) if item.state != "ok"}


@pytest.mark.parametrize(
    ("what", "machine"), [(ON_BLACKWELL, BLACKWELL), (ON_HOPPER, HOPPER), (needs("h100", nodes=1), HOPPER)]
)
def test_a_machine_with_everything_lacks_nothing(what: Needs, machine: Recorded) -> None:
    findings = examine(what, machine, imports=True)
    assert {item.state for item in findings} == {"ok"}
    assert all(item.found and item.needed and not item.fix for item in findings)


def with_packages(**changed: Any) -> dict[str, Any]:
    return {name: value for name, value in {**PACKAGES, **changed}.items() if value is not None}


DOWN, _ = cards(8, down=(2, 3, 4, 5, 6))
LACKS: list[tuple[Needs, Recorded, dict[str, Any], str, str, str]] = [
    (ON_HOPPER, HOPPER, {"version": (3, 10)}, "Python", "missing", "PYTHON="),
    (ON_HOPPER, HOPPER, {"gpus": (H100,) * 7}, "GPUs", "missing", "--ranks"),
    (ON_HOPPER, HOPPER, {"gpus": (*(H100,) * 7, {**H100, "name": "NVIDIA H200"})}, "GPUs", "warn", "one kind"),
    (ON_HOPPER, HOPPER, {"gpus": (GB200,) * 8}, "compute capability", "missing", "--hw"),
    (ON_HOPPER, HOPPER, {"unknown": ("compute_cap",)}, "compute capability", "warn", "driver"),
    (ON_HOPPER, HOPPER, {"gpus": ({**H100, "memory.total": "65000"}, *(H100,) * 7)}, "GPU memory", "warn", "less memory"),
    (ON_HOPPER, HOPPER, {"gpus": (*(H100,) * 7, {**H100, "mig.mode.current": "Enabled"})}, "MIG", "missing", "-mig 0"),
    (ON_HOPPER, HOPPER, {"gpus": ({**H100, "persistence_mode": "Disabled"},) * 8}, "persistence mode", "warn", "-pm 1"),
    (ON_HOPPER, HOPPER, {"gpus": (*(H100,) * 7, {**H100, "power.limit": "500.00"})}, "power limit", "warn", "-pl 700"),
    (ON_HOPPER, HOPPER, {"gpus": (*(H100,) * 7, {**H100, "clocks.max.sm": "1200"})}, "clocks", "warn", "-rgc"),
    (ON_HOPPER, HOPPER, {"cuda": "12.9"}, "driver", "missing", "install a torch for CUDA 12"),
    (ON_BLACKWELL, BLACKWELL, {"files": {**FILES, **with_torch("2.13.0+cu126", "12.6")}}, "torch's CUDA", "missing", "CUDA 13"),
    (ON_HOPPER, HOPPER, {"files": {**FILES, **with_torch("2.9.1+cu130", "13.0")}}, "torch", "missing", "CUDA 13"),
    (ON_HOPPER, HOPPER, {"files": {**FILES, **with_torch("2.13.0+cpu", None)}}, "torch", "missing", "CUDA 13"),
    (ON_HOPPER, HOPPER, {"packages": with_packages(torch=None)}, "torch", "missing", "CUDA 13"),
    (ON_HOPPER, HOPPER, {"packages": with_packages(triton=package("3.6.0"))}, "Triton", "warn", "triton>=3.7"),
    (ON_HOPPER, HOPPER, {"packages": with_packages(transformer_engine_torch=None)}, "Transformer Engine", "missing", "[pytorch]"),
    (ON_HOPPER, HOPPER, {"packages": with_packages(deep_ep=None)}, "DeepEP, HybridEP", "missing", "NVSHMEM"),
    (ON_BLACKWELL, BLACKWELL, {"files": {**FILES, "/site/deep_ep/__init__.py": "from .buffer import Buffer"}}, "DeepEP, HybridEP", "missing", "branch hybrid-ep"),
    (ON_HOPPER, HOPPER, {"broken": {"deep_ep": "ImportError: libnvshmem_host.so.3"}}, "import deep_ep", "missing", "install it again"),
    (ON_HOPPER, HOPPER, {"shared": 64 * 2**20}, "shared memory", "missing", "--shm-size=8g"),
    (ON_HOPPER, HOPPER, {"open_files": 1024}, "open files", "warn", "ulimit -n 65536"),
    (ON_HOPPER, HOPPER, {"open_files": 1023}, "open files", "missing", "ulimit -n 65536"),
    (ON_HOPPER, HOPPER, {"locked": 8 * 2**20}, "locked memory", "missing", "memlock=-1"),
    (ON_HOPPER, HOPPER, {"folders": {}}, "InfiniBand", "warn", "/dev/infiniband"),
    (ON_HOPPER, HOPPER, {"files": {**FILES, **DOWN}}, "InfiniBand", "warn", "ibstat"),
    (ON_BLACKWELL, BLACKWELL, {"folders": SYS}, "IMEX channels", "missing", "nvidia-imex"),
    (ON_HOPPER, HOPPER, {"address": None}, "host name", "missing", "/etc/hosts"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "machine", "change", "name", "state", "fix"), LACKS, ids=[f"{row[3]} {i}" for i, row in enumerate(LACKS)]
)
def test_each_thing_that_is_amiss_is_one_line_with_how_to_get_it(
    what: Needs, machine: Recorded, change: dict[str, Any], name: str, state: str, fix: str
) -> None:
    found = amiss(what, replace(machine, **change), imports=True)
    assert found[name].state == state
    assert fix in found[name].fix
    others = found.keys() - {name}
    # another GPU has another memory, and other matrix units; without torch nothing is known of its CUDA
    assert others <= {"GPU memory", "matrix units for fp8_blockwise"}


def test_what_is_not_asked_for_is_not_needed() -> None:
    bare = replace(HOPPER, packages=with_packages(transformer_engine=None, deep_ep=None), folders={}, locked=8192)
    assert amiss(needs("h100", nodes=1), bare) == {}
    assert amiss(needs("h100", nodes=2), bare).keys() == {"locked memory", "InfiniBand"}


def test_a_recipe_wants_matrix_units_that_know_it_on_hardware_of_which_nothing_is_known() -> None:
    known: tuple[tuple[RecipeName, bool, bool], ...] = (
        ("fp8_current", True, True),
        ("fp8_blockwise", True, False),
        ("mxfp8", False, True),
        ("nvfp4", False, True),
    )
    for recipe, fits_hopper, fits_blackwell in known:
        what = needs("gpu", nodes=1, recipe=recipe)
        assert (f"matrix units for {recipe}" not in amiss(what, HOPPER)) == fits_hopper
        assert (f"matrix units for {recipe}" not in amiss(what, BLACKWELL)) == fits_blackwell


def test_a_driver_that_does_not_answer_and_a_machine_without_gpus_are_told_apart() -> None:
    silent = amiss(ON_HOPPER, replace(HOPPER, driver=UNREACHABLE))
    assert silent["driver"].state == silent["GPUs"].state == "missing"
    empty = amiss(ON_HOPPER, replace(HOPPER, driver="No devices were found\n"))
    assert "driver" not in empty and empty["GPUs"].found == "none"
    assert amiss(ON_HOPPER, replace(HOPPER, gpus=())).keys() >= {"driver", "GPUs"}


def test_fields_that_an_old_driver_does_not_know_are_asked_no_more() -> None:
    old = replace(HOPPER, unknown=("compute_cap", "mig.mode.current"))
    gpus = read_gpus(old)
    assert gpus is not None and len(gpus) == 8
    assert gpus[0].capability() is None and gpus[0].text("mig.mode.current") is None
    assert (gpus[0].text("name"), gpus[0].number("power.limit")) == ("NVIDIA H100 80GB HBM3", 700.0)
    assert driver_cuda(old) == (13, 0)
    spared = replace(HOPPER, gpus=({**H100, "power.limit": "[N/A]", "clocks.max.sm": "[Not Supported]"},) * 8)
    assert not {"power limit", "clocks"} & {item.what for item in examine(ON_HOPPER, spared)}


def test_room_for_the_checkpoints_of_the_run_is_needed_where_they_will_lie() -> None:
    what = needs("cpu", nodes=1)
    assert what.run is not None
    run = replace(what.run, model=replace(what.run.model, vocab=10_000_000))
    big = replace(what, run=run)
    plenty = Recorded(packages=PACKAGES, files=FILES, free=60 * GIB)
    # 2 * 96 * 10 million = 1.92e9 parameters at 12 bytes, three times: 69 GB, 64.4 GiB
    found = amiss(big, plenty)["folder of runs"]
    assert (found.state, found.needed) == ("warn", "64.4 GiB")
    elsewhere = replace(run, checkpoint=replace(RUN.checkpoint, address="s3://bucket/run"))
    assert amiss(replace(big, run=elsewhere), plenty) == {}
    folder = replace(run, checkpoint=replace(RUN.checkpoint, address="/big"))
    assert amiss(replace(big, run=folder), plenty).keys() == {"folder of checkpoints"}
    # a small model takes some megabytes, and a run at least one gibibyte
    assert amiss(what, replace(plenty, free=int(0.6 * GIB)))["folder of runs"].state == "warn"
    assert amiss(what, replace(plenty, free=int(0.4 * GIB)))["folder of runs"].state == "missing"
    assert amiss(what, replace(plenty, free=None)).keys() == {"folder of runs", "cache of tokens"}


def test_without_a_name_the_machine_at_hand_is_looked_at() -> None:
    assert needs_of(None, Request(), HOPPER).profile.name == "gpu"
    assert needs_of(None, Request(), Recorded()).profile.name == "cpu"
    asked = needs_of(None, Request(hardware="gb200"), Recorded())
    assert (asked.profile.name, asked.gpus, asked.run) == ("gb200", 4, None)
    tiny = needs_of("mixtral", Request(hardware="cpu", ranks=1, settings=("parallel.ep=1",)), HOPPER)
    assert (tiny.profile.name, tiny.gpus, tiny.nodes) == ("cpu", 1, 1)
    with pytest.raises(ConfigError, match=r"mapping\.ep-divides-experts"):
        needs_of("mixtral", Request(hardware="cpu", settings=("parallel.ep=5",)), HOPPER)


def test_the_verdict_is_said_last_and_what_is_not_of_the_machine_is_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor(None, Request(hardware="h100"), probe=HOPPER)
    assert capsys.readouterr().out.splitlines()[-1] == "--hw h100: all that is needed is here"
    assert not doctor(None, Request(hardware="h100"), probe=replace(HOPPER, gpus=(H100,), shared=0))
    assert capsys.readouterr().out.splitlines()[-1] == "--hw h100: missing GPUs, shared memory"
    on_cpus = Recorded(packages=PACKAGES, files=FILES | {"/proc/meminfo": "MemAvailable:   32000000 kB\n"})
    assert doctor("mixtral", Request(hardware="cpu", settings=("memory.offload=core_attn",)), probe=on_cpus)
    out = capsys.readouterr().out
    assert "not of this machine: memory.offload=core_attn: can be planned and priced, and cannot run yet" in out
    starved = replace(on_cpus, files=FILES | {"/proc/meminfo": "MemAvailable:   1000 kB\n"})
    assert not doctor("mixtral", Request(hardware="cpu"), probe=starved)


# -------------------------------------------------------------------------------------------- the machine at hand


def test_the_machine_at_hand_answers_as_python_itself_does(tmp_path: Path) -> None:
    machine = Machine()
    there = machine.package("click")
    assert there is not None and there.version == importlib.metadata.version("click")
    assert Path(there.folder, "__init__.py").exists()
    assert machine.package("no_such_module_at_all") is None and machine.package("no_such.module") is None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert machine.limit("files") == (None if soft == resource.RLIM_INFINITY else soft)
    assert machine.run("no-such-tool") is None
    assert machine.run("sh", "-c", "echo out; echo err >&2; exit 3") == "out\nerr\n"
    (tmp_path / "a").write_text("text")
    assert (machine.read(str(tmp_path / "a")), machine.read(str(tmp_path / "b"))) == ("text", None)
    assert (machine.names(str(tmp_path)), machine.names(str(tmp_path / "b"))) == (("a",), ())
    free = machine.room(str(tmp_path / "not" / "there" / "yet"))
    assert free is not None and free > 0 and not (tmp_path / "not").exists()
    assert machine.room(str(tmp_path / "a" / "inside a file")) is None
    assert machine.imports("json") is None and "No module named" in (machine.imports("no_such_module_at_all") or "")
    assert machine.python() == sys.version_info[:2] and machine.cores() >= 1


def test_the_torch_at_hand_is_read_without_importing_it() -> None:
    import torch

    version, cuda = torch_build(Machine())
    assert version == torch.__version__
    assert (cuda is None) == (torch.version.cuda is None)
    if cuda is not None:
        assert torch.version.cuda == f"{cuda[0]}.{cuda[1]}"


def test_the_command_answers_at_once_without_torch_and_ends_with_its_verdict() -> None:
    code = (
        "import sys, time\n"
        "from launch.cli import main\n"
        "try: main(['doctor', '--hw', 'cpu'])\n"
        "except SystemExit as end: assert end.code in (0, 1), end.code\n"
        "assert not {'torch', 'numpy', 'triton', 'rich'} & set(sys.modules)\n"
        "assert time.process_time() < 2, time.process_time()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("\t") for line in ended.stdout.splitlines()]
    assert rows[0] == ["what", "found", "needed", "state", "how to get it"]
    assert {"Python", "CPU cores", "torch", "open files", "host name"} <= {row[0] for row in rows}


@pytest.mark.skipif(Machine().run("nvidia-smi") is not None, reason="this machine has GPUs")
def test_a_machine_without_gpus_is_told_what_it_lacks_with_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--hw", "h100"])
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "GPUs\tnone\t8 of NVIDIA H100 (SXM)\tmissing\t" in out and "Traceback" not in out
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--hw", "h1000"])
    assert end.value.code == 2
