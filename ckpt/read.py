"""Reads pieces of any boxes from a checkpoint, whatever store laid it out: of every block that they meet, checked, what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ckpt.blocks import block_boxes, crc32c, decode
from ckpt.dtype import item_bytes
from ckpt.files.protocol import Files
from ckpt.host import bytes_of, dtype_name, empty_bytes, from_bytes
from ckpt.manifest import Block, Codec, Entry, Manifest, file_faults
from core.errors import CheckpointError
from core.state.box import Box, intersect, shifted, tiling_fault
from core.state.sharded import ShardedTensor

# fetch(files, codec, dtype, block, box): the bytes of a block's values, checked.
Fetch = Callable[[Files, Codec, str, Block, Box], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class BlockRead:
    """The part `shared` (in the tensor's coordinates) of the block `block`, which is `box`, that goes into `target`."""

    target: ShardedTensor
    entry: Entry
    rank: int
    block: Block
    box: Box
    shared: Box


def read_into(files: Files, manifest: Manifest, tensors: Iterable[ShardedTensor]) -> None:
    """Fill every tensor from the blocks that it meets; no other rank is involved. The data may be on any device.

    A target of another floating type than was stored is converted by value. Each element of each target is written exactly once,
    or CheckpointError is raised before any is touched: also where a file that is needed is missing or of another size. A block that
    is not what was written raises it too, naming tensor, file and the rank that wrote it.
    """
    fill(files, manifest, plan_reads(files, manifest, tuple(tensors)))


def fill(files: Files, manifest: Manifest, reads: Sequence[BlockRead]) -> None:
    """Carry out what was planned; a block that several of them are of (a flat shard is a few boxes of a tensor) is read once."""
    of_block: dict[tuple[str, int], list[BlockRead]] = {}
    for read in reads:
        of_block.setdefault((read.block.file, read.block.offset), []).append(read)
    with ThreadPoolExecutor(files.reads_at_once) as pool:
        for _ in _at_most(pool, files, manifest.codec, of_block.values(), 4 * files.reads_at_once):
            pass


def plan_reads(files: Files, manifest: Manifest, tensors: Sequence[ShardedTensor]) -> list[BlockRead]:
    """The reads that fill `tensors`, proved to. Raises CheckpointError, naming all, if files of theirs are missing or cut short."""
    entries = {entry.name: entry for entry in manifest.entries}
    reads = [read for tensor in tensors for read in reads_of(files.address, tensor, entries[tensor.name])]
    wrong = file_faults(files, manifest)
    needed = {read.block.file for read in reads}
    hit = {path: fault for path, fault in wrong.items() if path in needed}
    if hit:
        raise CheckpointError(damaged(files, manifest, hit))
    return reads


def damaged(files: Files, manifest: Manifest, wrong: Mapping[str, str]) -> str:
    """The message for files that are not what they were, as `file_faults` has them: with the tensors that each holds, and who wrote it."""
    holds: dict[str, set[str]] = {path: set() for path in wrong}
    wrote: dict[str, int] = {}
    for entry in manifest.entries:
        for piece in entry.pieces:
            for path in {block.file for block in piece.blocks} & wrong.keys():
                holds[path].add(entry.name)
                wrote[path] = piece.rank
    head = f"{files.address}: this checkpoint is damaged; use another one of the same run. Files at fault:"
    lines = [
        f"  {wrong[path]}" + (f", which holds {some(sorted(n))} (written by rank {wrote[path]})" if n else "")
        for path, n in sorted(holds.items())
    ]
    return "\n".join([head, *lines])


def read_block(files: Files, codec: Codec, dtype: str, block: Block, box: Box) -> np.ndarray:
    """The bytes of a block's values, checked. Raises CheckpointError, without naming the tensor, where they are not what was written."""
    content = empty_bytes(block.size)
    files.read_into(block.file, block.offset, [content])
    _check(content, block)
    return decode(content, codec, box.elements * item_bytes(dtype))


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _at_most(
    pool: ThreadPoolExecutor, files: Files, codec: Codec, reads: Iterable[Sequence[BlockRead]], ahead: int
) -> Iterator[None]:
    """Carry out reads on the pool, no more than `ahead` of them waiting; the first failure is raised when nothing runs any more."""
    todo = iter(reads)
    waiting = [pool.submit(carry_out, files, codec, *of_one) for of_one in islice(todo, ahead)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [pool.submit(carry_out, files, codec, *of_one) for of_one in islice(todo, 1)]


def reads_of(where: str, target: ShardedTensor, entry: Entry) -> Iterator[BlockRead]:
    """What fills `target`, proved to hold each of its elements exactly once."""
    met = [(piece, shared) for piece in entry.pieces if (shared := intersect(piece.box, target.box))]
    fault = tiling_fault(target.box, [shared for _, shared in met])
    if fault:
        raise CheckpointError(f"{where}: {entry.name}: the stored pieces do not fill it: {fault}")
    for piece, wanted in met:
        for box, block in zip(block_boxes(piece.box, piece.block), piece.blocks, strict=True):
            shared = intersect(box, wanted)
            if shared:
                yield BlockRead(target=target, entry=entry, rank=piece.rank, block=block, box=box, shared=shared)


@torch.no_grad()
def carry_out(files: Files, codec: Codec, *reads: BlockRead, fetch: Fetch = read_block) -> None:
    """Read the one block that all of `reads` are of, check it, and copy what each wants of it.

    fetch: reads a block that cannot go straight into a target's memory, as `read_block` does.
    Raises CheckpointError, naming tensor, file and the rank that wrote it, where it is not what was written.
    """
    read = reads[0]
    try:
        here = _place(read)
        if codec == "raw" and len(reads) == 1 and _holds_as_stored(here, read):
            content = bytes_of(here)
            files.read_into(read.block.file, read.block.offset, [content])
            _check(content, read.block)
            return
        content = fetch(files, codec, read.entry.dtype, read.block, read.box)
        values = from_bytes(content, read.entry.dtype, read.box.shape)
        for one in reads:
            _place(one).copy_(values[shifted(one.shared, one.box.offset).slices])
    except (CheckpointError, OSError) as error:
        what = error if isinstance(error, CheckpointError) else error.strerror or error
        where = f"{files.address}/{read.block.file}"
        raise CheckpointError(
            f"{where}: {read.entry.name} (written by rank {read.rank}) is damaged: {what}; use another checkpoint of this run"
        ) from error


def _place(read: BlockRead) -> Tensor:
    """Where in its target's memory it goes."""
    return read.target.data[shifted(read.shared, read.target.box.offset).slices]


def _holds_as_stored(here: Tensor, read: BlockRead) -> bool:
    """Whether the whole block may go straight into the target's memory."""
    return (
        read.shared == read.box
        and here.device.type == "cpu"
        and here.is_contiguous()
        and dtype_name(here) == read.entry.dtype
    )


def _check(content: np.ndarray, block: Block) -> None:
    found = crc32c(content)
    if found != block.crc32c:
        raise CheckpointError(
            f"the {block.size} bytes from byte {block.offset} have checksum {found:08x} instead of {block.crc32c:08x}"
        )
