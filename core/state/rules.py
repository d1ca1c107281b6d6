"""How published tensors fill ours, as data that runs in both directions: names with numbers in them, and pieces as boxes.

A rule names one pattern of our canonical tensors and the published tensors that hold the same numbers:

    Rule(name="layers.{layer}.mlp.experts.gate_up", forms=(
        (Part(name="model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", at=("expert", 0)),
         Part(name="model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", at=("expert", 1))),
    ))

The first form is the one that is written; every form is understood when read. Experts are numbers, so 10 comes after 9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from core.state.box import Box, intersect, whole

Shape = tuple[int, ...]
Numbers = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A part is number `index` of `count` equal pieces of its published tensor along the published `dimension`."""

    dimension: int
    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One published tensor, or one for each value of a number in its name, and the piece of ours that it fills.

    at: for the leading dimensions of ours, the index that the part fills: a number; the name of a number that stands in
    `name` in braces, which then counts that dimension; or None where the dimension is the published tensor's own, as every
    dimension after `at` is. share: which piece of the published tensor it is, where that tensor holds several parts.
    transposed: the published tensor has our last two dimensions in the other order. halves: its first dimension holds heads of so
    many rows, and of each head the rows of our two halves in turn (0, halves/2, 1, …), as files of llama.cpp have the rotated rows
    of queries and keys.
    """

    name: str
    at: tuple[int | str | None, ...] = ()
    share: Share | None = None
    transposed: bool = False
    halves: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Canonical tensors called `name`, and the published `forms` that hold them.

    copies: published names that may hold the same tensor again. They are compared when read, and written only where the
    folder that was read had them. float8: whether a folder whose weights are float8 holds these in scaled blocks (ckpt/float8.py):
    the matrices of linear layers, but none that chooses (router, embedding, head) or that is no matrix.
    """

    name: str
    forms: tuple[tuple[Part, ...], ...]
    copies: tuple[str, ...] = ()
    float8: bool = False


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Published tensors that follow from config.json, such as rotary frequencies: never read, never written."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`box` of the published tensor `name` of `shape` holds the `target` box of ours.

    own: which dimension of ours each published dimension is; the others have one element in `target`. Without a transposition it
    ascends, and the elements come in the same order.
    """

    name: str
    shape: Shape
    box: Box
    target: Box
    own: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """All that keeps a folder from being read as a model: names, and for a wrong shape what it is and what it should be."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def lines(self, most: int = 12) -> tuple[str, ...]:
        """One line per kind of fault, with the first `most` of each."""
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("of another shape", self.misshapen))
        return tuple(_line(kind, names, most) for kind, names in kinds if names)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """For a whole model: which form each canonical tensor is read from, the copies that are there, and what is wrong."""

    forms: Mapping[str, tuple[Part, ...]]
    copies: Mapping[str, tuple[str, ...]]
    faults: Faults


def plain(name: str, published: str, *, copies: tuple[str, ...] = (), float8: bool = False) -> Rule:
    """A rule for a tensor that is published as it is."""
    return Rule(name=name, forms=((Part(name=published),),), copies=copies, float8=float8)


def numbers_in(pattern: str, name: str) -> dict[str, int] | None:
    """The numbers that `name` has where `pattern` has braces, or None where it does not fit the pattern."""
    pieces = re.split(r"\{(\w+)\}", pattern)
    regex = "".join(rf"(?P<{p}>0|[1-9]\d*)" if i % 2 else re.escape(p) for i, p in enumerate(pieces))
    found = re.fullmatch(regex, name)
    return {key: int(value) for key, value in found.groupdict().items()} if found else None


def match(rules: Sequence[Rule | Derived], name: str) -> tuple[Rule, dict[str, int]]:
    """The rule for the canonical tensor `name` and the numbers in its name. Raises LookupError unless exactly one fits."""
    fits = [
        (rule, numbers)
        for rule in rules
        if isinstance(rule, Rule) and (numbers := numbers_in(rule.name, name)) is not None
    ]
    if len(fits) != 1:
        raise LookupError(
            f"{len(fits)} rules fit the tensor {name}, not one: {', '.join(rule.name for rule, _ in fits)}"
        )
    return fits[0]


def pieces(form: tuple[Part, ...], numbers: Numbers, shape: Shape, box: Box | None = None) -> Iterator[Piece]:
    """What of which published tensors fills `box` (None: all) of a canonical tensor of `shape`: no element twice, none left out."""
    for part in form:
        yield from _pieces_of(part, numbers, shape, box or whole(shape))


def expand(rules: Sequence[Rule | Derived], name: str, shape: Shape, box: Box | None = None) -> tuple[Piece, ...]:
    """The pieces of the canonical tensor `name` in the published form that is written."""
    rule, numbers = match(rules, name)
    return tuple(pieces(rule.forms[0], numbers, shape, box))


def choose(rules: Sequence[Rule | Derived], wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> Choice:
    """How the published tensors `found` fill the canonical tensors `wanted`, both name -> shape; nothing is read for it."""
    forms: dict[str, tuple[Part, ...]] = {}
    copies: dict[str, tuple[str, ...]] = {}
    expected: dict[str, Shape] = {}
    for name, shape in wanted.items():
        rule, numbers = match(rules, name)
        forms[name] = _form_found(rule, numbers, shape, found)
        expected.update((piece.name, piece.shape) for piece in pieces(forms[name], numbers, shape))
        copies[name] = tuple(copy for copy in (c.format(**numbers) for c in rule.copies) if copy in found)
        expected.update((copy, shape) for copy in copies[name])
    derived = [rule.name for rule in rules if isinstance(rule, Derived)]
    unexpected = [n for n in found if n not in expected and all(numbers_in(pattern, n) is None for pattern in derived)]
    wrong = [f"{n} {list(found[n])} instead of {list(s)}" for n, s in expected.items() if n in found and found[n] != s]
    faults = Faults(
        missing=tuple(n for n in expected if n not in found), unexpected=tuple(unexpected), misshapen=tuple(wrong)
    )
    return Choice(forms=forms, copies=copies, faults=faults)


def _form_found(rule: Rule, numbers: Numbers, shape: Shape, found: Mapping[str, Shape]) -> tuple[Part, ...]:
    """The form of which most published tensors are there; the form that is written where none is."""
    if len(rule.forms) == 1:
        return rule.forms[0]
    there = [sum(piece.name in found for piece in pieces(form, numbers, shape)) for form in rule.forms]
    return rule.forms[there.index(max(there))]


def narrow(piece: Piece, box: Box) -> Piece | None:
    """What of a piece lies in `box` of its published tensor, or None where nothing does."""
    shared = intersect(piece.box, box)
    if shared is None:
        return None
    offset, shape = list(piece.target.offset), list(piece.target.shape)
    for published, ours in enumerate(piece.own):
        offset[ours] += shared.offset[published] - piece.box.offset[published]
        shape[ours] = shared.shape[published]
    return replace(piece, box=shared, target=Box(offset=tuple(offset), shape=tuple(shape)))


def _pieces_of(part: Part, numbers: Numbers, shape: Shape, box: Box) -> Iterator[Piece]:
    """The pieces of one part: one for each value of the numbers that count a dimension of ours."""
    at = (*part.at, *(None for _ in shape[len(part.at) :]))
    own = [d for d, index in enumerate(at) if index is None]
    if part.transposed:
        own[-2:] = own[:-3:-1]
    counted = [d for d, index in enumerate(at) if isinstance(index, str)]
    ranges = [range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True)]
    if any(isinstance(index, int) and index not in ranges[d] for d, index in enumerate(at)):
        return
    published, inner = _published(part.share, tuple(shape[d] for d in own), _dimensions(box, own))
    for values in product(*(ranges[d] for d in counted)):
        fixed = {d: index for d, index in enumerate(at) if isinstance(index, int)} | dict(
            zip(counted, values, strict=True)
        )
        names = dict(numbers) | {str(at[d]): value for d, value in zip(counted, values, strict=True)}
        target = Box(
            offset=tuple(fixed.get(d, o) for d, o in enumerate(box.offset)),
            shape=tuple(1 if d in fixed else s for d, s in enumerate(box.shape)),
        )
        piece = Piece(name=part.name.format(**names), shape=published, box=inner, target=target, own=tuple(own))
        yield from (piece,) if part.halves is None else _rows_in_turn(piece, part.halves)


def _rows_in_turn(piece: Piece, rows: int) -> Iterator[Piece]:
    """The piece row by row, each where a published head of `rows` rows has it: the first of each half, the second of each, …"""
    if piece.shape[0] % rows or rows % 2:
        raise ValueError(f"{piece.name}: {piece.shape[0]} rows are no heads of two halves of {rows} rows together")
    for row in range(piece.box.offset[0], piece.box.offset[0] + piece.box.shape[0]):
        one = narrow(piece, Box(offset=(row, *piece.box.offset[1:]), shape=(1, *piece.box.shape[1:])))
        if one is not None:
            half, place = divmod(row % rows, rows // 2)
            moved = row - row % rows + 2 * place + half
            yield replace(one, box=Box(offset=(moved, *one.box.offset[1:]), shape=one.box.shape))


def _published(share: Share | None, shape: Shape, box: Box) -> tuple[Shape, Box]:
    """Shape of the published tensor and `box` in it, where ours has `shape` and is the given share of it."""
    if share is None:
        return shape, box
    d, size = share.dimension, shape[share.dimension]
    offset = tuple(o + share.index * size if i == d else o for i, o in enumerate(box.offset))
    return tuple(s * share.count if i == d else s for i, s in enumerate(shape)), Box(offset=offset, shape=box.shape)


def _dimensions(box: Box, kept: Sequence[int]) -> Box:
    """The box in the kept dimensions only."""
    return Box(offset=tuple(box.offset[d] for d in kept), shape=tuple(box.shape[d] for d in kept))


def _line(kind: str, names: Sequence[str], most: int) -> str:
    """`3 missing: a, b, c`, cut after the first `most`."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} {kind}: {', '.join(names[:most])}{rest}"
