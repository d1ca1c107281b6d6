"""A Hugging Face folder as it describes itself: which family, which model, and where each tensor of it stands. No weight is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt.store.safetensors import Folder, open_folder
from core.check import check_model
from core.config.architecture import ModelConfig
from core.config.difference import config_differences
from core.config.family import Family, all_families, find_family
from core.config.written import written_config
from core.errors import CheckpointError, ConfigError, RequestError
from core.parallel.groups import one_rank
from core.state.inventory import declared
from core.state.rules import Choice, Derived, Rule, Shape, choose, match, pieces
from core.state.spec import TensorSpec
from core.transformer.stage import build_model

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
_log = logging.getLogger(__name__)

Ahead = Literal["as_stored", "keep", "drop"]
Rules = tuple[Rule | Derived, ...]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """An open folder and the model in it: with its prediction modules or without, as was asked.

    shapes: its canonical tensors. choice: where these stand in the folder. config: config.json as far as it still holds, 0 for
    prediction modules that were left out; text: the file itself, None where not all of it holds.
    """

    family: Family
    model: ModelConfig
    shapes: Mapping[str, Shape]
    choice: Choice
    opened: Folder
    config: Mapping[str, Any]
    text: str | None

    @property
    def rules(self) -> Rules:
        """Between the canonical tensors and the folder's."""
        return self.family.huggingface.rules(self.model)

    def dtypes(self) -> dict[str, torch.dtype]:
        """What each canonical tensor is stored in: that of its first published tensor."""
        return {name: self.opened.tensors[names[0]].dtype for name, names in self.sources().items()}

    def sources(self) -> dict[str, list[str]]:
        """The published tensors that each canonical tensor is read from."""
        return {name: list(names) for name, names in _sources(self.rules, self.choice, self.shapes)}


@contextmanager
def open_declared(folder: Path, mtp: Ahead, expected: ModelConfig | None = None) -> Iterator[Declared]:
    """The model in `folder`, its files open. mtp, expected: as for `load_pretrained`, and so are the errors."""
    text, config = _read_config(folder)
    family = _family_of(folder, config)
    model = _declared_model(folder, family, config)
    with open_folder(folder) as opened:
        loaded, shapes, choice = _choose(family, model, opened, mtp)
        differences = () if expected is None else config_differences(loaded, expected)
        if differences:
            lines = [f"{folder / CONFIG} declares another model than the one that is to be loaded:"]
            raise RequestError("\n".join([*lines, *(f"  {line}" for line in differences)]))
        kept = dict(config) | (_changes(family, model, loaded) if mtp == "drop" else {})
        yield Declared(
            family=family,
            model=loaded,
            shapes=shapes,
            choice=choice,
            opened=opened,
            config=kept,
            text=text if kept == config else None,
        )


def family_for(model: ModelConfig, name: str | None) -> Family:
    """The family called `name`, or the only one whose config.json can express `model`."""
    if name is not None:
        return find_family(name)
    able = []
    for family in all_families():
        try:
            written_config(family, model)
        except RequestError:
            continue
        able.append(family)
    if len(able) != 1:
        works = " or ".join(family.name for family in able) or "none; save it as a checkpoint of the zoo"
        raise RequestError(
            f"family=None: {len(able)} families of the zoo can express this model, not one. Works: {works}"
        )
    return able[0]


def canonical_shapes(model: ModelConfig) -> dict[str, Shape]:
    """The canonical tensors of the whole model, from its real modules."""
    return {name: spec.shape for name, spec in canonical_specs(model).items()}


def canonical_specs(model: ModelConfig) -> dict[str, TensorSpec]:
    """What the modules of the whole model say of its tensors, by canonical name."""
    whole = build_model(model, groups=one_rank(), device="meta")
    return {name: entry.spec for name, entry in declared(whole).items()}


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The text and the fields of the folder's config.json."""
    if not folder.is_dir():
        raise RequestError(
            f"{folder} is not a folder; give the folder of a model with a {CONFIG} and safetensors files"
        )
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} holds no {CONFIG}, so it is no model folder; give one that does")
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds a {type(config).__name__}, where an object of fields belongs")
    return text, config


def _family_of(folder: Path, config: Mapping[str, Any]) -> Family:
    """The family whose published folders carry the model_type of this one."""
    families = all_families()
    for family in families:
        if family.model_type == config.get("model_type"):
            return family
    works = ", ".join(family.model_type for family in families)
    raise RequestError(
        f"{folder / CONFIG}: model_type={config.get('model_type')!r} is not a model of the zoo. Works: {works}"
    )


def _declared_model(folder: Path, family: Family, config: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json declares, checked. Raises RequestError with every fault."""
    try:
        model = family.huggingface.read_config(config)
    except ConfigError as error:
        raise RequestError(
            "\n".join([f"{folder} cannot be loaded:", *(f"  {fault}" for fault in error.faults)])
        ) from error
    # Any vocabulary can be loaded; that it must hold all bytes is a rule of training from text.
    faults = [fault for fault in check_model(model) if fault.setting != "model.vocab" or model.vocab < 1]
    if faults:
        raise RequestError("\n".join([f"{folder / CONFIG} declares no possible model:", *(f"  {f}" for f in faults)]))
    return model


def _choose(
    family: Family, said: ModelConfig, opened: Folder, mtp: Ahead
) -> tuple[ModelConfig, dict[str, Shape], Choice]:
    """The model to build, with its prediction modules or without, its tensors, and where these stand in the folder."""
    found = {name: stored.shape for name, stored in opened.tensors.items()}
    model, ahead, shapes = said, set[str](), canonical_shapes(said)
    if said.predict_ahead and mtp != "keep":
        without = replace(said, predict_ahead=None)
        fewer = canonical_shapes(without)
        ahead = _names(family, said, shapes, found) - _names(family, without, fewer, found)
        if mtp == "drop" or not ahead & set(found):
            model, shapes = without, fewer
            if mtp != "drop":
                _log.warning(
                    "%s holds no multi-token prediction modules; the model is loaded without them", opened.path
                )
        else:
            ahead = set()
    choice = choose(family.huggingface.rules(model), shapes, {n: s for n, s in found.items() if n not in ahead})
    if choice.faults:
        lines = [f"{opened.path} does not hold the weights that its {CONFIG} declares:"]
        lines += [f"  {line}" for line in choice.faults.lines()]
        if model.predict_ahead:
            lines.append('  To leave the multi-token prediction modules out: mtp="drop"')
        raise CheckpointError("\n".join(lines))
    return model, shapes, choice


def _names(family: Family, model: ModelConfig, shapes: Mapping[str, Shape], found: Mapping[str, Shape]) -> set[str]:
    """Every published name that `model` is read from, optional copies that are there included."""
    rules = family.huggingface.rules(model)
    choice = choose(rules, shapes, found)
    copies = {copy for names in choice.copies.values() for copy in names}
    return copies.union(*(names for _, names in _sources(rules, choice, shapes)))


def _sources(rules: Rules, choice: Choice, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, list[str]]]:
    """Each canonical tensor and the published tensors that it is read from."""
    for name, shape in shapes.items():
        _, numbers = match(rules, name)
        yield name, [piece.name for piece in pieces(choice.forms[name], numbers, shape)]


def _changes(family: Family, said: ModelConfig, loaded: ModelConfig) -> dict[str, Any]:
    """The fields of config.json by which the loaded model differs from the declared one."""
    before, after = family.huggingface.write_config(said), family.huggingface.write_config(loaded)
    return {name: value for name, value in after.items() if before.get(name) != value}
