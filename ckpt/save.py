"""Save the canonical state: every rank writes its own pieces, and the checkpoint appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpt.agree import on_first, together
from ckpt.blocks import crc32c
from ckpt.described import ASSETS
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.host import dtype_name, to_numpy
from ckpt.manifest import Codec, File, Manifest, file_faults, manifest_bytes, require_json
from ckpt.plan import Held, Plan, plan_save
from ckpt.read import some
from ckpt.shelf.address import open_shelf
from ckpt.shelf.protocol import Shelf
from ckpt.store.find import find_store
from ckpt.store.protocol import OutFile, Read, Store, Written, entries_of, write_file
from core.errors import CheckpointError
from core.parallel.groups import Group
from core.state.box import Box, intersect, shifted
from core.state.sharded import ShardedTensor

# What a file system takes for a file beside its bytes, generously.
BYTES_PER_FILE = 4096


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How checkpoints are written. store: zarr or torch_dist. codec: raw or zstd. keep: how many of a run are kept.

    assets: files that go with the model, such as its tokenizer, by name; every checkpoint has them, those of the first rank.
    """

    store: str = "zarr"
    codec: Codec = "raw"
    keep: int = 2
    assets: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A save that all ranks have agreed on: what is written into which files by whom."""

    plan: Plan
    files: tuple[OutFile, ...]
    store: Store
    codec: Codec
    assets: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """What it takes on the disk, generously."""
        beside = sum(len(content) for content in self.assets.values())
        return self.plan.bytes + beside + BYTES_PER_FILE * (4 + 2 * len(self.files) + len(self.assets))


def save(
    run: Address,
    step: int,
    tensors: Iterable[ShardedTensor],
    extra: Mapping[str, Any],
    world: Group,
    saving: Saving,
) -> str:
    """Write the checkpoint of `step` of a run, then remove all but the newest `saving.keep`. Collective over `world`.

    run: a folder (the checkpoint is then `run/checkpoints/step_…`) or the URL of an object store. tensors: what this rank holds; of
    equal copies each rank writes its share, so that all ranks write about as many bytes. extra: JSON values; the first rank's are
    written. Returns the checkpoint's address, once everything is on the disk. A step that was saved before is replaced at once.

    Raises CheckpointError on every rank if any rank fails (pieces that do not tile their tensor, a full disk, …); the
    checkpoints from before are then as they were.
    """
    mine = tuple(tensors)
    planned = agree(step, mine, extra, world, saving)
    return carry_out(run, step, planned, mine, extra, world, saving.keep)


def agree(
    step: int, tensors: tuple[ShardedTensor, ...], extra: Mapping[str, Any], world: Group, saving: Saving
) -> Planned:
    """What every rank will write: a pure function of what all of them hold, which they tell each other. Collective."""
    held = together(world, lambda: checked(tensors, extra, step, saving))
    plan = plan_save(held)
    store = find_store(saving.store)
    return Planned(plan=plan, files=store.lay_out(plan), store=store, codec=saving.codec, assets=saving.assets)


def carry_out(
    run: Address,
    step: int,
    planned: Planned,
    tensors: tuple[ShardedTensor, ...],
    extra: Mapping[str, Any],
    world: Group,
    keep: int,
) -> str:
    """The writing half of `save`. Collective over `world`, which an asynchronous save has for itself."""
    shelf = open_shelf(run)
    with ExitStack() as held_by_first:
        partial = on_first(world, lambda: _begin(shelf, step, planned, held_by_first))
        try:
            written = together(world, lambda: write_share(partial, planned, tensors, world.position))
            final = on_first(world, lambda: commit(shelf, step, partial, planned, written, extra))
        except CheckpointError as error:
            raise CheckpointError(_failed(shelf, step, planned, error)) from error.__cause__
        finally:
            # After a failure, of whatever kind, on the rank that made it; after a success it has its final name.
            if world.position == 0:
                shelf.discard(partial)
        on_first(world, lambda: shelf.prune(keep))
    return final


def describe(tensors: Iterable[ShardedTensor]) -> tuple[Held, ...]:
    """What a rank holds, without the data."""
    return tuple(
        Held(name=t.name, shape=t.shape, dtype=dtype_name(t.data), box=t.box, copy=t.copy, copies=t.copies)
        for t in tensors
    )


def write_share(partial: str, planned: Planned, tensors: tuple[ShardedTensor, ...], rank: int) -> list[Written]:
    """Write this rank's files."""
    files, read = open_files(partial), reader(tensors)
    mine = [file for file in planned.files if file.rank == rank]
    with ThreadPoolExecutor(files.writes_at_once) as pool:
        work = [
            pool.submit(write_file, planned.store, planned.plan, file, planned.codec, read, files.write)
            for file in mine
        ]
        try:
            return [one.result() for one in work]
        except BaseException:
            # After the first failure nothing more is begun; leaving the pool waits for what is under way.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def reader(tensors: Iterable[ShardedTensor]) -> Read:
    """Reads boxes that lie inside one of `tensors`, their memory where that is contiguous and on the host."""
    of: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        of.setdefault(tensor.name, []).append(tensor)

    def read(name: str, box: Box) -> np.ndarray:
        holder = next(t for t in of[name] if intersect(t.box, box) == box)
        return to_numpy(holder.data[shifted(box, holder.box.offset).slices])

    return read


def commit(
    shelf: Shelf, step: int, partial: str, planned: Planned, written: list[list[Written]], extra: Mapping[str, Any]
) -> str:
    """Write the descriptions and the manifest, and make it a checkpoint of the run."""
    manifest = finish(partial, step, shelf.next_sequence(), planned, [file for rank in written for file in rank], extra)
    # Ranks may have written to different disks; without locks, another saver may have taken this one for a dead one.
    lost = file_faults(open_files(partial), manifest)
    if lost:
        raise CheckpointError(
            f"{partial}: {some(list(lost.values()))}, though it was written. Every rank must see the same folder, and only one job may "
            "save into a run."
        )
    return shelf.publish(step, partial, manifest_bytes(manifest))


def finish(
    partial: str,
    step: int,
    sequence: int,
    planned: Planned,
    written: list[Written],
    extra: Mapping[str, Any],
) -> Manifest:
    """Write what other programs need beside the data, and the assets; the manifest of it all, which is not written yet."""
    manifest = Manifest(
        step=step,
        sequence=sequence,
        store=planned.store.name,
        codec=planned.codec,
        files={file.path: file.file for file in written},
        entries=entries_of(planned.plan, written),
        extra=extra,
    )
    described = {
        **planned.store.describe(manifest),
        **{f"{ASSETS}{name}": content for name, content in planned.assets.items()},
    }
    files = open_files(partial)
    for path, content in described.items():
        files.write(path, [content])
    more = {path: File(size=len(content), crc32c=crc32c(content)) for path, content in described.items()}
    return replace(manifest, files={**manifest.files, **more})


def checked(
    tensors: tuple[ShardedTensor, ...], extra: Mapping[str, Any], step: int, saving: Saving
) -> tuple[Held, ...]:
    """What this rank holds. Raises CheckpointError where something else than that keeps a save from being written."""
    require_json(extra)
    if step < 0 or saving.keep < 1:
        raise CheckpointError(
            f"step={step}, keep={saving.keep}: a step is at least 0, and at least 1 checkpoint is kept"
        )
    codecs = find_store(saving.store).codecs
    if saving.codec not in codecs:
        raise CheckpointError(
            f"codec={saving.codec}: the store {saving.store} cannot hold it. Works: {', '.join(codecs)}"
        )
    return describe(tensors)


def _begin(shelf: Shelf, step: int, planned: Planned, lock: ExitStack) -> str:
    """Claim the run, make the partial checkpoint, check the free space."""
    try:
        lock.enter_context(shelf.only_saver())
        partial = shelf.begin(step)
    except OSError as error:
        raise CheckpointError(f"{shelf.address}: cannot be written: {error.strerror or error}") from error
    free = open_files(partial).free_bytes()
    if free is not None and free < planned.bytes:
        shelf.discard(partial)
        raise CheckpointError(
            f"{shelf.address}: the checkpoint of step {step} needs {planned.bytes:,} bytes, {free:,} are free. Make room, or set "
            "checkpoint.keep lower; the checkpoints from before are untouched."
        )
    return partial


def _failed(shelf: Shelf, step: int, planned: Planned, error: CheckpointError) -> str:
    free = open_files(shelf.address).free_bytes()
    room = "" if free is None else f" (it needs {planned.bytes:,} bytes, {free:,} are free)"
    return (
        f"{shelf.address}: the checkpoint of step {step} could not be written{room}; "
        f"the checkpoints from before are untouched.\n{error}"
    )
