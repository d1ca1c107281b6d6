"""The work of the `ckpt` command that writes: what it is asked becomes a job, which is shown (dry run) or done with a bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckpt.bar import bar, size
from ckpt.dense.source import open_dense
from ckpt.described import MAPPING, extra_of, mapping_of
from ckpt.dtype import CONVERTIBLE
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.files.url import is_remote
from ckpt.manifest import Codec, Manifest
from ckpt.opening import Opened, WithoutAhead
from ckpt.plan import Held
from ckpt.publish import Publishing, plan_folder, write_published
from ckpt.recognise import identity, recognise
from ckpt.reshard import held_under, smallest_world
from ckpt.save import Planned
from ckpt.source import MODEL_PREFIX, Described, Form, Source
from ckpt.store.find import find_store
from ckpt.stream import Job, Opener, Streaming, file_bytes, held_whole, plan_job, write_checkpoint
from ckpt.target import check_target
from ckpt.upcycle import summary, upcycled_source
from ckpt.upcycle_options import SharedFromDense, UpcycleOptions, layers_named
from core.check.mapping import check_mapping
from core.config.mapping import ParallelConfig
from core.config.override import Assignment, override_section, parse_assignment
from core.config.serial import to_json
from core.errors import ConfigError, Fault, RequestError
from core.state.box import Box, whole

Say = Callable[[str], None]
DTYPES = ("float32", "bfloat16", "float16", "float64")
# What chooses experts by comparing numbers that are nearly equal, and is float32 in every published folder.
KEPT_AS_IT_IS = ".router.bias"


def streaming_for(
    opened: Opened | None, store: str | None, codec: str | None, *, memory_bytes: int, workers: int, overwrite: bool
) -> Streaming:
    """How to write, where what is not asked for is as in the checkpoint that is read."""
    before = opened.manifest if opened is not None else None
    chosen: str = store or (before.store if before else "zarr")
    kept: Codec = before.codec if before and before.codec in find_store(chosen).codecs else "raw"
    return Streaming(
        store=chosen,
        codec="zstd" if codec == "zstd" else "raw" if codec else kept,
        memory_bytes=memory_bytes,
        workers=workers,
        overwrite=overwrite,
    )


def convert_job(opened: Opened, target: Address, streaming: Streaming, dtype: str | None = None) -> Job:
    """The same tensors in another store, another codec, or all parameters in another type. Pieces stay what they are, if there are any."""
    source, opener = opened.source, opened.opener
    if dtype is not None:
        opener = partial(cast_source, opener, dtype)
        source = Cast(source, dtype)
    held = held_whole(source) if opened.manifest is None else held_as_stored(opened.manifest, source)
    return Job(
        opener=opener,
        identity=f"{opened.identity} dtype={dtype}",
        target=target,
        held=held,
        step=0 if opened.manifest is None else opened.manifest.step,
        extra=_extra(opened),
        streaming=streaming,
        assets=_assets(source),
    )


def reshard_job(
    opened: Opened, target: Address, streaming: Streaming, settings: Sequence[str]
) -> tuple[Job, ParallelConfig]:
    """The same tensors in the pieces that the ranks of another mapping hold: that of the checkpoint with `settings` applied.

    Raises ConfigError with every fault of the settings and of the mapping, RequestError where nothing says what model it is.
    """
    described = opened.source.describe()
    if described is None:
        raise RequestError(
            f"{opened.found.address}: does not say what model it is, so it is not known what ranks would hold."
        )
    before = mapping_of(_extra(opened)) or ParallelConfig()
    items, faults = _assignments(settings)
    parallel, wrong = override_section("parallel", before, items)
    ranks = smallest_world(parallel) if _positive(parallel) else 1
    found = [*faults, *wrong, *check_mapping(described.model, parallel, ranks)]
    if found:
        raise ConfigError(found)
    job = Job(
        opener=opened.opener,
        identity=opened.identity,
        target=target,
        held=held_under(opened.source, described.model, parallel),
        step=0 if opened.manifest is None else opened.manifest.step,
        extra={**_extra(opened), MAPPING: to_json(parallel)},
        streaming=streaming,
        assets=described.assets,
    )
    return job, parallel


def source_job(opener: Opener, identity: str, target: Address, streaming: Streaming) -> Job:
    """A checkpoint of a source that is made while it is read, such as an upcycled model."""
    source = opener()
    described = source.describe()
    return Job(
        opener=opener,
        identity=identity,
        target=target,
        held=held_whole(source),
        step=0,
        extra={} if described is None else extra_of(described),
        streaming=streaming,
        assets=_assets(source),
    )


def publish(
    opened: Opened,
    out: str,
    *,
    dtype: str | None,
    family: str | None,
    say: Say,
    dry_run: bool,
    memory_bytes: int,
    workers: int,
    overwrite: bool,
) -> None:
    """Write the model as a Hugging Face folder, or say what would be written; optimizer states stay behind.

    Raises RequestError where the folder is in use or no family can express the model, and whatever writing raises.
    """
    if is_remote(out):
        raise RequestError(f"{out}: a Hugging Face folder is written to the file system only. Give a folder.")
    check_target(out, overwrite=overwrite)
    publishing = Publishing(
        family=family,
        format=None if dtype is None else "float8_blocks" if dtype == "float8_blocks" else getattr(torch, dtype),
        memory_bytes=memory_bytes,
        workers=workers,
        overwrite=overwrite,
    )
    plan = plan_folder(opened.source, publishing)
    sizes = plan.file_bytes()
    if dry_run:
        for path, count in sizes.items():
            say(f"{path}\t{count}")
        say(f"would write {out}: {_amount(sizes)}, {_means(memory_bytes, workers)}{_free(out)}")
        return
    with bar("writing") as progress:
        folder = write_published(opened.opener, out, identity=opened.identity, publishing=publishing, progress=progress)
    say(f"{folder}: {_amount(sizes)}")


def upcycle(dense: str, out: Address, streaming: Streaming, *, say: Say, dry_run: bool, **asked: Any) -> None:
    """Write the mixture of experts that a dense model becomes. asked: the options of the command.

    Raises ConfigError with every option that cannot be, and whatever opening and writing raise.
    """
    found = recognise(dense)
    if found.kind not in ("published", "gguf"):
        raise RequestError(
            f"{dense}: is no dense model. Works: a Hugging Face folder with safetensors, or a GGUF file."
        )
    shared = None if asked["shared"] is None else SharedFromDense(count=asked["shared"], share=asked["shared_share"])
    with closing(open_dense(found.address)) as source:
        model = source.describe().model
        options = UpcycleOptions(
            style=asked["model"],
            experts=asked["experts"],
            top_k=asked["top_k"],
            granularity=asked["granularity"],
            scaling=asked["scaling"],
            normalise=asked["normalise"],
            shared=shared,
            layers=layers_named(asked["layers"], len(model.layers)),
            noise_std=asked["noise"],
            router_std=asked["router_std"],
            seed=asked["seed"],
        )
    for line in summary(model, options):
        say(line)
    opener = partial(upcycled_source, found.address, options)
    carry_out(source_job(opener, f"{identity(found)} {options}", out, streaming), say, dry_run=dry_run)


def carry_out(job: Job, say: Say, *, dry_run: bool) -> None:
    """Write the job's checkpoint, or say what would be written. Raises as `write_checkpoint` does."""
    planned = plan_job(job)
    if dry_run:
        check_target(job.target, overwrite=job.streaming.overwrite)
        for line in would_write(job, planned):
            say(line)
        return
    with bar("writing") as progress:
        address = write_checkpoint(job, progress)
    say(f"{address}: {len(planned.plan.tensors):,} tensors, {size(planned.plan.bytes)} in {_files(len(planned.files))}")


def would_write(job: Job, planned: Planned) -> Iterator[str]:
    """The files with their bytes, the bytes of every rank, and what it takes."""
    sizes, streaming = file_bytes(planned), job.streaming
    for file in planned.files:
        yield f"{file.path}\t{sizes[file.path]}\trank {file.rank}"
    of_rank: dict[int, int] = {}
    for file in planned.files:
        of_rank[file.rank] = of_rank.get(file.rank, 0) + sizes[file.path]
    if len(of_rank) > 1:
        for rank, count in sorted(of_rank.items()):
            yield f"rank {rank}: {count:,} bytes"
    yield (
        f"would write {job.target}: {len(planned.plan.tensors):,} tensors, {_amount(sizes)}, as {streaming.store} "
        f"({streaming.codec}), {_means(streaming.memory_bytes, streaming.workers)}{_free(job.target)}"
    )


def _amount(sizes: Mapping[str, int]) -> str:
    total = sum(sizes.values())
    return f"{total:,} bytes ({size(total)}) in {_files(len(sizes))}"


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _means(memory_bytes: int, workers: int) -> str:
    return f"with {workers} worker{'s' if workers > 1 else ''} in {size(memory_bytes)} of memory"


def _free(target: Address) -> str:
    free = open_files(target).free_bytes()
    return "" if free is None else f"; {size(free)} are free there"


def held_as_stored(manifest: Manifest, source: Source) -> list[list[Held]]:
    """What the ranks hold that wrote a checkpoint; of several copies of a piece only those count that were written."""
    ranks = 1 + max((piece.rank for entry in manifest.entries for piece in entry.pieces), default=0)
    held: list[list[Held]] = [[] for _ in range(ranks)]
    for entry in (entry for entry in manifest.entries if entry.name in source.forms):
        dtype = source.forms[entry.name].dtype
        for piece in entry.pieces:
            held[piece.rank].append(
                Held(name=entry.name, shape=entry.shape, dtype=dtype, box=piece.box, copy=0, copies=1)
            )
        if not math.prod(entry.shape):
            box = whole(entry.shape)
            held[0].append(Held(name=entry.name, shape=entry.shape, dtype=dtype, box=box, copy=0, copies=1))
    return held


class Cast:
    """A source whose parameters are of another floating type; optimizer states and the router's bias stay what they are."""

    def __init__(self, source: Source, dtype: str) -> None:
        """Raises RequestError for a type that parameters cannot have."""
        if dtype not in DTYPES:
            raise RequestError(f"--dtype={dtype}: is not a type that parameters can have. Works: {', '.join(DTYPES)}.")
        self._source, self._dtype = source, dtype

    @property
    def forms(self) -> Mapping[str, Form]:
        """Every tensor."""
        return {name: self._form(name, form) for name, form in self._source.forms.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """The piece `box`, rounded to the nearest."""
        data = self._source.read(name, box)
        return data.to(getattr(torch, self._form(name, self._source.forms[name]).dtype))

    def describe(self) -> Described | None:
        """As the source."""
        return self._source.describe()

    def _form(self, name: str, form: Form) -> Form:
        cast = name.startswith(MODEL_PREFIX) and not name.endswith(KEPT_AS_IT_IS) and form.dtype in CONVERTIBLE
        return replace(form, dtype=self._dtype) if cast else form


def cast_source(opener: Opener, dtype: str) -> Cast:
    """For a process of its own."""
    return Cast(opener(), dtype)


def _extra(opened: Opened) -> Mapping[str, Any]:
    """What the checkpoint says beside its tensors, or what is known of a model that never was one."""
    described = opened.source.describe()
    said = {} if opened.manifest is None else dict(opened.manifest.extra)
    # What a run says of its model is not what it is any more where a part was left out.
    changed = described is not None and (opened.manifest is None or isinstance(opened.source, WithoutAhead))
    return said | (extra_of(described) if described is not None and changed else {})


def _assets(source: Source) -> Mapping[str, bytes]:
    described = source.describe()
    return {} if described is None else described.assets


def _assignments(settings: Sequence[str]) -> tuple[list[Assignment], list[Fault]]:
    items: list[Assignment] = []
    faults: list[Fault] = []
    for text in settings:
        try:
            items.append(parse_assignment(text))
        except ConfigError as error:
            faults.extend(error.faults)
    return items, faults


def _positive(parallel: ParallelConfig) -> bool:
    return min(parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.etp) >= 1
