"""Runs rules over tensors in both directions: published tensors into our pieces, our pieces into published tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import CheckpointError
from core.state.box import Box
from core.state.rules import Choice, Derived, Piece, Rule, expand, match, pieces
from core.state.sharded import ShardedTensor

Read = Callable[[str, Box], Tensor]


@torch.no_grad()
def import_state(
    rules: Sequence[Rule | Derived], choice: Choice, targets: Mapping[str, ShardedTensor], read: Read
) -> None:
    """Fill every target from published tensors; `read(name, box)` gives a piece of one, and only what is needed is read.

    Every target is NaN before, so that whatever was not written is found. Raises CheckpointError where a NaN is left, or where
    a published copy differs from the tensor that it should repeat.
    """
    for name, target in targets.items():
        target.data.fill_(float("nan"))
        written = 0
        for piece in _pieces(rules, choice, target):
            _inside(target.data, target.box, piece.target).copy_(read(piece.name, piece.box).view(piece.target.shape))
            written += piece.box.elements
        assert written == target.box.elements, f"{name}: {written} of {target.box.elements} elements have a source"
        if target.data.isnan().any():
            sources = ", ".join(sorted({piece.name for piece in _pieces(rules, choice, target)})[:3])
            raise CheckpointError(
                f"{name} has values that are not numbers after it was read from {sources}: damaged weights"
            )
        for copy in choice.copies[name]:
            if not torch.equal(read(copy, target.box).to(target.data.dtype), target.data):
                raise CheckpointError(
                    f"{copy} should be a copy of what {name} is read from, but differs; the model has one"
                )


@dataclass(frozen=True, kw_only=True)
class Export:
    """A published tensor that can be assembled from this rank's pieces: which of them fill which of its boxes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Piece, ShardedTensor], ...]

    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        elements = 1
        for size in self.shape:
            elements *= size
        return sum(piece.box.elements for piece, _ in self.parts) == elements

    @torch.no_grad()
    def assemble(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on the CPU, in `dtype` (None: that of the pieces)."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype)
        for piece, source in self.parts:
            out[piece.box.slices] = (
                _inside(source.data, source.box, piece.target).reshape(piece.box.shape).to("cpu", out.dtype)
            )
        return out


def export_state(rules: Sequence[Rule | Derived], state: Mapping[str, ShardedTensor]) -> dict[str, Export]:
    """Every published tensor of which this rank holds something, in the form that is written, by name."""
    parts: dict[str, list[tuple[Piece, ShardedTensor]]] = {}
    for source in state.values():
        for piece in expand(rules, source.name, source.shape, source.box):
            parts.setdefault(piece.name, []).append((piece, source))
    return {
        name: Export(name=name, shape=found[0][0].shape, dtype=found[0][1].data.dtype, parts=tuple(found))
        for name, found in parts.items()
    }


def copy_names(rules: Sequence[Rule | Derived], state: Mapping[str, ShardedTensor]) -> dict[str, str]:
    """Published names that may repeat a tensor -> the published name of that tensor."""
    found = {}
    for source in state.values():
        rule, numbers = match(rules, source.name)
        for copy in rule.copies:
            found[copy.format(**numbers)] = expand(rules, source.name, source.shape)[0].name
    return found


def _pieces(rules: Sequence[Rule | Derived], choice: Choice, target: ShardedTensor) -> list[Piece]:
    """What must be read for a target."""
    _, numbers = match(rules, target.name)
    return list(pieces(choice.forms[target.name], numbers, target.shape, target.box))


def _inside(data: Tensor, box: Box, inner: Box) -> Tensor:
    """The view of `data`, which holds `box`, that is `inner`."""
    return data[tuple(slice(i - o, i - o + s) for i, o, s in zip(inner.offset, box.offset, inner.shape, strict=True))]
