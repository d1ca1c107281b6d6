"""Models from and to Hugging Face folders: config.json, safetensors, and every other file that came with them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.agree import on_first
from ckpt.declared import CONFIG, QUANTIZATION, Ahead, canonical_shapes, family_for, open_declared
from ckpt.float8 import QUANTIZATION as FLOAT8
from ckpt.gather import Format, Output, Wish, plan_outputs
from ckpt.shards import Job, KnownScales, Layout, plan_layout, write_files
from ckpt.store.safetensors import INDEX, Stored, begin, check_free, commit, index_text
from ckpt.translate import import_state
from core.check import check_mapping
from core.config.architecture import ModelConfig
from core.config.family import Family
from core.config.mapping import ParallelConfig
from core.config.written import written_config
from core.errors import CheckpointError, RequestError
from core.parallel.groups import Groups, groups_for, one_rank
from core.pipeline.layout import layout_of
from core.state.inventory import inventory
from core.transformer.stage import Stage, build_model

METADATA = {"format": "pt"}
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model keeps of the folder that it was loaded from, so that saving gives the same folder back.

    config: config.json as far as it still holds: 0 for prediction modules that were left out. config_text: the file itself, None
    where not all of it holds. stored: the folder's tensors by published name, block scales included. dtypes: what each canonical
    tensor was stored in. metadata: the headers of the files. index_text: their index, if any.
    """

    family: str
    folder: Path
    config: Mapping[str, Any]
    config_text: str | None
    stored: Mapping[str, Stored]
    dtypes: Mapping[str, torch.dtype]
    metadata: Mapping[str, Mapping[str, str]]
    index_text: str | None


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    mtp: Ahead = "as_stored",
    expected: ModelConfig | None = None,
) -> Stage:
    """The model in `folder`, its parameters in `dtype`; the router's expert bias stays float32.

    parallel: None for the whole model in this process, or the mapping of the initialised world, of which every rank then reads
    its own part alone. mtp: `keep` demands the multi-token prediction modules that config.json declares, `drop` leaves them
    out, `as_stored` leaves them out where the folder holds none of their tensors, as folders written by transformers do.
    expected: the model that it has to be, where there is one.

    Raises RequestError where the folder is not a model that the zoo has, or field by field where it is not the expected one;
    CheckpointError where its weights are not those that config.json declares. All faults at once, before any tensor is read.
    """
    folder = Path(folder)
    if dtype not in DTYPE_NAMES:
        raise RequestError(f"dtype={dtype} is not one that a model can have. Works: {', '.join(map(str, DTYPE_NAMES))}")
    with open_declared(folder, mtp, expected) as declared:
        groups = one_rank() if parallel is None else _groups(parallel, declared.model)
        model = build_model(declared.model, groups=groups, parallel=parallel, dtype=dtype, device=device)
        import_state(declared.rules, declared.choice, inventory(model, groups), declared.opened.read)
        model.origin = Origin(
            family=declared.family.name,
            folder=folder,
            config=declared.config,
            config_text=declared.text,
            stored=declared.opened.stored,
            dtypes=declared.dtypes(),
            metadata=declared.opened.metadata,
            index_text=declared.opened.index_text,
        )
    return model


def save_pretrained(
    model: Stage,
    folder: str | Path,
    *,
    family: str | None = None,
    dtype: Format = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write `model` as a folder in the format in which its family is published, whole or not at all.

    A model from `load_pretrained` gives its folder back: same names, bytes and files, other files (tokenizer, generation
    settings) included. dtype: of all weights; `float8_blocks` for float8 as DeepSeek-V3 ships it, in the tensors that the folder
    loaded has in blocks, or the family; a model that came from float8, and is float32, gives the same bytes. None: as they were
    stored (bfloat16 for float8), or the model's own where that is narrower. What is not trained, such as the expert bias, stays
    float32. family: for a model that was not loaded from a folder, and needed only where several families could express it.
    shard_bytes: the size of the files (None: the files that were loaded, or 5 GB).

    Under any mapping: every rank of the model's world calls it, with a folder that all of them see, and writes some of the files.

    Raises RequestError where the family cannot express the model or the folder is in use, CheckpointError where writing fails.
    """
    target, world = Path(folder).absolute(), model.place.groups.world
    origin = origin_of(model)
    # Every rank sees the same folder and model, so all of them refuse, or none does.
    check_free(target, overwrite=overwrite)
    chosen = family_for(model.config, family or (origin.family if origin else None))
    config = new_config(chosen, model.config) if origin is None else dict(origin.config)
    rules, shapes = chosen.huggingface.rules(model.config), canonical_shapes(model.config)
    outputs, held = plan_outputs(model, rules, shapes, wish_of(origin, dtype))
    layout = plan_layout(outputs, None if origin is None else _placed(origin, outputs), shard_bytes)
    partial = on_first(world, lambda: begin(target))
    scales = KnownScales(target, {}) if origin is None else KnownScales(origin.folder, origin.stored)
    kept = origin.metadata if origin is not None and layout.as_placed else dict.fromkeys(layout.files, METADATA)
    try:
        with closing(scales):
            job = Job(layout=layout, metadata=kept, folder=partial, known=scales.read)
            write_files(job, held, world, model.place.device)
        on_first(world, lambda: _finish(partial, target, layout, (config, origin)))
    except BaseException:
        if world.position == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def origin_of(model: Stage) -> Origin | None:
    """What the model keeps of the folder that it was loaded from; None for one that was not."""
    return model.origin if isinstance(model.origin, Origin) else None


def wish_of(origin: Origin | None, dtype: Format) -> Wish:
    """How the tensors of a model are written."""
    return Wish(format=dtype) if origin is None else Wish(format=dtype, stored=origin.stored, dtypes=origin.dtypes)


def new_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that came from no folder, its fields in the order of the alphabet."""
    return dict(sorted(written_config(family, model).items()))


def config_text(config: Mapping[str, Any], dtype: torch.dtype, *, float8: bool) -> str:
    """The text of config.json: `config`, in its order, with a dtype, and with float8 blocks or without them."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    written = {**config, key: DTYPE_NAMES[dtype], QUANTIZATION: config.get(QUANTIZATION) or FLOAT8}
    if not float8:
        del written[QUANTIZATION]
    return json.dumps(written, indent=2) + "\n"


def _groups(parallel: ParallelConfig, model: ModelConfig) -> Groups:
    """This rank's groups. Raises RequestError with every fault where the mapping does not fit the model or the world."""
    faults = check_mapping(model, parallel, dist.get_world_size() if dist.is_initialized() else 1)
    if faults:
        lines = ["the model cannot be loaded under this mapping:", *(f"  {fault}" for fault in faults)]
        raise RequestError("\n".join(lines))
    return groups_for(parallel, embedding_stages=layout_of(model, parallel).embedding_stages(model.tied_embeddings))


def _placed(origin: Origin, outputs: Sequence[Output]) -> dict[str, str] | None:
    """The files of the folder that was loaded, if its tensors and what is to be written are of the same dtypes."""
    forms = {name: (dtype, shape) for output in outputs for name, dtype, shape in output.forms()}
    same = forms == {name: (tensor.dtype, tensor.shape) for name, tensor in origin.stored.items()}
    return {name: tensor.file for name, tensor in origin.stored.items()} if same else None


def _finish(partial: Path, target: Path, layout: Layout, described: tuple[dict[str, Any], Origin | None]) -> None:
    """The index, config.json and the other files; then the folder takes its place."""
    config, origin = described
    try:
        if layout.as_placed and origin is not None and origin.index_text is not None:
            (partial / INDEX).write_text(origin.index_text, encoding="utf-8")
        elif len(layout.files) > 1:
            (partial / INDEX).write_text(index_text(layout.placed(), layout.bytes), encoding="utf-8")
        text = origin.config_text if origin is not None and layout.as_placed else None
        if text is None:
            plain = [output.dtype for outputs in layout.files.values() for output in outputs if output.scales is None]
            text = config_text(config, plain[0], float8=len(plain) < len(layout.placed()))
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
    for path in other_files(source):
        shutil.copyfile(path, partial / path.name)


def other_files(folder: Path) -> list[Path]:
    """The files of a folder that are neither weights nor config.json."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != CONFIG and not path.name.endswith(_WEIGHT_FILES)
    ]
