"""The element types that a checkpoint can hold, by the name that stands in its manifest."""

from __future__ import annotations

from core.errors import CheckpointError

# Name -> bytes of one element. The names are those of torch, numpy (with ml_dtypes) and Zarr v3 alike.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
CONVERTIBLE = frozenset({"float16", "bfloat16", "float32", "float64"})


def item_bytes(dtype: str) -> int:
    """The bytes of one element. Raises CheckpointError for a type that no checkpoint holds."""
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"dtype={dtype}: cannot be stored in a checkpoint. Works: {', '.join(ITEM_BYTES)}.")
    return ITEM_BYTES[dtype]


def loads_into(stored: str, target: str) -> bool:
    """Whether values of `stored` may fill a target of type `target`.

    The same type always; otherwise only between floating types that carry their own scale: an integer is a count or an
    index, and an 8-bit float means nothing without the scale that is stored beside it.
    """
    return stored == target or (stored in CONVERTIBLE and target in CONVERTIBLE)
