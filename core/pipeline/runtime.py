"""Executes one rank's actions of a schedule over the parts that the rank holds (contract 6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.groups import Group, Pipe
from core.pipeline.action import Action

Spot = tuple[int, int]  # a part of the whole pipeline, and a microbatch
Work = Callable[[], None]


class PartWork(Protocol):
    """What the runtime needs of the parts of one pipeline rank."""

    def forward(self, chunk: int, microbatch: int, received: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What goes to the next part (None behind the last), and this part's share of the loss (None without any)."""
        ...

    def received_shape(self, chunk: int, microbatch: int) -> tuple[int, ...]:
        """The shape of `received`; its dtype is that of the pipes."""
        ...

    def putting_off(self, backward: Work) -> list[Work]:
        """Run `backward` without its weight gradients; what computes those afterwards."""
        ...

    def after_backward(self) -> None:
        """Called when a backward, or weight gradients, have left new gradients."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How parts reach each other: the pipeline group and its pipes, the dtype and device of what travels."""

    pp: Group
    pipes: Mapping[Pipe, Group]
    virtual: int
    dtype: torch.dtype
    device: torch.device


@dataclass(kw_only=True)
class _Live:
    """A microbatch at a part between its forward and its backward."""

    received: Tensor | None
    out: Tensor | None
    share: Tensor | None


@dataclass(kw_only=True)
class _Run:
    """The state of one execution. Tensors that wait for their next use lie under (part, microbatch)."""

    work: PartWork
    pipeline: Pipeline
    live: dict[Spot, _Live] = field(default_factory=dict)
    put_off: dict[Spot, list[Work]] = field(default_factory=dict)
    activations: dict[Spot, Tensor] = field(default_factory=dict)
    gradients: dict[Spot, Tensor] = field(default_factory=dict)
    under_way: dict[Action, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    sent: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque)

    @property
    def parts(self) -> int:
        """Parts of the whole pipeline."""
        return self.pipeline.pp.size * self.pipeline.virtual

    def part(self, chunk: int) -> int:
        """The place of this rank's `chunk` in the whole pipeline."""
        return chunk * self.pipeline.pp.size + self.pipeline.pp.position

    def do(self, action: Action) -> None:
        """Execute one action."""
        spot = self.part(action.chunk), action.microbatch
        match action.kind:
            case "forward":
                self.forward(action.chunk, action.microbatch)
            case "backward":
                self.backward(spot)
            case "input_gradient":
                self.put_off[spot] = self.work.putting_off(lambda: self.backward(spot))
            case "weight_gradient":
                for add in self.put_off.pop(spot):
                    add()
                self.work.after_backward()
            case "combined":
                assert action.backward_chunk is not None and action.backward_microbatch is not None
                other = self.part(action.backward_chunk), action.backward_microbatch
                self.combined(action.chunk, action.microbatch, other)
            case "send_activation":
                self.send(self.activations.pop((spot[0] + 1, spot[1])), "activation", spot[0] + 1)
            case "send_gradient":
                self.send(self.gradients.pop((spot[0] - 1, spot[1])), "gradient", spot[0] - 1)
            case "receive_activation" | "receive_gradient":
                self.arrive(action, spot)

    def forward(self, chunk: int, microbatch: int) -> None:
        """Run a part on what it received; what it makes waits for the next part."""
        part = self.part(chunk)
        received = self.activations.pop((part, microbatch), None)
        out, share = self.work.forward(chunk, microbatch, received)
        if torch.is_grad_enabled():
            self.live[part, microbatch] = _Live(received=received, out=out, share=share)
        if out is not None and part + 1 < self.parts:
            self.activations[part + 1, microbatch] = _leaf(out)

    def backward(self, spot: Spot) -> None:
        """Differentiate a part; the gradient of what it received waits for the part before."""
        live = self.live.pop(spot)
        gradient = self.gradients.pop(spot, None)
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for tensor, of_tensor in ((live.out, gradient), (live.share, None)):
            if tensor is not None and tensor.requires_grad:
                roots.append(tensor)
                gradients.append(of_tensor)
        torch.autograd.backward(roots, gradients)
        if live.received is not None:
            assert live.received.grad is not None, "what a part receives reaches what it makes"
            self.gradients[spot[0] - 1, spot[1]] = live.received.grad
        self.work.after_backward()

    def combined(self, chunk: int, microbatch: int, other: Spot) -> None:
        """A forward and a backward that hide each other's communication, where the mapping has a baton for them."""
        baton = self.pipeline.pp.baton
        if baton is None:
            self.forward(chunk, microbatch)
            self.backward(other)
        else:
            baton.together(lambda: self.forward(chunk, microbatch), lambda: self.backward(other))

    def send(self, tensor: Tensor, kind: str, to_part: int) -> None:
        """Send to the rank of another part; returns at once."""
        pp = self.pipeline.pp
        to = to_part % pp.size
        pipe = self.pipeline.pipes[kind, to > pp.position]
        pipe.count("send", tensor.nbytes)
        # Kept until it has left. An empty tensor is known to the receiver, and need not travel.
        held = tensor.detach().contiguous()
        started = dist.isend(held, group=pipe.handle, group_dst=to) if held.numel() else None
        if started is not None:
            self.sent.append((held, started))
        self.let_go()

    def let_go(self, *, wait: bool = False) -> None:
        """Forget what has left, the oldest first: a step sends as much as all its activations together. wait: until all has left.

        Gloo never says so before it is waited for: there everything is kept until the end.
        """
        while self.sent and (wait or self.sent[0][1].is_completed()):
            self.sent.popleft()[1].wait()

    def post(self, action: Action) -> None:
        """Start to receive, so that it goes on while something else computes."""
        activation = action.kind == "receive_activation"
        part, pp = self.part(action.chunk), self.pipeline.pp
        source = (part - 1 if activation else part + 1) % pp.size
        if activation:
            shape = self.work.received_shape(action.chunk, action.microbatch)
        else:
            out = self.live[part, action.microbatch].out
            assert out is not None
            shape = tuple(out.shape)
        buffer = torch.empty(shape, dtype=self.pipeline.dtype, device=self.pipeline.device)
        pipe = self.pipeline.pipes["activation" if activation else "gradient", pp.position > source]
        started = dist.irecv(buffer, group=pipe.handle, group_src=source) if buffer.numel() else None
        self.under_way[action] = buffer, started

    def arrive(self, action: Action, spot: Spot) -> None:
        """Wait for what was to be received."""
        if action not in self.under_way:
            self.post(action)
        buffer, started = self.under_way.pop(action)
        if started is not None:
            started.wait()
        if action.kind == "receive_activation":
            self.activations[spot] = _leaf(buffer)
        else:
            self.gradients[spot] = buffer


def execute(actions: Sequence[Action], work: PartWork, pipeline: Pipeline) -> None:
    """Do this rank's actions in order. Receives are posted one computation ahead of their use.

    With gradients disabled a schedule of forwards is expected. Collective over the pipeline group, each rank with its own list.
    """
    run = _Run(work=work, pipeline=pipeline)
    for i, action in enumerate(actions):
        if not action.kind.startswith(("send", "receive")):
            for coming in actions[i + 1 :]:
                if not coming.kind.startswith(("send", "receive")):
                    break
                if coming.kind.startswith("receive") and _ready(run, coming):
                    run.post(coming)
        run.do(action)
    run.let_go(wait=True)


def _ready(run: _Run, receive: Action) -> bool:
    """Whether the shape of what comes is known yet: a gradient has that of an output that may be just being made."""
    return receive.kind == "receive_activation" or (run.part(receive.chunk), receive.microbatch) in run.live


def _leaf(tensor: Tensor) -> Tensor:
    """The same data as the start of a graph of its own."""
    return tensor.detach().requires_grad_(torch.is_grad_enabled())
