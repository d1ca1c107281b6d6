"""What of a device decides which products its matrix units have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device. capability: NVIDIA's compute capability, and cuda: the version that torch was built for; (0, 0) where there is none."""

    kind: Literal["cpu", "cuda", "hip", "other"]
    name: str
    capability: tuple[int, int] = (0, 0)
    cuda: tuple[int, int] = (0, 0)

    def lacks(self, capability: tuple[int, int]) -> str | None:
        """That a compute capability or a newer one is needed, where this is none."""
        if self.kind == "cuda" and self.capability >= capability:
            return None
        has = "{}.{}".format(*self.capability) if self.kind == "cuda" else "none"
        return "it needs compute capability {}.{} or newer, and {} has {}".format(*capability, self.name, has)


def machine_of(device: torch.device) -> Machine:
    """What is known of a device; one of CUDA is asked, and so must be there."""
    if device.type == "cpu":
        return Machine(kind="cpu", name="this processor")
    if device.type != "cuda":
        return Machine(kind="other", name=f"a device of kind {device.type}")
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return Machine(kind="hip", name=name)
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return Machine(
        kind="cuda", name=name, capability=torch.cuda.get_device_capability(device), cuda=(int(major), int(minor))
    )
