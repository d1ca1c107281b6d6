"""What a Source is as a Hugging Face folder: every file of it, before a tensor is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ckpt.declared import CONFIG, QUANTIZATION, canonical_specs, family_for
from ckpt.float8 import SCALE
from ckpt.gather import Format, Output
from ckpt.huggingface import METADATA, config_text, new_config
from ckpt.shards import Layout, plan_layout, plan_of
from ckpt.source import MODEL_PREFIX, Described, Form, Source
from ckpt.store.safetensors import INDEX, index_text
from ckpt.translate import Published, published_plan
from core.config.difference import config_differences
from core.config.family import Family
from core.errors import CheckpointError, RequestError
from core.state.spec import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """How to write a folder. family: None for the source's own, or the only one that can express its model. format and shard_bytes: as
    for `save_pretrained` (format None: as the source has it, bfloat16 for what its folder has in float8). memory_bytes: of all
    processes together."""

    family: str | None = None
    format: Format = None
    shard_bytes: int | None = None
    memory_bytes: int = 2 << 30
    workers: int = 1
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class FolderPlan:
    """A folder to be written: its files of tensors, and the others as they will be, by name."""

    layout: Layout
    others: Mapping[str, bytes] = field(repr=False)

    def file_bytes(self) -> dict[str, int]:
        """The size of every file, headers included: what a dry run shows."""
        tensors = {file: plan_of(outputs, METADATA).bytes for file, outputs in self.layout.files.items()}
        return tensors | {name: len(content) for name, content in self.others.items()}


def plan_folder(source: Source, publishing: Publishing) -> FolderPlan:
    """The folder that `source` will be written as; no tensor is read for it.

    Raises RequestError where the source does not say its model, or no family can express it, CheckpointError where its tensors are
    not those of its model: all missing, unexpected and misshapen ones at once.
    """
    described = source.describe()
    if described is None:
        raise RequestError("the source does not say of which model its tensors are, so it cannot become a model folder")
    family = family_for(described.model, publishing.family or described.family)
    config = _config(family, described)
    specs = canonical_specs(described.model)
    forms = _model_forms(source, specs)
    index = _index(described)
    shapes = {name: form.shape for name, form in forms.items()}
    plan = published_plan(family.huggingface.rules(described.model), shapes)
    outputs = _outputs(plan, (forms, specs), publishing.format, (index, QUANTIZATION in config))
    layout = plan_layout(outputs, index or None, publishing.shard_bytes)
    return FolderPlan(layout=layout, others=_others(layout, described, config))


def _outputs(
    plan: Sequence[Published],
    of: tuple[Mapping[str, Form], Mapping[str, TensorSpec]],
    wanted: Format,
    folder: tuple[Mapping[str, str], bool],
) -> list[Output]:
    """What each published tensor is written as. folder: the index of the source's folder, empty where it came from none, and
    whether that folder is float8."""
    (forms, specs), (index, float8) = of, folder
    stored = {name.removesuffix(SCALE) for name in index if name.endswith(SCALE) and name.removesuffix(SCALE) in index}
    found = []
    for published in plan:
        canonical = published.sources[0].name
        own: torch.dtype = getattr(torch, forms[canonical].dtype)
        blocks = published.name in stored if stored else published.float8
        dtype = own
        if isinstance(wanted, torch.dtype):
            dtype = wanted if specs[canonical].trained else own
        elif specs[canonical].trained and ((blocks and float8) or (wanted == "float8_blocks" and not stored)):
            dtype = torch.bfloat16
        scales = torch.float32 if wanted == "float8_blocks" and blocks else None
        found.append(
            Output(
                published=published,
                names=(published.name, *(copy for copy in published.copies if copy in index)),
                dtype=dtype if scales is None else torch.float8_e4m3fn,
                travels=own,
                scales=scales,
                holders=(),
            )
        )
    return found


def _model_forms(source: Source, specs: Mapping[str, TensorSpec]) -> dict[str, Form]:
    """The canonical tensors of the model in the source. Raises CheckpointError unless they are those of `specs`."""
    forms = {n.removeprefix(MODEL_PREFIX): f for n, f in source.forms.items() if n.startswith(MODEL_PREFIX)}
    faults = [f"missing: {name}" for name in specs if name not in forms]
    faults += [f"unexpected: {name}" for name in forms if name not in specs]
    faults += [
        f"of another shape: {name} {list(forms[name].shape)} instead of {list(spec.shape)}"
        for name, spec in specs.items()
        if name in forms and forms[name].shape != spec.shape
    ]
    if faults:
        shown = [f"  {fault}" for fault in faults[:24]] + (
            [f"  and {len(faults) - 24} more"] if len(faults) > 24 else []
        )
        raise CheckpointError("\n".join(["the source does not hold the tensors of its model:", *shown]))
    return {name: forms[name] for name in specs}


def _config(family: Family, described: Described) -> dict[str, Any]:
    """The config.json of the folder. Raises RequestError, field by field, where the source's own declares another model."""
    if described.published is None:
        return new_config(family, described.model)
    declared = family.huggingface.read_config(described.published)
    if described.model.predict_ahead is None:  # which a folder may declare and not hold
        declared = replace(declared, predict_ahead=None)
    differences = config_differences(declared, described.model)
    if differences:
        lines = [f"the {CONFIG} of the source declares another model than its tensors are of:"]
        raise RequestError("\n".join([*lines, *(f"  {line}" for line in differences)]))
    return dict(described.published)


def _index(described: Described) -> dict[str, str]:
    """The file of every tensor in the folder that the source came from; empty where it came from none."""
    with suppress(KeyError, ValueError, TypeError):
        placed = json.loads(described.assets[INDEX])["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in placed.values()):
            return dict(placed)
    return {}


def _others(layout: Layout, described: Described, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that are none of tensors."""
    found = {name: data for name, data in described.assets.items() if name not in (INDEX, CONFIG)}
    outputs = [output for outputs in layout.files.values() for output in outputs]
    plain = next(output.dtype for output in outputs if output.scales is None)
    text = config_text(config, plain, float8=any(output.scales is not None for output in outputs))
    kept = described.assets.get(CONFIG, b"{}")
    found[CONFIG] = kept if json.loads(kept) == json.loads(text) else text.encode()
    if len(layout.files) > 1:
        kept = described.assets.get(INDEX, b"{}")
        same = layout.as_placed and json.loads(kept).get("metadata", {}).get("total_size") == layout.bytes
        found[INDEX] = kept if same else index_text(layout.placed(), layout.bytes).encode()
    return found
