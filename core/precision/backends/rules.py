"""What matrix units multiply, by compute capability and formats: the rules of cuBLAS, which torch and Transformer Engine both call."""

from __future__ import annotations

import torch

from core.precision.backends.machine import Machine
from core.precision.elements import E5M2
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor, element_of


def missing(machine: Machine, a: Format, b: Format, dtype: torch.dtype) -> str | None:
    """Why a machine does not multiply a by b to `dtype`; None where it does. A processor has torch's product of FP8 with one scale."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no scaled product ends in {dtype}"
    if machine.kind != "cpu" and element_of(a) == element_of(b) == E5M2:
        return "no matrix unit multiplies two operands of e5m2"
    if machine.kind == "hip":
        return "its layouts are those of NVIDIA's GPUs, and this one is AMD's"
    return _missing_pair(machine, a, b)


def _missing_pair(machine: Machine, a: Format, b: Format) -> str | None:
    match a, b:
        case PerTensor(), PerTensor():
            return machine.lacks((8, 9)) if machine.kind != "cpu" else None
        case Blocks(), Blocks():
            return _missing_blocks(machine, a, b)
        case (MX(), MX()) if element_of(a).bits == element_of(b).bits == 8:
            return machine.lacks((10, 0))
        case NVFP4(), NVFP4():
            return machine.lacks((10, 0))
    return f"no matrix unit multiplies {name_of(a)} by {name_of(b)}"


def _missing_blocks(machine: Machine, a: Blocks, b: Blocks) -> str | None:
    if not {a.block, b.block} <= {(1, 128), (128, 128)}:
        return f"no matrix unit multiplies {name_of(a)} by {name_of(b)}"
    if machine.kind == "cuda" and machine.capability[0] == 9:
        if a.block == b.block == (128, 128):
            return "one of two operands in blocks must be in blocks of 1x128"
        wants = "it needs CUDA 12.9 or newer, and this torch was built for {}.{}"
        return None if machine.cuda >= (12, 9) else wants.format(*machine.cuda)
    if a.power_of_two and b.power_of_two:  # as MX, whose scales are
        return machine.lacks((9, 0))
    return machine.lacks((9, 0)) or "above compute capability 9.0 scales of blocks must be powers of two"


def name_of(format: Format) -> str:
    """How a message calls a format."""
    match format:
        case PerTensor(element=element):
            return f"{element.name} with one scale"
        case Blocks(element=element, block=(rows, columns), power_of_two=power):
            return f"{element.name} in blocks of {rows}x{columns}" + (" under powers of two" if power else "")
        case MX(element=element):
            return f"MX {element.name}"
        case NVFP4():
            return "NVFP4"
