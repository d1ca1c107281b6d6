"""Opens whatever lies at an address as a Source, in a way that other processes can repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ckpt.declared import Ahead
from ckpt.dense.source import open_dense
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.manifest import Manifest, read_manifest
from ckpt.published import PublishedSource
from ckpt.recognise import Found, family_of, identity, model_type_of, recognise
from ckpt.reshard import canonical
from ckpt.source import Described, Form, Source
from ckpt.stored import CheckpointSource
from ckpt.stream import Opener
from core.config.family import all_families, find_family
from core.state.box import Box


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
    """What lies at an address, opened. mtp: as for `load_pretrained`; `drop` leaves prediction modules out of a checkpoint too.

    Raises RequestError where there is nothing that can be read, CheckpointError where it is damaged.
    """
    found = recognise(address)
    told = identity(found)
    if found.kind in ("checkpoint", "torch_dist"):
        manifest = _manifest(found)
        # Other processes need not read and check the manifest again.
        opener: Opener = partial(CheckpointSource, found.address, manifest)
        if mtp == "drop":
            opener = partial(without_ahead, opener)
        return Opened(found=found, source=opener(), opener=opener, identity=f"{told} mtp={mtp}", manifest=manifest)
    published: Opener = partial(open_published, Path(found.address), mtp)
    return Opened(found=found, source=published(), opener=published, identity=f"{told} mtp={mtp}", manifest=None)


class WithoutAhead:
    """A source without its multi-token prediction modules, and without the optimizer states of these."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor that is left."""
        return {name: form for name, form in self._source.forms.items() if not canonical(name).startswith("mtp.")}

    def read(self, name: str, box: Box) -> Tensor:
        """As the source."""
        return self._source.read(name, box)

    def describe(self) -> Described | None:
        """The model without the modules; of a config.json that came with it, the fields that say so are changed."""
        found = self._source.describe()
        if found is None or found.model.predict_ahead is None:
            return found
        model, published = replace(found.model, predict_ahead=None), found.published
        if published is not None and found.family is not None:
            write = find_family(found.family).huggingface.write_config
            before, after = write(found.model), write(model)
            published = {**published, **{k: v for k, v in after.items() if before.get(k) != v}}
        return replace(found, model=model, published=published)


def without_ahead(opener: Opener) -> WithoutAhead:
    """For a process of its own."""
    return WithoutAhead(opener())


def _manifest(found: Found) -> Manifest:
    files = open_files(found.address)
    if found.kind == "checkpoint":
        return read_manifest(files)
    # torch's distributed checkpoints take more than a second to import, which nobody else should wait for.
    from ckpt.store.torch_folder import manifest_of_torch_dist

    return manifest_of_torch_dist(files)


def open_published(path: Path, mtp: Ahead) -> Source:
    """A Hugging Face folder of a model of the zoo or of a dense one, or a GGUF file."""
    if path.is_dir() and (family_of(path) is not None or not _is_dense(path)):
        return PublishedSource(path, mtp=mtp)
    return open_dense(path)


def _is_dense(folder: Path) -> bool:
    """Whether a folder says that it is one of the dense models that a family is akin to."""
    kins = {kin.model_type for family in all_families() for kin in family.dense}
    return model_type_of(folder) in kins
