"""What a recipe says of an operand, as the formats that compute it."""

from __future__ import annotations

from core.config.recipe import Operand
from core.precision.elements import E2M1, E4M3, E5M2, Element
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor

_ELEMENTS: dict[str, Element] = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}


def format_of(operand: Operand) -> Format:
    """The number format of an operand, rounding and rotation aside."""
    element = _ELEMENTS[operand.element]
    match operand.scaling:
        case "tensor" | "delayed":
            return PerTensor(element=element)
        case "1x128":
            return Blocks(element=element, block=(1, 128), power_of_two=operand.power_of_two)
        case "128x128":
            return Blocks(element=element, block=(128, 128), power_of_two=operand.power_of_two)
        case "mx":
            return MX(element=element, rounding="up")
        case "nv":
            return NVFP4(block=(1, 16))
        case "nv16x16":
            return NVFP4(block=(16, 16))
