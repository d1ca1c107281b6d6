"""Write a Hugging Face folder from any Source: a row of blocks at a time, by several processes, going on after a kill where it
stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.declared import CONFIG, QUANTIZATION, canonical_specs, family_for
from ckpt.float8 import BLOCK, SCALE, quantise
from ckpt.gather import Format, Output
from ckpt.huggingface import METADATA, config_text, new_config
from ckpt.published import PublishedSource
from ckpt.shards import Layout, plan_layout, plan_of
from ckpt.source import MODEL_PREFIX, Described, Form, Source
from ckpt.store.safetensors import INDEX, check_free, commit, index_text
from ckpt.store.tensorfile import TensorWriter
from ckpt.stream import Opener, Progress, Streaming
from ckpt.translate import Published, published_plan, read_published
from ckpt.workers import share_out
from core.config.difference import config_differences
from core.config.family import Family
from core.errors import CheckpointError, RequestError
from core.state.box import Box
from core.state.spec import TensorSpec

JOURNAL = "journal.json"
WRITING = ".writing"
# What one process writes between two words about it, and at least what a kill costs.
ITEM_BYTES = 64 << 20


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


def write_published(
    opener: Opener,
    folder: str | Path,
    *,
    identity: str,
    publishing: Publishing | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write what `opener` opens as a Hugging Face folder, whole or not at all; its path.

    identity: changes whenever what the source holds does, so that two sources are never mixed after a kill. Files that an
    interrupted writer of the same folder has finished are kept. progress: called with the bytes of tensors done and in all.

    Raises as `plan_folder`; RequestError where the folder is in use or memory_bytes too little; CheckpointError where a tensor is
    damaged, the disk full, or a process killed.
    """
    publishing = publishing or Publishing()
    target = Path(folder).absolute()
    check_free(target, overwrite=publishing.overwrite)
    streaming = Streaming(memory_bytes=publishing.memory_bytes, workers=publishing.workers)
    plan = plan_folder(opener(), publishing)
    try:
        with _partial(target, _fingerprint(plan, identity)) as partial:
            _write_tensors(partial, plan.layout, (opener, streaming), progress)
            for name, content in plan.others.items():
                (partial / name).write_bytes(content)
            (partial / JOURNAL).unlink()
            commit(partial, target)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
    return target


def _write_tensors(partial: Path, layout: Layout, how: tuple[Opener, Streaming], progress: Progress | None) -> None:
    """Every file of tensors that is not there yet."""
    opener, streaming = how
    items = tuple(_items(layout))
    account = _Account(partial, layout, items, progress)
    needed = layout.bytes - account.done
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise CheckpointError(f"{partial}: needs {needed:,} bytes, {free:,} are free. Make room, or write elsewhere.")
    account.begin()
    write = _Writer(opener, partial, layout, items, streaming.run_bytes)
    todo = account.todo()
    if streaming.workers == 1 or len(todo) < 2:
        write(todo, account.take)
    else:
        workers = min(streaming.workers, len(todo))
        share_out(write, [todo[n::workers] for n in range(workers)], account.take, str(partial))


@dataclass(frozen=True, kw_only=True)
class _Item:
    """Some outputs of a file, that one process writes."""

    file: str
    outputs: tuple[Output, ...]


def _items(layout: Layout) -> Iterator[_Item]:
    for file, outputs in layout.files.items():
        now: list[Output] = []
        for output in outputs:
            now.append(output)
            if sum(o.bytes for o in now) >= ITEM_BYTES:
                yield _Item(file=file, outputs=tuple(now))
                now = []
        if now:
            yield _Item(file=file, outputs=tuple(now))


class _Account:
    """What is finished of the files, as those who write them say."""

    def __init__(self, partial: Path, layout: Layout, items: Sequence[_Item], progress: Progress | None) -> None:
        self._partial, self._layout, self._items, self._progress = partial, layout, items, progress
        self._plans = {file: plan_of(outputs, METADATA) for file, outputs in layout.files.items()}
        there = {path.name: path.stat().st_size for path in partial.iterdir()}
        self._finished = {file for file, plan in self._plans.items() if there.get(file) == plan.bytes}
        sizes = layout.file_bytes()
        self.done = sum(sizes[file] for file in self._finished)
        self._left = {file: sum(item.file == file for item in items) for file in layout.files}

    def begin(self) -> None:
        """Make the files that are to be written, at their full size."""
        for file, plan in self._plans.items():
            if file not in self._finished:
                TensorWriter(self._partial / (file + WRITING), plan).close(sync=False)
        self.tell()

    def todo(self) -> list[int]:
        """The numbers of the items that are to be written."""
        return [number for number, item in enumerate(self._items) if item.file not in self._finished]

    def take(self, said: int | tuple[int, None]) -> None:
        """Bytes that were written, or the number of a finished item: a file that is complete takes its name."""
        if isinstance(said, int):
            self.done += said
            self.tell()
            return
        file = self._items[said[0]].file
        self._left[file] -= 1
        if not self._left[file]:
            path = self._partial / (file + WRITING)
            with path.open("rb") as written:
                os.fsync(written.fileno())
            path.rename(self._partial / file)

    def tell(self) -> None:
        """Show how far it is."""
        if self._progress:
            self._progress(self.done, self._layout.bytes)


@dataclass(frozen=True)
class _Writer:
    """Writes items, in whichever process it is called."""

    opener: Opener
    partial: Path
    layout: Layout
    items: Sequence[_Item]
    run_bytes: int

    def __call__(self, numbers: Sequence[int], say: Callable[[Any], None]) -> None:
        source = self.opener()
        known = source.known_scales if isinstance(source, PublishedSource) else _nothing
        writers: dict[str, TensorWriter] = {}
        try:
            for number in numbers:
                file = self.items[number].file
                if file not in writers:
                    path = self.partial / (file + WRITING)
                    writers[file] = TensorWriter(path, plan_of(self.layout.files[file], METADATA), begin=False)
                for output in self.items[number].outputs:
                    scales = None if output.scales is None else known(output.published.name)
                    self._write(output, source, writers[file], (scales, say))
                say((number, None))
        finally:
            for writer in writers.values():
                writer.close(sync=False)

    def _write(
        self, output: Output, source: Source, writer: TensorWriter, how: tuple[Tensor | None, Callable[[Any], None]]
    ) -> None:
        """One tensor, a band of rows after the other; of blocks, a row of them at a time."""
        (known, say), shape = how, output.published.shape
        row = max(1, output.published.elements // max(1, shape[0])) if shape else 1
        step = max(1, self.run_bytes // (row * 4))
        if output.scales is not None:
            step = max(BLOCK, step // BLOCK * BLOCK)

        def read(name: str, box: Box) -> Tensor:
            return source.read(MODEL_PREFIX + name, box)

        (name,) = output.names
        for first in range(0, shape[0], step):
            box = Box(offset=(first, *(0 for _ in shape[1:])), shape=(min(step, shape[0] - first), *shape[1:]))
            if output.scales is None:
                data = read_published(output.published, box, read, output.dtype)
                writer.write(name, first * row, data)
                say(data.nbytes)
                continue
            blocks = slice(first // BLOCK, -(-(first + box.shape[0]) // BLOCK))
            wide = read_published(output.published, box, read, output.travels)
            numbers, scale = quantise(wide, None if known is None else known[blocks])
            writer.write(name, first * row, numbers)
            writer.write(name + SCALE, blocks.start * scale.shape[1], scale.to(output.scales))
            say(numbers.nbytes + scale.to(output.scales).nbytes)


def _nothing(name: str) -> None:
    """No block scales are known."""


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
    found[CONFIG] = text.encode()
    if len(layout.files) > 1:
        kept = described.assets.get(INDEX, b"")
        same = layout.as_placed and json.loads(kept).get("metadata", {}).get("total_size") == layout.bytes
        found[INDEX] = kept if same else index_text(layout.placed(), layout.bytes).encode()
    return found


def _fingerprint(plan: FolderPlan, identity: str) -> str:
    """What tells this folder from any other: all that decides what its files hold."""
    forms = {file: [tuple(output.forms()) for output in outputs] for file, outputs in plan.layout.files.items()}
    return hashlib.blake2b(repr((forms, identity)).encode(), digest_size=16).hexdigest()


@contextmanager
def _partial(target: Path, fingerprint: str) -> Iterator[Path]:
    """The folder `.NAME.partial` beside the target, held by this process alone; emptied if it was begun for anything else."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"{target}: another process is writing it. Wait for it, or give another name.") from None
        journal = partial / JOURNAL
        if not journal.is_file() or journal.read_text() != fingerprint:
            for path in partial.iterdir():
                path.unlink()
            journal.write_text(fingerprint)
        yield partial
    finally:
        os.close(handle)
