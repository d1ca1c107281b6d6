"""A dense model as a source: canonical tensors that are read by box from whatever it was published as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.dense.gguf_file import open_gguf
from ckpt.dense.gguf_head import MAGIC
from ckpt.dense.published import Published, folder_rules, read_config
from ckpt.source import MODEL_PREFIX, Described, Form
from ckpt.store.safetensors import Stored, open_folder
from core.check import check_model
from core.config.architecture import ModelConfig
from core.errors import CheckpointError, RequestError
from core.parallel.groups import one_rank
from core.state.box import Box
from core.state.inventory import inventory
from core.state.rules import Choice, choose, match, pieces
from core.transformer.stage import build_model

CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class DenseSource:
    """A dense model of llama's shape under canonical names (`model.layers.0.mlp.gate_up`, …): a Source (ckpt/source.py).

    Element types are those in which the tensors are stored: float32 for what is quantised, and where parts of one tensor are
    stored differently the narrowest type that holds all of them.
    """

    def __init__(self, published: Published, choice: Choice, files: ExitStack) -> None:
        self._published = published
        self._files = files
        self._choice = choice
        shapes = canonical_shapes(published.model)
        self._forms = {MODEL_PREFIX + name: self._form(name, shape) for name, shape in shapes.items()}
        self._described: Described | None = None

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor."""
        return self._forms

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box`; of the file only what lies in it is read. Raises CheckpointError where a value is not a number, and where
        a published copy of a tensor differs from it."""
        canonical, form = name.removeprefix(MODEL_PREFIX), self._forms[name]
        out = torch.empty(box.shape, dtype=getattr(torch, form.dtype))
        if not box.elements:
            return out
        _, numbers = match(self._published.rules, canonical)
        for piece in pieces(self._choice.forms[canonical], numbers, form.shape, box):
            inside = tuple(
                slice(i - o, i - o + s)
                for i, o, s in zip(piece.target.offset, box.offset, piece.target.shape, strict=True)
            )
            out[inside] = self._published.read(piece.name, piece.box).view(piece.target.shape)
        # A maximum is no number where any of its elements is none, and takes a tenth of the time of looking at each.
        if out.amax().isnan():
            raise CheckpointError(
                f"{self._published.path}: {canonical} has values that are not numbers: damaged weights"
            )
        for copy in self._choice.copies[canonical]:
            if not torch.equal(self._published.read(copy, box).to(out.dtype), out):
                raise CheckpointError(
                    f"{self._published.path}: {copy} should be a copy of what {canonical} is read from, but differs"
                )
        return out

    def describe(self) -> Described:
        """The dense model, its config.json, and the files that came with it."""
        if self._described is None:
            p = self._published
            self._described = Described(family=None, model=p.model, published=p.config, assets=p.assets())
        return self._described

    def close(self) -> None:
        """Close its files; no tensor can be read any more."""
        self._files.close()

    def _form(self, name: str, shape: tuple[int, ...]) -> Form:
        _, numbers = match(self._published.rules, name)
        found = {self._published.dtypes[piece.name] for piece in pieces(self._choice.forms[name], numbers, shape)}
        return Form(shape=shape, dtype=str(reduce(torch.promote_types, found)).removeprefix("torch."))


def open_dense(path: str | Path) -> DenseSource:
    """The dense model at `path`: a folder of Hugging Face (config.json, safetensors in one file or several), or a GGUF file.

    Its files stay open until `close`. Raises RequestError where it is no such model, CheckpointError where its tensors are not those
    that it declares; all faults at once, before any tensor is read.
    """
    path = Path(path)
    with ExitStack() as files:
        if path.is_dir():
            published = _open_folder(path, files)
        elif _is_gguf(path):
            published = open_gguf(path)
        else:
            raise RequestError(f"{path} is neither a model folder with a {CONFIG} nor a GGUF file")
        _check(published)
        choice = choose(published.rules, canonical_shapes(published.model), published.shapes)
        if choice.faults:
            lines = [f"{path} does not hold the tensors of the dense model that it declares:"]
            raise CheckpointError("\n".join([*lines, *(f"  {line}" for line in choice.faults.lines())]))
        return DenseSource(published, choice, files.pop_all())


def canonical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The canonical tensors of a whole model, without prefix, from its real modules."""
    whole = build_model(model, groups=one_rank(), device="meta")
    return {name: tensor.shape for name, tensor in inventory(whole, one_rank()).items()}


def _open_folder(path: Path, files: ExitStack) -> Published:
    config = _read_config(path)
    model = read_config(config, str(path / CONFIG))
    opened = files.enter_context(open_folder(path))
    return Published(
        path=path,
        model=model,
        config=config,
        rules=folder_rules(model),
        shapes={name: stored.shape for name, stored in opened.tensors.items()},
        dtypes={name: _read_as(stored) for name, stored in opened.tensors.items()},
        read=opened.read,
        assets=lambda: _other_files(path),
    )


def _check(published: Published) -> None:
    """Raises RequestError with every fault of an impossible model."""
    # That a vocabulary must hold all bytes is a rule of training from text.
    small = published.model.vocab >= 1
    faults = [fault for fault in check_model(published.model) if fault.setting != "model.vocab" or not small]
    if faults:
        lines = [f"{published.path} declares no possible model:", *(f"  {fault}" for fault in faults)]
        raise RequestError("\n".join(lines))


def _read_config(folder: Path) -> dict[str, Any]:
    """The fields of the folder's config.json."""
    path = folder / CONFIG
    if not path.is_file():
        found = ", ".join(sorted(file.name for file in folder.glob("*.gguf")))
        advice = f"give the path of one of its GGUF files: {found}" if found else "give a folder that holds a model"
        raise RequestError(f"{folder} holds no {CONFIG}; {advice}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds a {type(config).__name__}, where an object of fields belongs")
    return config


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _read_as(stored: Stored) -> torch.dtype:
    """What a tensor of a folder is read in: float8 means nothing without a scale, so it is never kept."""
    return torch.float32 if stored.dtype.itemsize == 1 else stored.dtype


def _other_files(folder: Path) -> dict[str, bytes]:
    """What came with the weights: tokenizer, generation settings, licence."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != CONFIG)
    return {path.name: path.read_bytes() for path in files if not path.name.endswith(_WEIGHTS)}
