"""Models from and to Hugging Face folders: config.json, safetensors, and every other file that came with them."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt.agree import each, on_first, together
from ckpt.store.safetensors import (
    INDEX,
    Folder,
    Stored,
    begin,
    check_free,
    commit,
    open_folder,
    plan_shards,
    shard_name,
    write_index,
    write_shard,
)
from ckpt.translate import Export, copy_names, export_state, import_state
from core.check import check_mapping, check_model
from core.config.architecture import ModelConfig
from core.config.family import Family, all_families, find_family
from core.config.mapping import ParallelConfig
from core.errors import CheckpointError, ConfigError, RequestError
from core.parallel.groups import Groups, groups_for, one_rank
from core.pipeline.layout import layout_of
from core.state.inventory import inventory
from core.state.rules import Choice, Derived, Rule, choose, match, pieces
from core.state.sharded import ShardedTensor
from core.transformer.stage import Stage, build_model

CONFIG = "config.json"
SHARD_BYTES = 5_000_000_000
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
_log = logging.getLogger(__name__)

Ahead = Literal["as_stored", "keep", "drop"]
Rules = tuple[Rule | Derived, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model keeps of the folder that it was loaded from, so that saving gives the same folder back.

    config: config.json as far as it still holds: 0 for prediction modules that were left out, no quantisation.
    config_text: the file itself, None where not all of it holds. stored: the folder's tensors by published name.
    dtypes: what each canonical tensor was stored in. metadata: the headers of the files. index_text: their index, if any.
    """

    family: str
    folder: Path
    config: Mapping[str, Any]
    config_text: str | None
    stored: Mapping[str, Stored]
    dtypes: Mapping[str, torch.dtype]
    metadata: Mapping[str, Mapping[str, str]]
    index_text: str | None


@dataclass(frozen=True, kw_only=True)
class _Output:
    """A published tensor that this rank writes, and the dtype that it has in the file."""

    export: Export
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.export.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The files of the new folder: the tensors of each, all ranks together. as_stored: all is as in the folder loaded."""

    files: Mapping[str, tuple[str, ...]]
    bytes: int
    dtype: torch.dtype
    as_stored: bool


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    mtp: Ahead = "as_stored",
) -> Stage:
    """The model in `folder`, its parameters in `dtype`; the router's expert bias stays float32.

    parallel: None for the whole model in this process, or the mapping of the initialised world, of which every rank then reads
    its own part alone. mtp: `keep` demands the multi-token prediction modules that config.json declares, `drop` leaves them
    out, `as_stored` leaves them out where the folder holds none of their tensors, as folders written by transformers do.

    Raises RequestError where the folder is not a model that the zoo has, CheckpointError where its weights are not those that
    config.json declares; all faults at once, before any tensor is read.
    """
    folder = Path(folder)
    if dtype not in _NAMES:
        raise RequestError(f"dtype={dtype} is not one that a model can have. Works: {', '.join(map(str, _NAMES))}")
    text, config = _read_config(folder)
    family = _family_of(folder, config)
    declared = _declared(folder, family, config)
    with open_folder(folder) as opened:
        loaded, choice = _choose(family, declared, opened, mtp)
        groups = one_rank() if parallel is None else _groups(parallel, loaded)
        model = build_model(loaded, groups=groups, parallel=parallel, dtype=dtype, device=device)
        targets = inventory(model, groups)
        import_state(family.huggingface.rules(loaded), choice, targets, opened.read)
        changes = _changes(family, declared, loaded) if mtp == "drop" else {}
        kept = {name: value for name, value in config.items() if name != "quantization_config"} | changes
        model.origin = Origin(
            family=family.name,
            folder=folder,
            config=kept,
            config_text=text if kept == config else None,
            stored=opened.tensors,
            dtypes=_dtypes(family.huggingface.rules(loaded), choice, targets, opened),
            metadata=opened.metadata,
            index_text=opened.index_text,
        )
    return model


def save_pretrained(
    model: Stage,
    folder: str | Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write `model` as a folder in the format in which its family is published, whole or not at all.

    A model from `load_pretrained` gives its folder back: same names, bytes and files, other files (tokenizer, generation
    settings) included; float8 weights become bfloat16. dtype: of all weights (None: as they were stored, or the model's own
    where that is narrower; the expert bias stays float32 where a narrower type would round it). family: for a model that was
    not loaded from a folder, and needed only where several families could express it. shard_bytes: the size of the files (None:
    the files that were loaded, or 5 GB). Every rank of the model's world calls it, with a folder that all of them see; each
    writes the tensors that it holds.

    Raises RequestError where the family cannot express the model or the folder is in use, CheckpointError where writing fails.
    """
    target, world = Path(folder).absolute(), model.place.groups.world
    origin = model.origin if isinstance(model.origin, Origin) else None
    # Every rank sees the same folder and model, so all of them refuse, or none does.
    check_free(target, overwrite=overwrite)
    chosen = _family_for(model.config, family or (origin.family if origin else None))
    config = chosen.huggingface.write_config(model.config) if origin is None else dict(origin.config)
    outputs = each(world, lambda: _outputs(model, chosen.huggingface.rules(model.config), origin, dtype))
    held = together(world, lambda: [(name, output.bytes, output.dtype) for name, output in outputs.items()])
    layout = _layout(held, origin, shard_bytes)
    partial = on_first(world, lambda: begin(target))
    try:
        each(world, lambda: _write_files(partial, layout, outputs, origin))
        on_first(world, lambda: _finish(partial, target, layout, (config, origin)))
    except BaseException:
        if world.position == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


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


def _family_for(model: ModelConfig, name: str | None) -> Family:
    """The family called `name`, or the only one whose config.json can express `model`."""
    if name is not None:
        return find_family(name)
    able = []
    for family in all_families():
        try:
            family.huggingface.write_config(model)
        except RequestError:
            continue
        able.append(family)
    if len(able) != 1:
        works = " or ".join(family.name for family in able) or "none; save it as a checkpoint of the zoo"
        raise RequestError(
            f"family=None: {len(able)} families of the zoo can express this model, not one. Works: {works}"
        )
    return able[0]


def _declared(folder: Path, family: Family, config: Mapping[str, Any]) -> ModelConfig:
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


def _groups(parallel: ParallelConfig, model: ModelConfig) -> Groups:
    """This rank's groups. Raises RequestError with every fault where the mapping does not fit the model or the world."""
    faults = check_mapping(model, parallel, dist.get_world_size() if dist.is_initialized() else 1)
    if faults:
        lines = ["the model cannot be loaded under this mapping:", *(f"  {fault}" for fault in faults)]
        raise RequestError("\n".join(lines))
    return groups_for(parallel, embedding_stages=layout_of(model, parallel).embedding_stages(model.tied_embeddings))


def _choose(family: Family, declared: ModelConfig, opened: Folder, mtp: Ahead) -> tuple[ModelConfig, Choice]:
    """The model to build, with its prediction modules or without, and where its tensors stand in the folder."""
    found = {name: stored.shape for name, stored in opened.tensors.items()}
    model, ahead = declared, set[str]()
    if declared.predict_ahead and mtp != "keep":
        without = replace(declared, predict_ahead=None)
        ahead = _names(family, declared, found) - _names(family, without, found)
        if mtp == "drop" or not ahead & set(found):
            model = without
            if mtp != "drop":
                _log.warning(
                    "%s holds no multi-token prediction modules; the model is loaded without them", opened.path
                )
        else:
            ahead = set()
    choice = choose(family.huggingface.rules(model), _shapes(model), {n: s for n, s in found.items() if n not in ahead})
    if choice.faults:
        lines = [f"{opened.path} does not hold the weights that its {CONFIG} declares:"]
        lines += [f"  {line}" for line in choice.faults.lines()]
        if model.predict_ahead:
            lines.append('  To leave the multi-token prediction modules out: load_pretrained(folder, mtp="drop")')
        raise CheckpointError("\n".join(lines))
    return model, choice


def _names(family: Family, model: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Every published name that `model` is read from, optional copies that are there included."""
    choice, shapes = choose(family.huggingface.rules(model), _shapes(model), found), _shapes(model)
    names = {copy for copies in choice.copies.values() for copy in copies}
    for name, form in choice.forms.items():
        _, numbers = match(family.huggingface.rules(model), name)
        names.update(piece.name for piece in pieces(form, numbers, shapes[name]))
    return names


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The canonical tensors of the whole model, from its real modules."""
    whole = build_model(model, groups=one_rank(), device="meta")
    return {name: tensor.shape for name, tensor in inventory(whole, one_rank()).items()}


def _dtypes(
    rules: Rules, choice: Choice, targets: Mapping[str, ShardedTensor], opened: Folder
) -> dict[str, torch.dtype]:
    """What each canonical tensor is stored in: that of its first published tensor."""
    found = {}
    for name, target in targets.items():
        _, numbers = match(rules, name)
        found[name] = opened.tensors[next(pieces(choice.forms[name], numbers, target.shape)).name].dtype
    return found


def _changes(family: Family, declared: ModelConfig, loaded: ModelConfig) -> dict[str, Any]:
    """The fields of config.json by which the loaded model differs from the declared one."""
    before, after = family.huggingface.write_config(declared), family.huggingface.write_config(loaded)
    return {name: value for name, value in after.items() if before.get(name) != value}


def _outputs(model: Stage, rules: Rules, origin: Origin | None, dtype: torch.dtype | None) -> dict[str, _Output]:
    """Every published tensor that this rank writes. Raises RequestError where a tensor is spread over several ranks."""
    held = {name: piece for name, piece in inventory(model, model.place.groups).items() if piece.copy == 0}
    exports = export_state(rules, held)
    spread = [name for name, export in exports.items() if not export.whole()]
    if spread:
        raise RequestError(
            f"{spread[0]} and {len(spread) - 1} more are spread over ranks; save from a mapping without tp and etp"
        )
    if origin is not None:
        again = copy_names(rules, held)
        exports |= {copy: replace(exports[of], name=copy) for copy, of in again.items() if copy in origin.stored}
    buffers = dict(model.named_buffers())
    return {name: _Output(export=e, dtype=_dtype_of(e, origin, dtype, buffers)) for name, e in exports.items()}


def _dtype_of(
    export: Export, origin: Origin | None, wanted: torch.dtype | None, buffers: Mapping[str, Tensor]
) -> torch.dtype:
    """The dtype in which a published tensor is written."""
    canonical = export.parts[0][1].name
    dtype = wanted or export.dtype
    if wanted is None and origin is not None:
        stored = origin.stored[export.name].dtype if export.name in origin.stored else origin.dtypes[canonical]
        stored = torch.bfloat16 if stored.itemsize == 1 else stored
        dtype = stored if stored.itemsize < export.dtype.itemsize else export.dtype
    if canonical in buffers and not torch.equal(buffers[canonical].to(dtype).to(export.dtype), buffers[canonical]):
        return export.dtype
    return dtype


def _layout(held: list[list[tuple[str, int, torch.dtype]]], origin: Origin | None, shard_bytes: int | None) -> _Layout:
    """The files of the folder: those that were loaded where nothing is different, else shards in the order of the ranks."""
    everything = [entry for rank in held for entry in rank]
    total, dtype = sum(size for _, size, _ in everything), everything[0][2]
    stored = {} if origin is None or len(held) > 1 or shard_bytes is not None else origin.stored
    if {name: dtype for name, _, dtype in everything} == {name: tensor.dtype for name, tensor in stored.items()}:
        files: dict[str, list[str]] = {}
        for name, _, _ in everything:
            files.setdefault(stored[name].file, []).append(name)
        found = {file: tuple(names) for file, names in files.items()}
        return _Layout(files=found, bytes=total, dtype=dtype, as_stored=True)
    shards = [
        s for rank in held for s in plan_shards([(name, size) for name, size, _ in rank], shard_bytes or SHARD_BYTES)
    ]
    named = {shard_name(number, len(shards)): shard for number, shard in enumerate(shards)}
    return _Layout(files=named, bytes=total, dtype=dtype, as_stored=False)


def _write_files(partial: Path, layout: _Layout, outputs: Mapping[str, _Output], origin: Origin | None) -> None:
    """This rank's files, one after the other, so that one of them is in memory at a time."""
    for file, names in layout.files.items():
        if names[0] in outputs:
            tensors = {name: outputs[name].export.assemble(outputs[name].dtype) for name in names}
            kept = origin.metadata[file] if origin is not None and layout.as_stored else {"format": "pt"}
            write_shard(partial / file, tensors, kept)


def _finish(partial: Path, target: Path, layout: _Layout, described: tuple[dict[str, Any], Origin | None]) -> None:
    """The index, config.json and the other files; then the folder takes its place."""
    config, origin = described
    try:
        if layout.as_stored and origin is not None and origin.index_text is not None:
            (partial / INDEX).write_text(origin.index_text, encoding="utf-8")
        elif len(layout.files) > 1:
            placed = {name: file for file, names in layout.files.items() for name in names}
            write_index(partial / INDEX, placed, layout.bytes)
        text = origin.config_text if origin is not None and layout.as_stored else None
        if text is None:
            old = "torch_dtype" if "torch_dtype" in config else "dtype"
            text = json.dumps(config | {old: _NAMES[layout.dtype]}, indent=2, sort_keys=True) + "\n"
        (partial / CONFIG).write_text(text, encoding="utf-8")
        if origin is not None:
            _copy_others(origin.folder, partial)
        commit(partial, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def _copy_others(source: Path, partial: Path) -> None:
    """The files of the loaded folder that are neither weights nor config.json, such as the tokenizer."""
    if not source.is_dir():
        _log.warning("%s is gone, so its tokenizer and other files are not in the saved folder", source)
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != CONFIG and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, partial / path.name)
