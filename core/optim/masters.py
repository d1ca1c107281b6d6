"""Float32 masters that do not lie whole on the device: their low bits beside bfloat16 weights, or a share of them in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.optim.kept import Kept, Range


class WholeMaster:
    """A master that lies whole on the device: nothing has to be fetched or put together."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.view(-1)
        self.parts: tuple[Kept, ...] = ()

    def widen(self, numbers: Sequence[Tensor], each: Range) -> Tensor:
        """The piece itself, to be changed in place."""
        return self.tensor[slice(*each)]

    def settle(self, numbers: Sequence[Tensor], each: Range, value: Tensor) -> None:
        """Nothing: it was changed in place."""


class HostMaster:
    """Float32 masters of flat `parameters` of fewer bits, of which the first `on_host` wait in host memory between steps.

    Parameters are rounded to nearest even, as beside masters that lie on the device.
    """

    def __init__(self, parameters: Tensor, on_host: int) -> None:
        self.parameters = parameters
        (kept,) = self.parts = (Kept(parameters.numel(), torch.float32, parameters.device, on_host=on_host),)
        kept.host.copy_(parameters[:on_host])
        kept.here.copy_(parameters[on_host:])

    def widen(self, numbers: Sequence[Tensor], each: Range) -> Tensor:
        """The masters of a piece, to be changed in place."""
        return numbers[0]

    def settle(self, numbers: Sequence[Tensor], each: Range, value: Tensor) -> None:
        """Take the new masters of a piece, and round them into the parameters."""
        if value.data_ptr() != numbers[0].data_ptr():
            numbers[0].copy_(value)
        self.parameters[slice(*each)].copy_(value)


class Remainder:
    """Float32 masters of flat bfloat16 `parameters` as those and the low 16 bits, 2 bytes instead of 4 (report section 4.1.6).

    The bits of a float32 number, read as a whole number, are 2^16 times those of the bfloat16 parameter plus a remainder from -2^15 to
    2^15 - 1, which int16 holds: so every master comes back bit by bit. For that the parameter must be the nearest bfloat16 and, where
    two are equally near, the one away from zero, not the even one as otherwise: a tie is remainder -2^15. That differs from the
    other rounding in one of 2^17 numbers, by half of a bfloat16's last place each way, and masters do not know of it.
    """

    def __init__(self, parameters: Tensor, on_host: int = 0) -> None:
        assert parameters.dtype == torch.bfloat16, f"{parameters.dtype} is not the upper half of float32"
        self.parameters = parameters
        self.parts = (Kept(parameters.numel(), torch.int16, parameters.device, on_host=on_host),)

    def widen(self, numbers: Sequence[Tensor], each: Range) -> Tensor:
        """The masters of a piece, put together."""
        high = self.parameters[slice(*each)].view(torch.int16).to(torch.int32) << 16
        return (high + numbers[0].to(torch.int32)).view(torch.float32)

    def settle(self, numbers: Sequence[Tensor], each: Range, value: Tensor) -> None:
        """Part the new masters of a piece into parameters and remainders."""
        bits = value.view(torch.int32)
        high = (bits + (1 << 15)) >> 16
        self.parameters[slice(*each)].copy_(high.to(torch.int16).view(torch.bfloat16))
        numbers[0].copy_(bits - (high << 16))


# Masters as a bucket or an optimizer has them.
Master = Tensor | HostMaster | Remainder


def worked_on(master: Master) -> WholeMaster | HostMaster | Remainder:
    """A master as the update takes it."""
    return WholeMaster(master) if isinstance(master, Tensor) else master
