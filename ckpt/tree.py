"""What is in a checkpoint, a published folder or a GGUF file, for people as a folded tree and for programs as one object."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.bar import size
from ckpt.described import ASSETS, describe_checkpoint, mapping_of, mapping_text
from ckpt.files.address import open_files
from ckpt.manifest import MANIFEST, Manifest, read_manifest
from ckpt.recognise import CONFIG, Found, family_of, model_type_of, recognise
from core.config.counts import count_parameters
from core.config.mapping import ParallelConfig
from core.config.serial import from_json, to_json
from core.errors import CheckpointError, RequestError

TITLES = {
    "checkpoint": "checkpoint of the zoo",
    "published": "Hugging Face folder",
    "gguf": "GGUF file",
    "torch_dist": "folder of torch.distributed.checkpoint, not written by the zoo",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One tensor. pieces: how many it is stored in; ranks: how many wrote them, None where nobody said."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int = 1
    ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is there. about: everything that is said of it beside its tensors, by name, as JSON values; None where nothing is said."""

    found: Found
    about: Mapping[str, Any]
    lines: tuple[Line, ...]


def content_of(address: str) -> Content:
    """Look at an address. No tensor is read. Raises RequestError where there is nothing known, CheckpointError where it is damaged."""
    found = recognise(address)
    about: dict[str, Any]
    match found.kind:
        case "checkpoint":
            about, lines = _checkpoint(found)
        case "published":
            about, lines = _published(Path(found.address))
        case "gguf":
            about, lines = _gguf(Path(found.address))
        case _:
            about, lines = _torch_dist(found)
    return Content(found=found, about=about, lines=tuple(lines))


def as_json(content: Content) -> str:
    """One JSON object: kind, address, run, what is known, and `tensors`."""
    found = content.found
    head = {"kind": found.kind, "address": found.address, "run": found.run}
    total = {"num_tensors": len(content.lines), "bytes": sum(line.bytes for line in content.lines)}
    return json.dumps({**head, **content.about, **total, "tensors": [asdict(line) for line in content.lines]}, indent=1)


def as_text(content: Content, *, everything: bool) -> Iterator[str]:
    """Lines for people. everything: one per tensor, instead of what is alike folded."""
    found, about = content.found, content.about
    yield found.address + (f"  (the latest checkpoint of {found.run})" if found.run else "")
    step = f", step {about['step']}" if found.kind == "checkpoint" else ""
    yield f"  {TITLES[found.kind]}{step}"
    for name, value in about.items():
        if value is not None and name not in ("step", "sequence", "architecture", "mapping"):
            yield f"  {name.replace('_', ' '):<13} {_said(value)}"
    if about.get("mapping"):
        yield f"  {'mapping':<13} {mapping_text(from_json(ParallelConfig, about['mapping'], 'mapping'))}"
    total = sum(line.bytes for line in content.lines)
    elements = sum(math.prod(line.shape) for line in content.lines)
    yield f"  {'tensors':<13} {len(content.lines):,}, {elements:,} numbers, {size(total)}"
    yield ""
    rows = [_row(line.name, [line]) for line in content.lines] if everything else list(_folded(content.lines))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*padded, *row[4:]]).rstrip()


def _said(value: Any) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


# ------------------------------------------------------------------------------------------------------ what is there


def _checkpoint(found: Found) -> tuple[dict[str, Any], list[Line]]:
    files = open_files(found.address)
    manifest = read_manifest(files)
    described, mapping = describe_checkpoint(files, manifest), mapping_of(manifest.extra)
    stored = sum(file.size for file in manifest.files.values()) + (files.sizes().get(MANIFEST) or 0)
    about = {
        "step": manifest.step,
        "sequence": manifest.sequence,
        "family": described.family if described else None,
        "parameters": _parameters(described.model) if described else None,
        "architecture": to_json(described.model) if described else None,
        "store": manifest.store,
        "codec": manifest.codec,
        "files": len(manifest.files) + 1,
        "stored": size(stored),
        "ranks": len({piece.rank for entry in manifest.entries for piece in entry.pieces}),
        "mapping": None if mapping is None else to_json(mapping),
        "assets": [path.removeprefix(ASSETS) for path in manifest.files if path.startswith(ASSETS)] or None,
    }
    return about, _manifest_lines(manifest)


def _manifest_lines(manifest: Manifest) -> list[Line]:
    return [
        Line(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            bytes=entry.bytes,
            pieces=len(entry.pieces),
            ranks=len({piece.rank for piece in entry.pieces}),
        )
        for entry in manifest.entries
    ]


def _parameters(model: Any) -> str:
    counts = count_parameters(model)
    ahead = f", {counts.predict_ahead:,} of prediction modules" if counts.predict_ahead else ""
    return f"{counts.main:,}, of which a token passes {counts.active:,}{ahead}"


def _published(folder: Path) -> tuple[dict[str, Any], list[Line]]:
    from ckpt.store.safetensors import open_folder

    with open_folder(folder) as opened:
        lines = [
            Line(
                name=name,
                shape=tensor.shape,
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=math.prod(tensor.shape) * tensor.dtype.itemsize,
            )
            for name, tensor in opened.stored.items()
        ]
        files = len(opened.metadata)
    about = {
        "model_type": model_type_of(folder),
        "family": family_of(folder),
        "weight_files": files,
        "assets": _other_files(folder) or None,
    }
    return about, sorted(lines, key=lambda line: line.name)


def _other_files(folder: Path) -> list[str]:
    weights = (".safetensors", ".index.json")
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != CONFIG and not p.name.endswith(weights))


def _gguf(path: Path) -> tuple[dict[str, Any], list[Line]]:
    if importlib.util.find_spec("gguf") is None:
        raise RequestError(f"{path}: is read by the package gguf, which is not installed: pip install gguf")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        about = {"model_type": reader.fields["general.architecture"].contents()}
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is damaged or cut short ({error}). Fetch it again.") from error
    # A file states the fastest dimension first.
    return about, [
        Line(
            name=str(t.name),
            shape=tuple(int(size) for size in t.shape[::-1]),
            dtype=t.tensor_type.name,
            bytes=int(t.n_bytes),
        )
        for t in reader.tensors
    ]


def _torch_dist(found: Found) -> tuple[dict[str, Any], list[Line]]:
    from ckpt.store.torch_folder import manifest_of_torch_dist

    manifest = manifest_of_torch_dist(open_files(found.address))
    lines = [
        Line(name=line.name, shape=line.shape, dtype=line.dtype, bytes=line.bytes, pieces=line.pieces)
        for line in _manifest_lines(manifest)
    ]
    return {"files": len(manifest.files), "left_out": list(manifest.extra.get("left_out", [])) or None}, lines


# ---------------------------------------------------------------------------------------------------------- the tree

Row = tuple[str, str, str, str, str]
# Children by name; a tensor's own line stands under "".
Node = dict[str, Any]


def _folded(lines: Sequence[Line]) -> Iterator[Row]:
    """The tree in which equal branches are one: layers, experts, moments."""
    root: Node = {}
    for line in lines:
        node = root
        for part in line.name.split("."):
            node = node.setdefault(part, {})
        node[""] = line
    yield from _branches([root], 0)


def _branches(nodes: Sequence[Node], depth: int) -> Iterator[Row]:
    """What is below nodes that are all alike."""
    groups: dict[Any, list[str]] = {}
    for part in sorted((part for part in nodes[0] if part), key=_by_number):
        child = nodes[0][part]
        # Tensors keep their names: query and output are not one because they have one shape.
        groups.setdefault(part if "" in child and not part.isdecimal() else _shape_of(child), []).append(part)
    for parts in groups.values():
        below = [node[part] for node in nodes for part in parts]
        label, node = "  " * depth + _label(parts), below[0]
        while "" not in node and len(node) == 1:
            # A branch of one goes on in the same line.
            part = next(iter(node))
            below = [each[part] for each in below]
            label, node = f"{label}.{part}", below[0]
        if "" in node:
            yield _row(label, [each[""] for each in below])
        if set(node) - {""}:
            if "" not in node:
                yield label, "", "", "", ""
            yield from _branches(below, depth + 1)


def _row(label: str, lines: Sequence[Line]) -> Row:
    """A tensor, or several that are alike but for where they lie."""
    first, times = lines[0], f" × {len(lines)}" if len(lines) > 1 else ""
    pieces, ranks = sum(line.pieces for line in lines), max((line.ranks or 0 for line in lines), default=0)
    where = (
        ""
        if pieces == len(lines) and ranks <= 1
        else f"{pieces} pieces" + (f" of {ranks} rank{'s' * (ranks > 1)}" if ranks else "")
    )
    shape = f"[{', '.join(map(str, first.shape))}]{times}"
    return label, first.dtype, shape, size(sum(line.bytes for line in lines)), where


def _shape_of(node: Node) -> Any:
    """What makes branches alike: names below, shapes and types."""
    return tuple(
        (name, (below.shape, below.dtype) if isinstance(below, Line) else _shape_of(below))
        for name, below in sorted(node.items())
    )


def _by_number(part: str) -> tuple[int, int, str]:
    return (1, int(part), "") if part.isdecimal() else (0, 0, part)


def _label(parts: Sequence[str]) -> str:
    """`0-2, 5`, or names: `{exp_avg, exp_avg_sq}`."""
    if len(parts) == 1:
        return parts[0]
    if not all(part.isdecimal() for part in parts):
        return f"{{{', '.join(parts)}}}"
    ranges: list[list[int]] = []
    for number in map(int, parts):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
