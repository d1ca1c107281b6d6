"""What lies at an address: a checkpoint of the zoo, a run with checkpoints, a published folder, a GGUF file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.files.url import is_remote
from ckpt.manifest import MANIFEST, PARTIAL
from ckpt.shelf.address import latest
from core.config.family import all_families
from core.errors import CheckpointError, RequestError

CONFIG = "config.json"
METADATA = ".metadata"
RUN_FILE = "run.json"
GGUF_MAGIC = b"GGUF"
WORKS = (
    "Works: a checkpoint of the zoo, the folder or URL of a run, a Hugging Face folder with safetensors, a GGUF file, "
    "or a folder of torch.distributed.checkpoint"
)

Kind = Literal["checkpoint", "published", "gguf", "torch_dist"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is there. checkpoint: of the zoo, in either store. published: a Hugging Face folder. torch_dist: one that the zoo did not write.

    run: the run of which `address` is the latest checkpoint, None where the checkpoint itself was named.
    """

    kind: Kind
    address: str
    run: str | None = None


def recognise(address: Address) -> Found:
    """What lies at `address`; of a run its latest checkpoint.

    Raises RequestError where there is nothing, or nothing that is known, CheckpointError for what is left of a checkpoint.
    """
    where = str(address)
    if not is_remote(address) and Path(address).is_file():
        return _file(Path(address))
    names = _names(address)
    if not names:
        raise RequestError(f"{where}: there is nothing. {WORKS}.")
    if MANIFEST in names:
        if where.rstrip("/").endswith(PARTIAL):
            raise CheckpointError(f"{where}: this checkpoint is half-written. Use another one of the same run.")
        return Found(kind="checkpoint", address=where)
    if "checkpoints" in names or RUN_FILE in names:
        shelf = _shelf_of(where) if RUN_FILE in names and not is_remote(address) else where
        newest = latest(shelf)
        if newest is None:
            raise CheckpointError(f"{shelf}: this run has no complete checkpoint. Train on, or give another run.")
        return Found(kind="checkpoint", address=newest, run=where)
    return Found(kind=_other(where, names), address=where)


def _shelf_of(run: str) -> str:
    """Where the run in a folder keeps its checkpoints: what its run.json says, or in the folder itself."""
    path = Path(run) / RUN_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))["run"]["checkpoint"].get("address") or run
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is damaged: {error!r}. Give one of the run's checkpoints instead.") from error


def model_type_of(folder: Path) -> str:
    """What a published folder calls its architecture. Raises CheckpointError where its config.json says nothing."""
    path = folder / CONFIG
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: does not say which model it is of, in a field model_type: {error!r}."
        ) from error


def family_of(folder: Path) -> str | None:
    """The family of the zoo whose published folders are like this one, None for any other model."""
    model_type = model_type_of(folder)
    return next((family.name for family in all_families() if family.model_type == model_type), None)


def _file(path: Path) -> Found:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
            return Found(kind="gguf", address=str(path))
    hint = " Give the folder that it lies in." if path.suffix == ".safetensors" or path.name == MANIFEST else ""
    raise RequestError(f"{path}: this file is no checkpoint.{hint} {WORKS}.")


def _other(where: str, names: set[str]) -> Kind:
    """What a folder is that has no manifest."""
    if where.rstrip("/").endswith(PARTIAL):
        raise CheckpointError(f"{where}: this checkpoint is half-written. Use another one of the same run.")
    if CONFIG in names:
        return "published"
    if METADATA in names:
        return "torch_dist"
    if names & {"tensors", "pieces"} and "zarr.json" in names:
        raise CheckpointError(f"{where}: this checkpoint is damaged: its {MANIFEST} is missing.")
    raise RequestError(f"{where}: this is no checkpoint. {WORKS}.")


def _names(address: Address) -> set[str]:
    """The files and folders at the top of an address."""
    if is_remote(address):
        return {path.partition("/")[0] for path in open_files(address).sizes()}
    try:
        return {entry.name for entry in Path(address).iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise RequestError(f"{address}: cannot be read: {error.strerror or error}.") from error


def identity(found: Found) -> str:
    """Changes whenever what is there does: of a checkpoint its manifest, which has the checksum of every byte; else sizes and times."""
    files = open_files(found.address)
    if found.kind == "checkpoint":
        return hashlib.blake2b(files.read(MANIFEST), digest_size=16).hexdigest()
    if is_remote(found.address):
        return json.dumps(sorted(files.sizes().items()))
    path = Path(found.address)
    inside = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return json.dumps([(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in inside])
