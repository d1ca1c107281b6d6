"""Messages between neighbours of a ring, under way while the host goes on; autograd does not see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A transfer under way. Neither tensor may be read or written before `wait`; both are kept alive until then."""

    received: Tensor
    sent: Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        """What came from the rank before me. On a GPU the stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received


def ring_shift(x: Tensor, elements: int, group: Group, *, tag: int = 0) -> Shift:
    """Start to send `x` to the next rank of the group and to receive `elements` numbers of its dtype from the one before.

    x: [n], contiguous; n may differ between ranks, and the receiver knows it: what has no elements is not sent at all.
    tag: tells apart shifts that are under way together. All ranks of the group call it, in the same order of tags. On NCCL the
    group must have communicated before where some rank of the ring has nothing to send (its first call has to be everyone's).
    Raises ValueError if `x` is not one contiguous dimension, or if a group of one rank is to receive other than what it sends.
    """
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"a shifted tensor has one contiguous dimension, not shape {tuple(x.shape)}")
    if group.handle is None:
        if elements != x.numel():
            raise ValueError(f"a rank alone sends itself {x.numel()} elements and cannot receive {elements}")
        return Shift(received=x, sent=x, works=())
    following, preceding = (group.ranks[(group.position + step) % group.size] for step in (1, -1))
    received = x.new_empty(elements)
    calls = [(dist.isend, x, following), (dist.irecv, received, preceding)]
    # Tensors on the meta device, of a plan, have nothing to send; torch's calls over rows know that, these do not.
    calls = [call for call in calls if call[1].numel() and not call[1].is_meta]
    messages = [dist.P2POp(call, part, peer, group.handle, tag) for call, part, peer in calls]
    group.count("send", x.nbytes)
    return Shift(received=received, sent=x, works=tuple(dist.batch_isend_irecv(messages)) if messages else ())
