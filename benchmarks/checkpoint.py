"""Checkpoints of a 2 GiB training state (weights and Adam's moments): ours in both stores beside torch, safetensors and plain files.

All of one table in one run, in turn, on the same tensors and the same disk; medians. Every method pushes what it wrote to the disk, and
before each the disk is let come to rest and free memory is touched. Loading fills tensors that exist already, as a run that is taken up has them, out of files that the
system still holds in memory: what is compared is the work, not the disk. `peak` is memory beyond what the process had before.

    python -m benchmarks.checkpoint [--only stores|reshard|stall|convert] [--gib 2] [--repeat 5] [--ranks 1 2 4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_peers import METHODS, Method, published_folder
from ckpt.asynchronous import AsynchronousSaver
from ckpt.load import load
from ckpt.save import Saving, save
from core.config.architecture import GQA, Layer, ModelConfig, MoE, RMSNorm, Rope, Router
from core.config.mapping import ParallelConfig
from core.config.run import OptimizerConfig
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import Groups, groups_for
from core.state.box import part, whole
from core.state.inventory import inventory
from core.state.sharded import ShardedTensor
from core.transformer.stage import Stage, build_model

GIB = 1 << 30
HIDDEN, EXPERTS, FFN, VOCAB = 1024, 8, 896, 20480


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: seconds of the slowest rank, and the most bytes that a rank needed beyond what it had."""

    seconds: float
    peak_bytes: int


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stores", "reshard", "stall", "convert"))
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="benchmark-") as folder:
        place = Path(folder)
        if given.only in (None, "stores"):
            for ranks in given.ranks:
                stores(place, ranks, int(given.gib * GIB), given.repeat)
        if given.only in (None, "reshard"):
            reshard(place, given.repeat)
        if given.only in (None, "stall"):
            stall(place, int(given.gib * GIB), given.repeat)
        if given.only in (None, "convert"):
            convert(place, int(2 * given.gib * GIB), given.repeat)


def stores(place: Path, ranks: int, size: int, repeat: int) -> None:
    """Save and load, every method, on `ranks` ranks."""
    answers = on_ranks(ranks, _measure, place, size, repeat)
    saves = {name: [_slowest(answers, "save", name, i) for i in range(repeat)] for name in METHODS}
    loads = {name: [_slowest(answers, "load", name, i) for i in range(repeat)] for name in METHODS}
    held = answers[0]["bytes"]
    print(f"\n{ranks} rank{'s' if ranks > 1 else ''}, {held / GIB:.2f} GiB in all, medians of {repeat}")
    print("method\tsave GiB/s\tof plain\tof torch\tpeak MiB\tload GiB/s\tof plain\tof torch\tpeak MiB")
    rate = {name: (held / _median(saves[name]) / GIB, held / _median(loads[name]) / GIB) for name in METHODS}
    for name in METHODS:
        cells = [name]
        for i, rows in enumerate((saves[name], loads[name])):
            peak = statistics.median(row.peak_bytes for row in rows) / (1 << 20)
            ratios = (rate[name][i] / rate[other][i] for other in ("plain", "torch"))
            cells += [f"{rate[name][i]:.2f}", *(f"{ratio:.2f}" for ratio in ratios), f"{peak:.0f}"]
        print("\t".join(cells), flush=True)


def _slowest(answers: list[dict[str, Any]], what: str, name: str, i: int) -> Row:
    rows = [answer[what, name][i] for answer in answers]
    return Row(seconds=max(row.seconds for row in rows), peak_bytes=max(row.peak_bytes for row in rows))


def _median(rows: list[Row]) -> float:
    return statistics.median(row.seconds for row in rows)


def _measure(rank: int, ranks: int, place: Path, size: int, repeat: int) -> dict[Any, Any]:
    """What one rank measures of every method."""
    tensors = state_of(rank, ranks, size)
    groups = groups_for(ParallelConfig())
    found: dict[Any, Any] = {("save", name): [] for name in METHODS} | {("load", name): [] for name in METHODS}
    for i in range(repeat + 1):
        for name in sorted(METHODS, key=lambda name: (i, name) if i % 2 else (-i, name)):
            method: Method = METHODS[name](place / f"{name}-{ranks}", tensors, groups.world)
            settle(rank, method.folder)
            warm(rank, place, size)
            saved = timed(method.save)
            content = [tensor.data[..., :1].clone() for tensor in tensors]
            for tensor in tensors:
                tensor.data.zero_()
            dist.barrier()
            loaded = timed(method.load)
            for tensor, expected in zip(tensors, content, strict=True):
                assert torch.equal(tensor.data[..., :1], expected), f"{name}: {tensor.name} is not what was saved"
            if i:  # the first round makes the caches warm
                found["save", name].append(saved)
                found["load", name].append(loaded)
    settle(rank, *(place / f"{name}-{ranks}" for name in METHODS))
    mine = sum(t.data.nbytes for t in tensors if t.copy == 0)
    total = torch.tensor([mine])
    dist.all_reduce(total)
    return {**found, "bytes": int(total)}


def state_of(rank: int, ranks: int, size: int) -> list[ShardedTensor]:
    """This rank's part of weights and moments of about `size` bytes: every matrix cut along its first dimension, norms everywhere."""
    layers = max(1, round((size / 12 - VOCAB * HIDDEN) / (EXPERTS * 3 * FFN * HIDDEN + 4 * HIDDEN * HIDDEN)))
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCAB, HIDDEN), "final_norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.attention_norm.weight": (HIDDEN,),
            f"layers.{i}.mlp_norm.weight": (HIDDEN,),
            **{f"layers.{i}.attention.{n}.weight": (HIDDEN, HIDDEN) for n in ("query", "key", "value", "output")},
            f"layers.{i}.mlp.experts.gate_up": (EXPERTS, 2, FFN, HIDDEN),
            f"layers.{i}.mlp.experts.down": (EXPERTS, HIDDEN, FFN),
        }
    made = []
    for prefix in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
        for name, shape in shapes.items():
            cut = len(shape) > 1
            box = part(shape, 0, rank, ranks) if cut else whole(shape)
            # Random bits: nothing may come out faster for being alike. Norms are the same on all ranks.
            data = torch.randn(box.shape, generator=torch.Generator().manual_seed(rank if cut else 0))
            copy, copies = (0, 1) if cut else (rank, ranks)
            made.append(
                ShardedTensor(name=f"{prefix}{name}", shape=shape, box=box, data=data, copy=copy, copies=copies)
            )
    return made


def settle(rank: int, *folders: Path) -> None:
    """Remove what was there, and wait until the disk has nothing left to do."""
    dist.barrier()
    if rank == 0:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()


def warm(rank: int, place: Path, size: int) -> None:
    """Have free memory that has been used lately, for the system's copy of what is written: on a virtual machine the first touch of memory
    takes longer than the writing, and whoever comes first would pay for it."""
    if rank == 0:
        part = bytes(16 << 20)
        with open(place / "warm", "wb", buffering=0) as file:
            for _ in range(size // len(part)):
                file.write(part)
        (place / "warm").unlink()
    dist.barrier()


def timed(action: Callable[[], object]) -> Row:
    """Seconds of `action`, and the most memory that it took beyond what was there."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = _memory("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    dist.barrier()
    return Row(seconds=seconds, peak_bytes=max(0, _memory("VmHWM") - before))


def _memory(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


MODEL = ModelConfig(
    vocab=VOCAB,
    hidden=HIDDEN,
    max_tokens=64,
    norm=RMSNorm(eps=1e-5),
    rope=Rope(theta=1e4),
    layers=(
        Layer(
            attention=GQA(heads=16, kv_heads=16, head_dim=64),
            mlp=MoE(
                experts=EXPERTS,
                top_k=2,
                expert_ffn=FFN,
                router=Router(score="softmax_after_top_k", normalise=False, balance=()),
            ),
        ),
    )
    * 2,
    init_std=0.02,
)


def reshard(place: Path, repeat: int) -> None:
    """A run saved under tp 2, ep 2 on four ranks, loaded under the same mapping and under tp 1, ep 4."""
    saved, other = ParallelConfig(tp=2, ep=2), ParallelConfig(ep=4)
    folder = on_ranks(4, _save_run, place / "reshard", saved)[0]
    same, moved = [], []
    for _ in range(repeat):
        same.append(max(on_ranks(4, _load_run, folder, saved)))
        moved.append(max(on_ranks(4, _load_run, folder, other)))
    a, b = statistics.median(same), statistics.median(moved)
    print(
        f"\nresharding load: tp 2, ep 2 -> the same {a:.2f} s, -> ep 4 {b:.2f} s, {b / a:.2f} times (medians of {repeat})"
    )


def _run(parallel: ParallelConfig) -> tuple[Stage, ChainedOptimizer, Groups]:
    groups = groups_for(parallel, embedding_stages=(0,))
    model = build_model(MODEL, groups=groups, parallel=parallel)
    optimizer = ChainedOptimizer(model, OptimizerConfig(learning_rate=1e-3), groups)
    return model, optimizer, groups


def _everything(model: Stage, optimizer: ChainedOptimizer, groups: Groups) -> list[ShardedTensor]:
    pieces = [replace(piece, name=f"model.{name}") for name, piece in inventory(model, groups).items()]
    return pieces + optimizer.state()


def _save_run(rank: int, ranks: int, run: Path, parallel: ParallelConfig) -> str:
    model, optimizer, groups = _run(parallel)
    for tensor in _everything(model, optimizer, groups):
        tensor.data.normal_()
    return save(run, 1, _everything(model, optimizer, groups), {}, groups.world, Saving())


def _load_run(rank: int, ranks: int, folder: str, parallel: ParallelConfig) -> float:
    model, optimizer, groups = _run(parallel)
    state = _everything(model, optimizer, groups)
    for tensor in state:
        tensor.data.zero_()
    times = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        load(folder, state, groups.world)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return min(times)


def stall(place: Path, size: int, repeat: int) -> None:
    """How long training stops for a save beside it, against one that it waits for."""
    ((synchronous, stalled, alone, beside),) = on_ranks(1, _stalls, place / "stall", size, repeat)
    ratio = stalled / synchronous
    print(
        f"\nasynchronous save: training stops {stalled:.3f} s, {ratio:.1%} of the {synchronous:.2f} s of a synchronous one"
    )
    print(f"a step of work alone {alone:.2f} s, beside a save {beside:.2f} s (medians of {repeat})")


def _stalls(rank: int, ranks: int, run: Path, size: int, repeat: int) -> tuple[float, float, float, float]:
    tensors = state_of(rank, ranks, size)
    groups = groups_for(ParallelConfig())
    matrix = torch.randn(2048, 2048)

    def work() -> float:
        """Forward and backward of about a second, on every core, that leave the state alone."""
        begin = time.perf_counter()
        for _ in range(12):
            torch.mm(matrix, matrix)
        return time.perf_counter() - begin

    synchronous, stalled, alone, beside = [], [], [], []
    torch.set_num_threads(os.cpu_count() or 1)
    with AsynchronousSaver(run, groups.checkpoint, Saving(keep=1)) as saver:
        saver.prepare(tensors)
        for step in range(repeat + 1):
            settle(rank)
            warm(rank, run.parent, size)
            begin = time.perf_counter()
            save(run, 2 * step, tensors, {}, groups.world, Saving(keep=1))
            synchronous.append(time.perf_counter() - begin)
            settle(rank)
            warm(rank, run.parent, size)
            alone.append(work())
            saver.save(2 * step + 1, tensors, {})
            beside.append(work())
            saver.before_update()
            saver.wait()
            stalled += [metrics.stalled_seconds for metrics in saver.finished()]
    middle = (statistics.median(times[1:]) for times in (synchronous, stalled, alone, beside))
    return tuple(middle)  # type: ignore[return-value]


def convert(place: Path, size: int, repeat: int) -> None:
    """`ckpt convert` of a published folder, in 1 GiB of memory, against copying its files; both begin with memory that was not used lately."""
    folder = published_folder(place / "published", size)
    held = sum(path.stat().st_size for path in folder.iterdir())
    command = [sys.executable, "-m", "ckpt.cli", "convert", str(folder), str(place / "zoo"), "--to", "zarr"]
    command += ["--memory", "1GiB", "--workers", "1"]
    copies, conversions, starts, peaks = [], [], [], []
    for _ in range(repeat):
        copies.append(_seconds(["sh", "-c", f"cp -r {folder} {place}/copy && sync"], place / "copy")[0])
        seconds, peak = _seconds(command, place / "zoo")
        conversions.append(seconds)
        peaks.append(peak)
        starts.append(_seconds([*command, "--dry-run"], place / "zoo")[0])
    a, b, start = (statistics.median(times) for times in (copies, conversions, starts))
    print(
        f"\nconvert of {held / GIB:.2f} GiB: {b:.1f} s, of which {start:.1f} s are the program's start; copying {a:.1f} s"
    )
    print(f"{a / b:.0%} of the speed of copying, without the start {a / (b - start):.0%} (medians of {repeat})")
    print(f"most memory of all its processes together {max(peaks) / (1 << 20):.0f} MiB")


def _seconds(command: list[str], made: Path) -> tuple[float, int]:
    """Seconds of a command, and the most memory that it and its children had at one time."""
    shutil.rmtree(made, ignore_errors=True)
    os.sync()
    # Until a virtual machine has given back what was freed: otherwise who starts fastest would have it all.
    time.sleep(5)
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_resident(pid) for pid in _family(process.pid)))
        time.sleep(0.02)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    shutil.rmtree(made, ignore_errors=True)
    return seconds, peak


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, ranks, *arguments)` returns on each rank of a fresh gloo world of one thread per rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks, maxtasksperchild=1) as pool:
        tasks = [(function, rank, ranks, f"{folder}/store", arguments) for rank in range(ranks)]
        return pool.starmap(_rank, tasks, chunksize=1)


def _rank(function: Callable[..., Any], rank: int, ranks: int, store: str, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    answer = function(rank, ranks, *arguments)
    dist.destroy_process_group()
    return answer


if __name__ == "__main__":
    main()
