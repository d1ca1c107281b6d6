"""Folders of safetensors files: read lazily by box, float8 blocks brought to float32 on the way; written in shards of bounded size."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.errors import CheckpointError, RequestError
from core.state.box import Box, whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
# DeepSeek-V3 scales its float8 weights in blocks of 128 x 128; blocks at the right and bottom edge are cut.
BLOCK = 128
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a folder: the file that holds it, its shape and its dtype there; `scale` names its block scales, if any."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: str | None = None


class Folder:
    """An open folder. `tensors`: by published name, without block scales. `metadata`: what each file's header says beside.
    `index_text`: its index as it stands, None for a folder of one file."""

    def __init__(self, path: Path, handles: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
        self.path = path
        index = path / INDEX
        self.index_text = index.read_text(encoding="utf-8") if index.is_file() else None
        self.metadata = {file: dict(handle.metadata() or {}) for file, handle in handles.items()}
        self.tensors = {name: tensor for name, tensor in stored.items() if not _is_scale(name, stored)}
        self._handles = handles
        self._stored = stored

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The piece `box` (None: all) of a tensor: in its own dtype, or in float32 where it has block scales."""
        tensor = self._stored[name]
        box = box or whole(tensor.shape)
        data = self._slice(name, box)
        if tensor.scale is None:
            return data
        low = tuple(o // BLOCK for o in box.offset)
        high = tuple(-(-(o + s) // BLOCK) for o, s in zip(box.offset, box.shape, strict=True))
        blocks = Box(offset=low, shape=tuple(h - l for l, h in zip(low, high, strict=True)))
        return dequantise(data, self._slice(tensor.scale, blocks), skip=tuple(o % BLOCK for o in box.offset))

    def _slice(self, name: str, box: Box) -> Tensor:
        handle = self._handles[self._stored[name].file]
        try:
            return handle.get_slice(name)[box.slices] if box.shape else handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.path / self._stored[name].file}: tensor {name} cannot be read: {error}"
            ) from error


def dequantise(data: Tensor, scale: Tensor, *, skip: tuple[int, ...] = (0, 0)) -> Tensor:
    """data [rows, columns] float8 times the scale of its 128 x 128 block, in float32.

    scale: [row blocks, column blocks] float32 of the blocks that data touches; `skip`: rows and columns by which data starts
    inside its first block.
    """
    rows, columns = data.shape
    column_block = (torch.arange(columns) + skip[1]) // BLOCK
    out = data.to(torch.float32)
    for block in range(scale.shape[0]):
        band = slice(max(0, block * BLOCK - skip[0]), min(rows, (block + 1) * BLOCK - skip[0]))
        out[band] *= scale[block].to(torch.float32)[column_block]
    return out


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """The folder's tensors, nothing of which is read yet.

    Raises CheckpointError with every file that is missing or damaged, every tensor that its file does not hold, every dtype
    that the zoo cannot read, and every block scale of a wrong shape.
    """
    files, placed = _files(path)
    faults: list[str] = []
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for file in files:
            try:
                handles[file] = stack.enter_context(safe_open(path / file, framework="pt"))
            except FileNotFoundError:
                faults.append(f"{file} is missing; fetch it again")
            except (SafetensorError, OSError) as error:
                faults.append(f"{file} is damaged or cut short ({error}); fetch it again")
        stored = _contents(handles, placed, faults)
        stored = {name: _with_scale(name, stored, faults) for name in stored}
        if faults:
            raise CheckpointError("\n".join([f"{path} cannot be read:", *(f"  {fault}" for fault in faults)]))
        yield Folder(path, handles, stored)


def plan_shards(sizes: Sequence[tuple[str, int]], shard_bytes: int) -> list[tuple[str, ...]]:
    """Tensor names, given with their bytes, in consecutive shards of at most `shard_bytes`, or of one larger tensor."""
    shards: list[list[str]] = []
    filled = shard_bytes
    for name, size in sizes:
        if not shards or filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return [tuple(shard) for shard in shards]


def shard_name(number: int, count: int) -> str:
    """The file name of shard `number` (from 0) of `count`, as published folders have it."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One file, on the disk when this returns. Raises CheckpointError where it cannot be written."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def write_index(path: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """The index that says which file holds each tensor (`files`: by tensor name)."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_free(target: Path, *, overwrite: bool) -> None:
    """Raises RequestError if `target` holds something that must not be replaced."""
    if target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file; name a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise RequestError(f"{target} is not empty; name another folder, or pass overwrite=True to replace it")


def begin(target: Path) -> Path:
    """A new empty folder beside `target`, to be filled and then put in its place by `commit`. Raises CheckpointError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target.parent} cannot be written: {error}") from error


def commit(partial: Path, target: Path) -> None:
    """Put the finished folder in place of `target`; what stood there is removed only afterwards."""
    partial.chmod(0o755)
    old = None
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        target.rename(old / "replaced")
    partial.rename(target)
    if old is not None:
        shutil.rmtree(old)


def _files(path: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The folder's files, and where an index exists the file of every tensor."""
    index = path / INDEX
    if not index.is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; only safetensors weights are read")
        return (SINGLE,), None
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = tuple(sorted(set(placed.values())))
        outside = [file for file in files if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside)}")
    return files, placed


def _contents(handles: Mapping[str, Any], placed: Mapping[str, str] | None, faults: list[str]) -> dict[str, Stored]:
    """Every tensor of the open files; what the index and the files say differently is a fault."""
    stored: dict[str, Stored] = {}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 -- a handle is no mapping
            view = handle.get_slice(name)
            dtype = _DTYPES.get(view.get_dtype())
            if dtype is None:
                faults.append(f"{file}: {name} has dtype {view.get_dtype()}, which is none of {', '.join(_DTYPES)}")
            elif name in stored:
                faults.append(f"{name} stands in {stored[name].file} and again in {file}")
            else:
                stored[name] = Stored(file=file, shape=tuple(view.get_shape()), dtype=dtype)
    for name, file in (placed or {}).items():
        if file in handles and (name not in stored or stored[name].file != file):
            faults.append(f"{file} does not hold {name}, which the index puts there")
    return stored


def _is_scale(name: str, stored: Mapping[str, Stored]) -> bool:
    return name.endswith(SCALE) and name.removesuffix(SCALE) in stored


def _with_scale(name: str, stored: Mapping[str, Stored], faults: list[str]) -> Stored:
    """The tensor with its block scales, if the folder has some for it: only their presence tells."""
    tensor, scale = stored[name], stored.get(name + SCALE)
    if scale is None:
        return tensor
    expected = tuple(-(-size // BLOCK) for size in tensor.shape)
    if len(tensor.shape) != 2 or scale.shape != expected:
        faults.append(
            f"{name}{SCALE} has shape {list(scale.shape)}, but {list(tensor.shape)} has {list(expected)} blocks"
        )
    elif tensor.dtype != torch.float8_e4m3fn:
        faults.append(f"{name} has block scales but dtype {tensor.dtype}, not float8_e4m3fn")
    return Stored(file=tensor.file, shape=tensor.shape, dtype=tensor.dtype, scale=name + SCALE)
