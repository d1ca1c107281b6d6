"""What a computation leaves alive, counted from outside: every storage that an operation made and that something still holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """While it is entered, notes every storage that an operation gives, but for those of `known`."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        # Held, so that no new storage takes the place of one of them.
        self.known = [tensor.untyped_storage() for tensor in known]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, *but: Tensor) -> int:
        """Bytes of all that is still held, besides these tensors."""
        left_out = {storage._cdata for storage in self.known} | {x.untyped_storage()._cdata for x in but}
        held = ((key, size) for key, (weak, size) in self.made.items() if not weak.expired())
        return sum(size for key, size in held if key not in left_out)
