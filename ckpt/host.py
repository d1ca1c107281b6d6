"""Tensors to numpy arrays and back, bit for bit, in every element type of ckpt/dtype.py."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from core.errors import CheckpointError

# Types that numpy has only through ml_dtypes: (torch type, type of the same width that both know, numpy type).
_FOREIGN = {
    "bfloat16": (torch.bfloat16, torch.uint16, np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
    "float8_e8m0fnu": (torch.float8_e8m0fnu, torch.uint8, np.dtype(ml_dtypes.float8_e8m0fnu)),
}


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor's values in row-major order: shared with a contiguous tensor on the host, else copied there."""
    host = tensor.detach().cpu().contiguous()
    name = dtype_name(tensor)
    if name in _FOREIGN:
        _, same_width, numpy_dtype = _FOREIGN[name]
        return host.view(same_width).numpy().view(numpy_dtype)
    try:
        return host.numpy()
    except TypeError:
        raise CheckpointError(f"dtype {name} cannot be stored in a checkpoint") from None


def empty_bytes(size: int) -> np.ndarray:
    """Memory of uint8 to read into, uninitialised. Of numpy's own, large pieces begin 16 bytes behind a page's start, where
    copying from the pages of a file takes four times as long as at torch's multiples of 64."""
    return torch.empty(size, dtype=torch.uint8).numpy()


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor on the host, as uint8 that can be written to."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def from_bytes(content: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor whose values are `content` (uint8, row by row), sharing its memory where that is writable."""
    content = np.require(content, requirements=("C", "W"))
    return torch.from_numpy(content).view(getattr(torch, dtype)).view(shape)
