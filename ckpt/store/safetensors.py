"""Folders of safetensors files: read by box, float8 blocks brought to float32 on the way; what else a new folder needs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ckpt.float8 import BLOCK, SCALE, dequantise, scale_shape
from ckpt.store.tensorfile import DTYPES, TensorFile
from core.errors import CheckpointError, RequestError
from core.state.box import Box, whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a folder: the file that holds it, its shape and its dtype there; `scale` names its block scales, if any."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: str | None = None


class Folder:
    """An open folder. `tensors`: by published name, without block scales; `stored`: with them. `metadata`: what each file's header
    says beside. `index_text`: its index as it stands, None for a folder of one file."""

    def __init__(self, path: Path, files: Mapping[str, TensorFile], stored: Mapping[str, Stored]) -> None:
        self.path = path
        index = path / INDEX
        self.index_text = index.read_text(encoding="utf-8") if index.is_file() else None
        self.metadata = {name: file.metadata for name, file in files.items()}
        self.stored = stored
        self.tensors = {name: tensor for name, tensor in stored.items() if not _is_scale(name, stored)}
        self._files = files

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The piece `box` (None: all) of a tensor: in its own dtype, or in float32 where it has block scales."""
        tensor = self.stored[name]
        box = box or whole(tensor.shape)
        data = self._files[tensor.file].read(name, box)
        if tensor.scale is None:
            return data
        low = tuple(o // BLOCK for o in box.offset)
        high = tuple(-(-(o + s) // BLOCK) for o, s in zip(box.offset, box.shape, strict=True))
        blocks = Box(offset=low, shape=tuple(h - l for l, h in zip(low, high, strict=True)))
        scale = self._files[self.stored[tensor.scale].file].read(tensor.scale, blocks)
        return dequantise(data, scale, skip=tuple(o % BLOCK for o in box.offset))


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """The folder's tensors, nothing of which is read yet.

    Raises CheckpointError with every file that is missing or damaged, every tensor that its file does not hold, every dtype
    that the zoo cannot read, and every block scale of a wrong shape.
    """
    names, placed = _files(path)
    faults: list[str] = []
    with ExitStack() as stack:
        files: dict[str, TensorFile] = {}
        for name in names:
            try:
                files[name] = stack.enter_context(closing(TensorFile(path / name)))
            except FileNotFoundError:
                faults.append(f"{name} is missing; fetch it again")
            except (ValueError, OSError) as error:
                faults.append(f"{name} is damaged or cut short ({error}); fetch it again")
        stored = _contents(files, placed, faults)
        stored = {name: _with_scale(name, stored, faults) for name in stored}
        if faults:
            raise CheckpointError("\n".join([f"{path} cannot be read:", *(f"  {fault}" for fault in faults)]))
        yield Folder(path, files, stored)


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


def index_text(files: Mapping[str, str], total_bytes: int) -> str:
    """The index that says which file holds each tensor (`files`: by tensor name)."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2) + "\n"


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


def _contents(
    files: Mapping[str, TensorFile], placed: Mapping[str, str] | None, faults: list[str]
) -> dict[str, Stored]:
    """Every tensor of the open files; what the index and the files say differently is a fault."""
    stored: dict[str, Stored] = {}
    for file, opened in files.items():
        for name, tensor in opened.tensors.items():
            dtype = DTYPES.get(tensor.dtype)
            if dtype is None:
                faults.append(f"{file}: {name} has dtype {tensor.dtype}, which is none of {', '.join(DTYPES)}")
            elif name in stored:
                faults.append(f"{name} stands in {stored[name].file} and again in {file}")
            else:
                stored[name] = Stored(file=file, shape=tensor.shape, dtype=dtype)
    for name, file in (placed or {}).items():
        if file in files and (name not in stored or stored[name].file != file):
            faults.append(f"{file} does not hold {name}, which the index puts there")
    return stored


def _is_scale(name: str, stored: Mapping[str, Stored]) -> bool:
    return name.endswith(SCALE) and name.removesuffix(SCALE) in stored


def _with_scale(name: str, stored: Mapping[str, Stored], faults: list[str]) -> Stored:
    """The tensor with its block scales, if the folder has some for it: only their presence tells."""
    tensor, scale = stored[name], stored.get(name + SCALE)
    if scale is None:
        return tensor
    expected = scale_shape(tensor.shape)
    if len(tensor.shape) != 2 or scale.shape != expected:
        faults.append(
            f"{name}{SCALE} has shape {list(scale.shape)}, but {list(tensor.shape)} has {list(expected)} blocks"
        )
    elif tensor.dtype != torch.float8_e4m3fn:
        faults.append(f"{name} has block scales but dtype {tensor.dtype}, not float8_e4m3fn")
    return Stored(file=tensor.file, shape=tensor.shape, dtype=tensor.dtype, scale=name + SCALE)
