"""Save the canonical state: every rank writes its own pieces, and the checkpoint appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckpt.agree import on_first, together
from ckpt.folders import next_sequence, only_saver, open_partial, prune, publish
from ckpt.host import checksum, dtype_name, to_numpy
from ckpt.manifest import Entry, File, Manifest, Piece, require_json, write_manifest
from ckpt.plan import Held, Plan, Write, plan_save
from ckpt.store.protocol import Block, Store
from ckpt.store.zarr import ZarrStore
from core.errors import CheckpointError
from core.parallel.groups import Group
from core.state.box import shifted
from core.state.sharded import ShardedTensor

# What a file system takes for a file beside its bytes, generously.
BYTES_PER_FILE = 4096


def save(
    run: Path, step: int, tensors: Iterable[ShardedTensor], extra: Mapping[str, Any], world: Group, keep: int
) -> Path:
    """Write the checkpoint `run/checkpoints/step_…`, then remove all but the `keep` newest. Collective over `world`.

    tensors: what this rank holds; of equal copies one rank writes, so that all ranks write about as many bytes.
    extra: JSON values; the first rank's are written. Returns the folder, once everything is on the disk. A step that was
    saved before is replaced at once.

    Raises CheckpointError on every rank if any rank fails (pieces that do not tile their tensor, a full disk, …); the
    checkpoints from before are then as they were.
    """
    store = ZarrStore()
    mine = tuple(tensors)
    held = together(world, lambda: _checked(mine, extra, step, keep))
    plan = plan_save(held)
    with ExitStack() as held_by_first:
        partial = on_first(world, lambda: _begin(run, step, plan, held_by_first))
        try:
            on_first(world, lambda: store.begin(partial, [write.array for write in plan.writes]))
            pieces = together(world, lambda: write_share(partial, plan, mine, world.position, store))
            final = on_first(world, lambda: commit(run, step, partial, plan, pieces, extra, store))
        except CheckpointError as error:
            raise CheckpointError(_failed(run, step, plan, error)) from error.__cause__
        finally:
            # After a failure, of whatever kind, on the rank that made the folder; after a success it has its final name.
            if world.position == 0:
                shutil.rmtree(partial, ignore_errors=True)
        on_first(world, lambda: prune(run, keep))
    return final


def describe(tensors: Iterable[ShardedTensor]) -> tuple[Held, ...]:
    """What a rank holds, without the data."""
    return tuple(
        Held(name=t.name, shape=t.shape, dtype=dtype_name(t.data), box=t.box, copy=t.copy, copies=t.copies)
        for t in tensors
    )


def _checked(tensors: tuple[ShardedTensor, ...], extra: Mapping[str, Any], step: int, keep: int) -> tuple[Held, ...]:
    require_json(extra)
    if step < 0 or keep < 1:
        raise CheckpointError(f"step={step}, keep={keep}: a step is at least 0, and at least 1 checkpoint is kept")
    return describe(tensors)


def _begin(run: Path, step: int, plan: Plan, lock: ExitStack) -> Path:
    """Claim the run, check the free space, make the partial folder."""
    try:
        lock.enter_context(only_saver(run))
        partial = open_partial(run, step)
    except OSError as error:
        raise CheckpointError(f"{run / 'checkpoints'}: cannot be written: {error.strerror or error}") from error
    free, needed = shutil.disk_usage(partial).free, _needed(plan)
    if free < needed:
        partial.rmdir()
        raise CheckpointError(
            f"{partial.parent}: the checkpoint of step {step} needs {needed:,} bytes, {free:,} are free. Make room, or set "
            "checkpoint.keep lower; the checkpoints from before are untouched."
        )
    return partial


def write_share(
    partial: Path, plan: Plan, tensors: tuple[ShardedTensor, ...], rank: int, store: Store
) -> list[tuple[str, Piece]]:
    """Write this rank's share of the plan; (tensor, piece) of everything written."""
    data = {(tensor.name, tensor.box): tensor for tensor in tensors}
    share = [write for write in plan.writes if write.rank == rank]
    checksums: list[int] = []

    def blocks() -> Iterator[Block]:
        for write in share:
            array = to_numpy(data[write.name, write.box].data)
            checksums.append(checksum(array))
            box = shifted(write.box, write.array_box.offset)
            yield Block(array=write.array, box=box, data=array, first=write.first)

    store.write(partial, blocks())
    return [(write.name, _piece(partial, write, crc, store)) for write, crc in zip(share, checksums, strict=True)]


def _piece(partial: Path, write: Write, crc32: int, store: Store) -> Piece:
    paths = store.files(write.array, shifted(write.box, write.array_box.offset), write.first)
    return Piece(
        box=write.box,
        rank=write.rank,
        array=write.array.path,
        array_box=write.array_box,
        crc32=crc32,
        files=tuple(File(path=path, size=(partial / path).stat().st_size) for path in paths),
    )


def commit(
    run: Path,
    step: int,
    partial: Path,
    plan: Plan,
    pieces: list[list[tuple[str, Piece]]],
    extra: Mapping[str, Any],
    store: Store,
) -> Path:
    """Write the manifest and give the folder its final name."""
    of: dict[str, list[Piece]] = {name: [] for name in plan.tensors}
    for name, piece in (found for rank in pieces for found in rank):
        of[name].append(piece)
    entries = tuple(
        Entry(name=name, shape=shape, dtype=dtype, pieces=tuple(sorted(of[name], key=lambda piece: piece.box.offset)))
        for name, (shape, dtype) in plan.tensors.items()
    )
    sequence = next_sequence(run)
    manifest = Manifest(step=step, sequence=sequence, store=store.name, entries=entries, extra=extra)
    write_manifest(partial, manifest)
    return publish(run, step, partial)


def _needed(plan: Plan) -> int:
    """Bytes of the chunks, and room for the files' own blocks, the arrays' descriptions and the manifest."""
    return plan.bytes + BYTES_PER_FILE * (4 + 3 * len(plan.writes))


def _failed(run: Path, step: int, plan: Plan, error: CheckpointError) -> str:
    free = shutil.disk_usage(run).free
    return (
        f"{run / 'checkpoints'}: the checkpoint of step {step} could not be written (it needs {_needed(plan):,} bytes, "
        f"{free:,} are free); the checkpoints from before are untouched.\n{error}"
    )
