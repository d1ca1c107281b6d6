"""Opens whatever lies at an address as a Source, in a way that other processes can repeat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt.declared import Ahead
from ckpt.dense.source import open_dense
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.manifest import Manifest
from ckpt.published import PublishedSource
from ckpt.recognise import Found, family_of, identity, model_type_of, recognise
from ckpt.source import Source
from ckpt.stored import CheckpointSource
from ckpt.stream import Opener
from core.config.family import all_families


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source and how to open it again. manifest: what the zoo, or torch, says of its pieces; None where it is no checkpoint.

    identity: changes whenever what is there does.
    """

    found: Found
    source: Source
    opener: Opener
    identity: str
    manifest: Manifest | None


def open_any(address: Address, mtp: Ahead = "as_stored") -> Opened:
    """What lies at an address, opened. mtp: of a published folder, as for `load_pretrained`.

    Raises RequestError where there is nothing that can be read, CheckpointError where it is damaged.
    """
    found = recognise(address)
    told = identity(found)
    if found.kind == "checkpoint":
        source = CheckpointSource(found.address)
        # Others need not read and check the manifest again.
        opener = partial(CheckpointSource, found.address, source.manifest)
        return Opened(found=found, source=source, opener=opener, identity=told, manifest=source.manifest)
    if found.kind == "torch_dist":
        # torch's distributed checkpoints take more than a second to import, which nobody else should wait for.
        from ckpt.store.torch_folder import manifest_of_torch_dist

        manifest = manifest_of_torch_dist(open_files(found.address))
        foreign = partial(CheckpointSource, found.address, manifest)
        return Opened(found=found, source=foreign(), opener=foreign, identity=told, manifest=manifest)
    published: Opener = partial(open_published, Path(found.address), mtp)
    return Opened(found=found, source=published(), opener=published, identity=f"{told} mtp={mtp}", manifest=None)


def open_published(path: Path, mtp: Ahead) -> Source:
    """A Hugging Face folder of a model of the zoo or of a dense one, or a GGUF file."""
    if path.is_dir() and (family_of(path) is not None or not _is_dense(path)):
        return PublishedSource(path, mtp=mtp)
    return open_dense(path)


def _is_dense(folder: Path) -> bool:
    """Whether a folder says that it is one of the dense models that a family is akin to."""
    kins = {kin.model_type for family in all_families() for kin in family.dense}
    return model_type_of(folder) in kins
