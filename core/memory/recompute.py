"""Activations that are made again in the backward instead of being kept (report section 4.1.4), in two forms.

`recompute` runs a region again: its inputs are kept, nothing that it saves inside. `discard` makes the outputs of a cheap part again:
what the part itself saves stays, and what its consumers save of its outputs does not. Both work on what autograd saves
(`torch.autograd.graph.saved_tensors_hooks`) and leave its graph as it is, so that gradients are bitwise the same, weight gradients
that are put off and modules that gather their parameters included. They nest: what one form keeps is handed to the hooks around it.

A region's communication runs again, too. All ranks do that at one place of their backwards: where the first gradient enters the region,
whatever a rank has saved in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), of which nothing but the inputs is kept.

    function: runs once more in the backward, on the same inputs, and has to do the same: its random numbers follow from what
    it is given. Without gradients it runs once, and nothing is kept anyway.
    """
    (out,), _ = recompute_with(lambda *given: ((function(*given),), None), *inputs)
    return out


def recompute_with(
    function: Callable[..., tuple[tuple[Tensor, ...], T]], *inputs: Tensor
) -> tuple[tuple[Tensor, ...], T]:
    """`recompute` of a function with several results: tensors, and whatever else its first run told.

    The rest may hold no tensor through which gradients go on: those alone that are among the tensors know when to run again.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    region = _Region(function, inputs)
    with saved_tensors_hooks(region.number, region.take):
        tensors, rest = function(*inputs)
    live = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    out = list(tensors)
    for i, tensor in zip(live, _Entrance.apply(region, *(tensors[i] for i in live)) if live else (), strict=True):
        out[i] = tensor
    return tuple(out), rest


def discard(part: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], consumer: Callable[..., T]) -> T:
    """consumer(*part(*inputs)), where what the consumer saves of the part's outputs is not kept.

    When the backward of the consumer needs one of them, the part runs once more for all of them, without gradients; they
    live until the last that was saved has been used. Views of an output count as the output. The inputs are kept: as a rule the part has
    saved them anyway. An output that is a piece of an input is left alone.
    """
    if not torch.is_grad_enabled():
        return consumer(*part(*inputs))
    made = _Part(part, inputs)
    outputs = made.run(inputs)
    try:
        with saved_tensors_hooks(made.pack, made.unpack):
            return consumer(*outputs)
    finally:
        made.forget()


class _Inputs:
    """Tensors kept as autograd keeps any, so that the hooks around see them, until this is dropped."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._needed = tuple(tensor.requires_grad for tensor in tensors)
        self._held: tuple[Tensor, ...] | None = None
        # Without a gradient to pass on autograd would keep nothing.
        self._node: Any = None
        if any(self._needed):
            self._node = _Hold.apply(*tensors).grad_fn
        else:
            self._held = tuple(tensors)

    def get(self) -> tuple[Tensor, ...]:
        """The tensors as beginnings of a graph of their own."""
        tensors = self._node.saved_tensors if self._held is None else self._held
        return tuple(x.detach().requires_grad_(need) for x, need in zip(tensors, self._needed, strict=True))


class _Hold(torch.autograd.Function):
    """Keeps its inputs. What it gives reaches no loss."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nothing is computed from what is held")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What two runs of a region have to agree about."""

    shape: torch.Size
    dtype: torch.dtype


class _Region:
    """One run of a region between its forward and its backward: saved tensors are numbers until it has run again."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self._function = function
        self._inputs: _Inputs | None = _Inputs(inputs)
        self._kinds: list[_Kind] = []
        self._made: dict[int, Tensor] = {}

    def number(self, x: Tensor) -> int:
        """In place of what the first run saves."""
        self._kinds.append(_Kind(shape=x.shape, dtype=x.dtype))
        return len(self._kinds) - 1

    def take(self, number: int) -> Tensor:
        """What the second run saved there; given away once."""
        self.run_again()
        assert number in self._made, "what a recomputed region saved is used twice: one backward may follow a forward"
        return self._made.pop(number)

    def run_again(self) -> None:
        """The second run, unless it has been."""
        if self._inputs is None:
            return
        inputs, self._inputs = self._inputs.get(), None
        found: list[Tensor] = []

        def keep(x: Tensor) -> None:
            # Without its place in the second graph, which nobody differentiates.
            found.append(x.detach())

        with torch.enable_grad(), saved_tensors_hooks(keep, _nothing_to_unpack):
            self._function(*inputs)
        kinds = [_Kind(shape=x.shape, dtype=x.dtype) for x in found]
        assert kinds == self._kinds, "a recomputed region did something else than in the forward"
        self._made = dict(enumerate(found))


def _nothing_to_unpack(packed: object) -> Tensor:
    raise AssertionError("the graph of a second run is not differentiated")


class _Entrance(torch.autograd.Function):
    """Where gradients enter a region: of all its nodes the first to run in the backward, on every rank."""

    @staticmethod
    def forward(ctx: Any, region: _Region, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.region.run_again()
        return None, *grads


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ticket:
    """Stands for a saved piece of an output: of which part, which output, and where the piece lies in its storage."""

    part: _Part
    number: int
    output: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Part:
    """A part whose outputs are made again when they are needed."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self._function, self._inputs, self._outside = function, _Inputs(inputs), _Outside()
        # Of the first run while its consumers run: every output, and of each storage the first output that lies there. Autograd holds
        # on to the hooks, hence to this object, so that what it does not forget would be kept after all.
        self._first: tuple[Tensor, ...] = ()
        self._where: dict[int, int] = {}
        self._layouts: dict[int, tuple[object, ...]] = {}
        # Numbers, not the tickets themselves: those hold this object.
        self._waiting: set[int] = set()
        self._tickets = 0
        self._again: tuple[Tensor, ...] | None = None

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The first run, on the inputs as they are."""
        self._first = self._function(*inputs)
        held = {_storage(x) for x in inputs}
        for i, x in enumerate(self._first):
            if _storage(x) not in held:
                self._where.setdefault(_storage(x), i)
        return self._first

    def forget(self) -> None:
        """The consumers have run."""
        self._first, self._where = (), {}

    def pack(self, x: Tensor) -> object:
        """In place of what a consumer saves."""
        i = self._where.get(_storage(x))
        if i is None or x.dtype != self._first[i].dtype:
            return self._outside.pack(x)
        self._layouts[i] = _layout(self._first[i])
        number, self._tickets = self._tickets, self._tickets + 1
        self._waiting.add(number)
        size, stride, offset = tuple(x.shape), x.stride(), int(x.storage_offset())
        return _Ticket(part=self, number=number, output=i, size=size, stride=stride, offset=offset)

    def unpack(self, packed: Any) -> Tensor:
        """What was saved. The last piece of an output that is taken leaves nothing behind."""
        # What a part around this one has packed may be a ticket, too.
        if not isinstance(packed, _Ticket) or packed.part is not self:
            return self._outside.unpack(packed)
        if self._again is None:
            with torch.no_grad():
                self._again = self._function(*self._inputs.get())
        whole = self._again[packed.output]
        assert _layout(whole) == self._layouts[packed.output], "a part made something else again than in the forward"
        piece = whole.as_strided(packed.size, packed.stride, packed.offset)
        self._waiting.discard(packed.number)
        if not self._waiting:
            self._again = None
        return piece


def _layout(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


def _storage(x: Tensor) -> int:
    """Which memory a tensor lies in; unlike its address, on meta too."""
    return x.untyped_storage()._cdata


class _Outside:
    """The hooks around a block, by which what the block keeps is kept: torch itself asks the innermost ones alone."""

    def __init__(self) -> None:
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, x: Tensor) -> object:
        """As if there were no hooks within."""
        # Detached, or a node that saves its own output would hold itself.
        return x.detach() if self._hooks is None else self._hooks[0](x)

    def unpack(self, packed: Any) -> Tensor:
        """The reverse of `pack`."""
        return packed if self._hooks is None else self._hooks[1](packed)
