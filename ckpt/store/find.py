"""The stores by name."""

from __future__ import annotations

from ckpt.store.protocol import Store
from ckpt.store.zarr import ZarrStore
from core.errors import RequestError

STORES = ("zarr", "torch_dist")


def find_store(name: str) -> Store:
    """The store called `name`. Raises RequestError for any other."""
    if name == "zarr":
        return ZarrStore()
    if name == "torch_dist":
        # Imports what torch has for distributed checkpoints, for which only those who use it have to wait.
        from ckpt.store.torch_dist import TorchDistStore

        return TorchDistStore()
    raise RequestError(f"store={name}: is not a store. Works: {' or '.join(STORES)}")
