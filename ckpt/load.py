"""Load a checkpoint into the pieces of any mapping: every rank reads only the blocks that its boxes meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt.agree import each, together
from ckpt.dtype import loads_into
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.manifest import Manifest, read_manifest
from ckpt.plan import Held, holding_faults
from ckpt.read import fill, plan_reads
from ckpt.save import describe
from core.errors import CheckpointError
from core.parallel.groups import Group
from core.state.sharded import ShardedTensor


def load(
    checkpoint: Address, tensors: Iterable[ShardedTensor], world: Group, skip: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """Fill `data` of every tensor from a checkpoint, a folder or URL; returns its `extra`. Collective over `world`.

    The mapping may differ from the one that saved. Together the ranks must hold all of every tensor, and exactly the
    checkpoint's tensors but for those whose names begin with one of `skip` (`optimizer.` to read a model alone). A target
    of another floating type than was stored is converted by value.

    Raises CheckpointError on every rank: with everything missing, unexpected or of another shape or kind before any
    tensor is touched; or naming the tensor and file at a missing or damaged block.
    """
    mine, files = tuple(tensors), open_files(checkpoint)
    manifest = each(world, lambda: read_manifest(files))
    faults = load_faults(manifest, together(world, lambda: describe(mine)), skip)
    if faults:
        head = f"{checkpoint}: does not fit what is to be loaded (nothing was changed):"
        raise CheckpointError("\n".join([head, *(f"  {fault}" for fault in faults)]))
    reads = each(world, lambda: plan_reads(files, manifest, mine))
    each(world, lambda: fill(files, manifest, reads))
    return manifest.extra


def load_faults(manifest: Manifest, held: Sequence[Sequence[Held]], skip: tuple[str, ...]) -> list[str]:
    """Everything that keeps the checkpoint from filling exactly what all ranks hold, one line each."""
    stored = {entry.name: entry for entry in manifest.entries}
    wanted = {piece.name: piece for pieces in held for piece in pieces}
    faults = [f"{name}: missing in the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    unread = sorted(name for name in stored.keys() - wanted.keys() if not name.startswith(skip))
    faults += [f"{name}: in the checkpoint, but nothing to load it into" for name in unread]
    for name in sorted(wanted.keys() & stored.keys()):
        entry, target = stored[name], wanted[name]
        if entry.shape != target.shape:
            faults.append(f"{name}: has shape {entry.shape} in the checkpoint, but {target.shape} is wanted")
        elif not loads_into(entry.dtype, target.dtype):
            faults.append(f"{name}: is {entry.dtype} in the checkpoint, which cannot fill {target.dtype}")
    return faults + holding_faults(held, with_copies=False)
