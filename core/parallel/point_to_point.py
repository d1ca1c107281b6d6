"""Messages between the ranks of a group, under way while the host goes on; autograd does not see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class Hop:
    """`x` goes to one rank, and `elements` numbers of its dtype come from another.

    x: [n], contiguous. to, source: positions in the group, counted round it (-1 is the last). n may differ between ranks, and the
    receiver knows it: what has no elements is not sent at all, so that a rank without a part in a hop says so by an empty x and 0.
    """

    x: Tensor
    to: int
    elements: int
    source: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Hops under way. No tensor of them may be read or written before `wait`; all are kept alive until then."""

    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """What came, hop by hop. On a GPU the stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received


def start_hops(hops: Sequence[Hop], group: Group, *, tag: int = 0) -> Exchange:
    """Start some hops together, in all directions at once.

    tag: of the first hop, that of the next is one more: tells apart what is under way together. All ranks of the group call it with
    as many hops, in the same order of tags. On NCCL the group must have communicated before where some rank has nothing to send
    (its first call has to be everyone's).
    Raises ValueError if an `x` is not one contiguous dimension, or if a group of one rank is to receive other than what it sends.
    """
    for hop in hops:
        if hop.x.dim() != 1 or not hop.x.is_contiguous():
            raise ValueError(f"a sent tensor has one contiguous dimension, not shape {tuple(hop.x.shape)}")
        if group.alone and hop.elements != hop.x.numel():
            raise ValueError(f"a rank alone sends itself {hop.x.numel()} elements and cannot receive {hop.elements}")
    sent = tuple(hop.x for hop in hops)
    if group.alone:
        return Exchange(received=sent, sent=sent, works=())
    received = tuple(hop.x.new_empty(hop.elements) for hop in hops)
    messages = []
    for number, (hop, into) in enumerate(zip(hops, received, strict=True)):
        for call, part, position in ((dist.isend, hop.x, hop.to), (dist.irecv, into, hop.source)):
            # Tensors on the meta device, of a plan, have nothing to send; torch's calls over rows know that, these do not.
            if part.numel() and not part.is_meta and not group.imagined:
                peer = group.ranks[position % group.size]
                messages.append(dist.P2POp(call, part, peer, group.handle, tag + number))
        group.count("send", hop.x.nbytes)
    return Exchange(received=received, sent=sent, works=tuple(dist.batch_isend_irecv(messages)) if messages else ())
