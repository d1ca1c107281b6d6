"""A Hugging Face folder as a Source: canonical tensors, of which any box is read without building a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from ckpt.declared import CONFIG, Ahead, open_declared
from ckpt.huggingface import other_files
from ckpt.shards import KnownScales
from ckpt.source import MODEL_PREFIX, Described, Form
from ckpt.store.safetensors import INDEX
from ckpt.translate import read_state
from core.config.architecture import ModelConfig
from core.state.box import Box


class PublishedSource:
    """The model in `folder`; its files stay open until `close`. mtp, expected and errors: as for `load_pretrained`.

    Element types are those in which the tensors are stored: float32 for float8 in blocks, and where parts of one tensor are stored
    differently the narrowest type that holds all of them.
    """

    def __init__(self, folder: str | Path, *, mtp: Ahead = "as_stored", expected: ModelConfig | None = None) -> None:
        self.folder = Path(folder)
        with ExitStack() as files:
            self._declared = files.enter_context(open_declared(self.folder, mtp, expected))
            stored = self._declared.opened.stored
            self._scales = KnownScales(self.folder, stored)
            files.callback(self._scales.close)
            self._files = files.pop_all()
        self._rules, self._choice, shapes = self._declared.rules, self._declared.choice, self._declared.shapes
        self._forms = {
            MODEL_PREFIX + name: Form(shape=shapes[name], dtype=self._dtype(names))
            for name, names in self._declared.sources().items()
        }

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor."""
        return self._forms

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box`; of the files only what lies in it is read. Raises CheckpointError where a value is not a number, and where
        a published copy of a tensor differs from it."""
        form, where = self._forms[name], (self._rules, self._choice, self._declared.opened.read)
        return read_state(name.removeprefix(MODEL_PREFIX), form.shape, box, getattr(torch, form.dtype), where)

    def known_scales(self, published: str) -> Tensor | None:
        """The block scales with which a published tensor is stored, None for one that has none."""
        return self._scales.read(published)

    def describe(self) -> Described:
        """The model, its config.json, and the files beside it; among them config.json as it stands, and the index, which says in
        which file each tensor is and which copies there are; one is made up for a folder of one file."""
        declared = self._declared
        placed = {name: tensor.file for name, tensor in sorted(declared.opened.stored.items())}
        index = declared.opened.index_text or json.dumps({"weight_map": placed})
        assets = {path.name: path.read_bytes() for path in other_files(self.folder)} | {INDEX: index.encode()}
        assets |= {} if declared.text is None else {CONFIG: declared.text.encode()}
        return Described(family=declared.family.name, model=declared.model, published=declared.config, assets=assets)

    def close(self) -> None:
        """Close its files; no tensor can be read any more."""
        self._files.close()

    def _dtype(self, names: list[str]) -> str:
        """The dtype of a canonical tensor that is read from these published ones."""
        found = {self._declared.opened.tensors[name] for name in names}
        # Numbers of eight bits without scales are values as they are, which bfloat16 holds.
        dtypes = [torch.float32 if t.scale else torch.bfloat16 if t.dtype.itemsize == 1 else t.dtype for t in found]
        return str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
