"""What the parts of a pipeline rank keep and need for one microbatch, put together from the traces of their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from core.config.memory import MemoryConfig, OffloadName
from launch.plan.survivors import Piece
from launch.plan.trace import PieceTrace


@dataclass(frozen=True, kw_only=True)
class Load:
    """One piece as a schedule sees it, in bytes.

    kept: waits for the backward, without the input; stream: the input, if it waits too; passing: the input, if it does not, but is
    there all through the forward. forward, backward: what the fullest moment of either needs beyond that. late: waits for the weights' gradients, where those are put off. on_host: waits in host memory.
    """

    kept: int
    stream: int
    passing: int
    forward: int
    backward: int
    late: int
    on_host: int

    def plus(self, many: Load, few: Load, times: float) -> Load:
        """This load and so many times the difference of two others."""
        both = zip(asdict(self).items(), asdict(many).values(), asdict(few).values(), strict=True)
        return Load(**{name: here + round(times * (high - low)) for (name, here), high, low in both})


# Operands of a recipe: elements and their scales. (Four-bit elements lie two to a byte.)
_LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8)


def load_of(trace: PieceTrace, memory: MemoryConfig) -> Load:
    """A piece with offloading, which is declared and not built yet, and planned by the rule below."""
    on_device = trace.kept_bytes
    away = sum(piece.num_bytes for piece in trace.kept if _offloaded(piece, memory.offload))
    stream = trace.stream_bytes if trace.keeps_input else 0
    if stream and "attn_norm" in memory.offload and _in_layer(trace):
        away, stream = away + stream, 0
        on_device += trace.stream_bytes
    return Load(
        kept=on_device - away,
        stream=stream,
        passing=0 if stream else trace.stream_bytes,
        forward=max(0, trace.forward_peak - trace.kept_bytes),
        backward=max(0, trace.backward_peak - trace.kept_bytes) + away,
        late=trace.late,
        on_host=away,
    )


def _offloaded(piece: Piece, names: Sequence[OffloadName]) -> bool:
    """Whether a kept piece is the input of a part that is named; the input of the first norm is that of the whole layer."""
    words = piece.module.split(".")
    # A layer takes what no module of its own takes: the sum behind attention, and rows on their way to the experts.
    layer, last = len(words) == 2 and words[0] == "layers", words[-1]
    found: OffloadName | None = None
    if piece.dtype in _LOW:
        found = _low_operand(words)
    elif not piece.dtype.is_floating_point or piece.shape[-1:] == (1,):
        found = None
    elif piece.of_attention == "operand":
        found = "core_attn"
    elif last == "attention" and piece.in_product:
        found = "attn_proj"
    elif (layer or last == "mlp") and piece.in_product:
        found = "expert_fc1"
    elif layer:
        found = "mlp_norm"
    elif last == "experts" and not piece.in_product:
        found = "moe_act"
    return found is not None and found in names


def _low_operand(words: Sequence[str]) -> OffloadName | None:
    """Of which named part an operand in low precision is the input: the module that keeps it multiplies it."""
    if words[-1] == "experts":
        return "expert_fc1"
    return "attn_proj" if words[-2:] == ["attention", "output"] else None


def _in_layer(trace: PieceTrace) -> bool:
    return any(piece.module.startswith("layers.") for piece in trace.kept)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a part itself holds at its fullest moment of a forward or backward: kept activations, kept of the loss, and all it needs."""

    activations: int
    logits: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PartLoad:
    """One part of a pipeline rank with one microbatch: what it keeps, and its fullest moments."""

    activations: int
    logits: int
    late: int
    on_host: int
    forward: Moment
    backward: Moment


@dataclass(frozen=True, kw_only=True)
class PlacedPiece:
    """A piece in its part. stream: whether its input is memory of its own: false for what the part receives. loss: of the head."""

    load: Load
    own_input: bool
    loss: bool = False


def part_load(pieces: Sequence[PlacedPiece], *, received: int, out: int, shared: int) -> PartLoad:
    """The pieces of a part in order. received, out: bytes that come in and that go on, which wait too; shared: what all layers use."""
    # What was received, and its gradient, live as long as anything that was made of it.
    held, logits, late, on_host = received + shared, 0, 2 * received, 0
    forward, backward = Moment(activations=held, logits=0, total=held), Moment(activations=0, logits=0, total=0)
    for placed in pieces:
        load = placed.load
        held += load.stream if placed.own_input else 0
        if placed.loss:
            logits += load.kept
        else:
            held += load.kept
        late, on_host = late + load.late, on_host + load.on_host
        passing = load.passing if placed.own_input else 0
        forward = _fuller(forward, held, logits, load.forward + passing)
        backward = _fuller(backward, held, logits, load.backward)
    held += out
    return PartLoad(
        activations=held,
        logits=logits,
        late=late,
        on_host=on_host,
        forward=_fuller(forward, held, logits, 0),
        backward=_fuller(backward, held, logits, 0),
    )


def _fuller(before: Moment, activations: int, logits: int, needs: int) -> Moment:
    total = activations + logits + needs
    return before if before.total > total else Moment(activations=activations, logits=logits, total=total)
