"""Which memory operations take and what of it is still held, by watching them: the way to ask real modules what they keep.

It sees what lives, whoever holds it: autograd, a custom function's context, a hook that packs, a closure that waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Matrix products, whose operands a recipe of fewer bits would keep in its own format.
_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
# Kernels of attention, whose operands and results stay in the format that they are computed in.
_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu")
_WATCHED = (*_PRODUCTS, *_ATTENTION)


@dataclass(kw_only=True)
class Piece:
    """Memory that one operation took: bytes, shape and dtype of the tensor that it was taken for, and the module that was running.

    in_product: whether a matrix product has read it. of_attention: whether an attention kernel has read it, or made it.
    """

    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    in_product: bool = False
    of_attention: Literal["", "operand", "result"] = ""


@dataclass(kw_only=True)
class Watch:
    """Follows all memory taken inside `watching`. live: by the identity of the storage. peak: the most bytes held at once."""

    live: dict[int, tuple[weakref.ref[Any], Piece]] = field(default_factory=dict)
    ignored: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    current: int = 0
    peak: int = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, nor views of them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            self.forget(key)
            self.ignored[key] = weakref.ref(storage, partial(self._unknown, key))

    def holds(self, tensor_id: int) -> bool:
        """Whether an ignored storage of this identity still lives."""
        return tensor_id in self.ignored

    def forget(self, tensor_id: int) -> None:
        """Count memory of this identity no longer."""
        found = self.live.pop(tensor_id, None)
        if found is not None:
            self.current -= found[1].num_bytes

    def pieces(self) -> list[Piece]:
        """What is held now, oldest first."""
        return [piece for _, piece in self.live.values()]

    def reset_peak(self) -> None:
        """Count the most from now on."""
        self.peak = self.current

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what is computed inside, forward and backward."""
        with _Mode(self):
            yield

    def name_modules(self, model: nn.Module) -> Callable[[], None]:
        """From now on tell memory by the module of `model` that takes it; gives what ends that."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.modules.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: self.modules.pop() and None, always_call=True))

        def end() -> None:
            for hook in hooks:
                hook.remove()

        return end

    def took(self, tensor: Tensor) -> None:
        """Note the memory of a result, if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.live or key in self.ignored:
            return
        piece = Piece(
            num_bytes=storage.nbytes(),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            module=self.modules[-1] if self.modules else "",
        )
        self.live[key] = weakref.ref(storage, lambda _: self._freed(key)), piece
        self.current += piece.num_bytes
        self.peak = max(self.peak, self.current)

    def used(self, operation: str, read: list[Tensor], made: list[Tensor]) -> None:
        """Note what an operation was that has read and made some memory."""
        attention = operation in _ATTENTION
        for tensor in read:
            found = self._piece(tensor)
            if found is not None and attention:
                found.of_attention = "operand"
            elif found is not None:
                found.in_product = True
        for tensor in made if attention else ():
            found = self._piece(tensor)
            if found is not None:
                found.of_attention = "result"

    def _piece(self, tensor: Tensor) -> Piece | None:
        found = self.live.get(id(tensor.untyped_storage()))
        return None if found is None else found[1]

    def _unknown(self, key: int, _: weakref.ref[Any]) -> None:
        self.ignored.pop(key, None)

    def _freed(self, key: int) -> None:
        found = self.live.pop(key, None)
        if found is not None:
            self.current -= found[1].num_bytes


class _Mode(TorchDispatchMode):
    """Tells a watch of every operation below autograd."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        for tensor in made:
            self.watch.took(tensor)
        name = func._schema.name.removeprefix("aten::")
        if name in _WATCHED:
            self.watch.used(name, [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)], made)
        return out
