"""Runs rules over tensors in both directions: published tensors into our pieces, our pieces into published tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import CheckpointError
from core.state.box import Box, whole
from core.state.rules import Choice, Derived, Piece, Rule, Shape, expand, match, narrow, pieces
from core.state.sharded import ShardedTensor

Read = Callable[[str, Box], Tensor]
Rules = Sequence[Rule | Derived]


@torch.no_grad()
def import_state(rules: Rules, choice: Choice, targets: Mapping[str, ShardedTensor], read: Read) -> None:
    """Fill every target from published tensors; `read(name, box)` gives a piece of one, and only what is needed is read.

    Every target is NaN before, so that whatever was not written is found. Raises CheckpointError where a NaN is left, or where
    a published copy differs from the tensor that it should repeat.
    """
    for name, target in targets.items():
        parts = _parts(name, target.shape, target.box, (rules, choice))
        _fill(target.data, target.box, parts, read)
        _check(name, target.data, target.box, (parts, choice.copies[name], read))


@torch.no_grad()
def read_state(name: str, shape: Shape, box: Box, dtype: torch.dtype, where: tuple[Rules, Choice, Read]) -> Tensor:
    """The piece `box` of the canonical tensor `name` of `shape`, from published tensors; errors as for `import_state`."""
    rules, choice, read = where
    parts = _parts(name, shape, box, (rules, choice))
    if len(parts) == 1:
        out = _as_ours(read(parts[0].name, parts[0].box), parts[0]).to(dtype).contiguous()
    else:
        out = torch.empty(box.shape, dtype=dtype)
        _fill(out, box, parts, read)
    _check(name, out, box, (parts, choice.copies[name], read))
    return out


def _parts(name: str, shape: Shape, box: Box, where: tuple[Rules, Choice]) -> tuple[Piece, ...]:
    """The published pieces that are read for a box: together they have each of its elements."""
    rules, choice = where
    _, numbers = match(rules, name)
    parts = tuple(pieces(choice.forms[name], numbers, shape, box))
    written = sum(piece.box.elements for piece in parts)
    assert written == box.elements, f"{name}: {written} of {box.elements} elements have a source"
    return parts


def _fill(out: Tensor, box: Box, parts: Sequence[Piece], read: Read) -> None:
    """Write what published pieces hold into `out`, the piece `box` of ours."""
    out.fill_(float("nan"))
    for piece in parts:
        inside(out, box, piece.target).copy_(_as_ours(read(piece.name, piece.box), piece))


def _check(name: str, out: Tensor, box: Box, how: tuple[Sequence[Piece], Sequence[str], Read]) -> None:
    """Raises CheckpointError where a value is no number, or a copy has another one."""
    parts, copies, read = how
    # A maximum is no number where any of its elements is none, and takes a tenth of the time of looking at each.
    if out.numel() and out.amax().isnan():
        sources = ", ".join(sorted({piece.name for piece in parts})[:3])
        raise CheckpointError(
            f"{name} has values that are not numbers after it was read from {sources}: damaged weights"
        )
    for copy in copies:
        if not torch.equal(read(copy, box).to(out.dtype), out):
            raise CheckpointError(
                f"{copy} should be a copy of what {name} is read from, but differs; the model has one"
            )


@dataclass(frozen=True, kw_only=True)
class Source:
    """`piece` of a published tensor lies in the piece `box` of the canonical tensor `name`."""

    name: str
    box: Box
    piece: Piece


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published tensor and all that fills it. copies: further names under which a folder may hold it again.

    float8: whether a float8 folder has it in scaled blocks.
    """

    name: str
    shape: Shape
    sources: tuple[Source, ...]
    float8: bool = False
    copies: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def published_plan(
    rules: Rules, shapes: Mapping[str, Shape], boxes: Mapping[str, Sequence[Box]] | None = None
) -> tuple[Published, ...]:
    """The published tensors of the form that is written, in the order of `shapes`, canonical name -> global shape.

    boxes: the pieces in which each canonical tensor is had, once each (None: whole). Raises CheckpointError where these do not
    fill a published tensor exactly.
    """
    found: dict[str, list[Source]] = {}
    about: dict[str, tuple[Shape, Rule, tuple[str, ...]]] = {}
    for name, shape in shapes.items():
        rule, numbers = match(rules, name)
        copies = tuple(copy.format(**numbers) for copy in rule.copies)
        for box in (None,) if boxes is None else boxes[name]:
            for piece in expand(rules, name, shape, box):
                source = Source(name=name, box=box or whole(shape), piece=piece)
                found.setdefault(piece.name, []).append(source)
                about.setdefault(piece.name, (piece.shape, rule, copies))
    plan = []
    for name, sources in found.items():
        shape, rule, copies = about[name]
        held = sum(source.piece.box.elements for source in sources)
        if held != math.prod(shape):
            raise CheckpointError(
                f"{name} has {math.prod(shape)} elements, of which {held} are held by the pieces given"
            )
        matrix = rule.float8 and len(shape) == 2
        plan.append(Published(name=name, shape=shape, sources=tuple(sources), float8=matrix, copies=copies))
    return tuple(plan)


def part_of(source: Source, data: Tensor) -> Tensor:
    """What of a published tensor lies in `data`, which holds `source.box`: in the published order, data shared where it can be."""
    return _as_published(inside(data, source.box, source.piece.target), source.piece)


@torch.no_grad()
def read_published(published: Published, box: Box, read: Read, dtype: torch.dtype) -> Tensor:
    """The piece `box` of a published tensor; `read(name, box)` gives pieces of canonical tensors."""
    parts = [piece for source in published.sources if (piece := narrow(source.piece, box)) is not None]
    names = [source.name for source in published.sources if narrow(source.piece, box) is not None]
    if len(parts) == 1:
        return _as_published(read(names[0], parts[0].target), parts[0]).to(dtype).contiguous()
    out = torch.empty(box.shape, dtype=dtype)
    for name, piece in zip(names, parts, strict=True):
        inside(out, box, piece.box).copy_(_as_published(read(name, piece.target), piece))
    return out


def inside(data: Tensor, box: Box, inner: Box) -> Tensor:
    """The view of `data`, which holds `box`, that is `inner`."""
    return data[tuple(slice(i - o, i - o + s) for i, o, s in zip(inner.offset, box.offset, inner.shape, strict=True))]


def _as_ours(data: Tensor, piece: Piece) -> Tensor:
    """Published data [piece.box.shape] as the target box of ours."""
    order = sorted(range(len(piece.own)), key=piece.own.__getitem__)
    return data.permute(order).reshape(piece.target.shape)


def _as_published(data: Tensor, piece: Piece) -> Tensor:
    """Our data [piece.target.shape] as the box of the published tensor."""
    own = sorted(piece.own)
    return data.reshape([piece.target.shape[d] for d in own]).permute([own.index(d) for d in piece.own])
