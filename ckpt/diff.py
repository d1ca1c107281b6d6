"""Two states compared tensor by tensor, in bounded memory, whatever they are stored in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ckpt.dtype import item_bytes
from ckpt.plan import divided
from ckpt.source import MODEL_PREFIX, Form, Source
from ckpt.stream import Opener, Progress
from ckpt.workers import share_out, shares
from core.state.box import Box, whole

CHUNK_BYTES = 32 << 20

Verdict = Literal["equal", "near", "differs", "other type", "other shape", "only in A", "only in B"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor compared. a, b: its forms, None where it is not there.

    absolute: the largest |a - b|. relative: the largest |a - b| / max(|a|, |b|), 0 where both are 0. Both are infinite where one of the
    two is not a number or infinite and the other is something else; None where nothing could be compared.
    """

    name: str
    verdict: Verdict
    a: Form | None = None
    b: Form | None = None
    absolute: float | None = None
    relative: float | None = None


def compare(
    a: Opener,
    b: Opener,
    *,
    tolerance: float | None = None,
    model_only: bool = False,
    workers: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
) -> list[Difference]:
    """Every tensor of either, by name. A process has one chunk of at most chunk_bytes of each in memory at a time.

    tolerance: the largest absolute difference that is `near`; with one, values alone count and other types do not. Without one,
    every difference is a difference. workers: processes. Raises CheckpointError where a tensor is damaged.
    """
    forms_a, forms_b = _forms(a(), model_only), _forms(b(), model_only)
    names = sorted(forms_a.keys() | forms_b.keys())
    shared = [n for n in names if n in forms_a and n in forms_b and forms_a[n].shape == forms_b[n].shape]
    sizes = [_bytes(forms_a[name]) for name in shared]
    found: dict[str, Difference] = {}
    done = 0

    def hear(said: int | Difference) -> None:
        nonlocal done
        if isinstance(said, Difference):
            found[said.name] = said
        else:
            done += said
            if progress:
                progress(done, sum(sizes))

    compared = _Comparer(a=a, b=b, names=tuple(shared), tolerance=tolerance, chunk_bytes=chunk_bytes)
    if workers == 1 or len(shared) < 2:
        compared(range(len(shared)), hear)
    else:
        share_out(compared, shares(sizes, workers), hear, "the comparison")
    alone = {n: _not_compared(n, forms_a.get(n), forms_b.get(n)) for n in names if n not in found}
    return [found.get(name) or alone[name] for name in names]


def _not_compared(name: str, a: Form | None, b: Form | None) -> Difference:
    verdict: Verdict = "only in B" if a is None else "only in A" if b is None else "other shape"
    return Difference(name=name, verdict=verdict, a=a, b=b)


@dataclass(frozen=True, kw_only=True)
class _Comparer:
    """Compares tensors of one shape, in whichever process it is called."""

    a: Opener
    b: Opener
    names: tuple[str, ...]
    tolerance: float | None
    chunk_bytes: int

    def __call__(self, numbers: Sequence[int], say: Callable[[int | Difference], None]) -> None:
        a, b = self.a(), self.b()
        with ThreadPoolExecutor(1) as pool:
            for name in (self.names[number] for number in numbers):
                form_a, form_b = a.forms[name], b.forms[name]
                absolute = relative = 0.0
                for box in _chunks(form_a, form_b, self.chunk_bytes):
                    other = pool.submit(b.read, name, box)
                    found = differences(a.read(name, box), other.result())
                    absolute, relative = max(absolute, found[0]), max(relative, found[1])
                    say(box.elements * item_bytes(form_a.dtype))
                verdict = _verdict(form_a, form_b, absolute, self.tolerance)
                say(Difference(name=name, a=form_a, b=form_b, absolute=absolute, relative=relative, verdict=verdict))


def is_same(difference: Difference) -> bool:
    """Whether nothing of it counts."""
    return difference.verdict in ("equal", "near")


def differences(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest absolute and relative difference of two tensors of one shape; see `Difference`."""
    if a.dtype == b.dtype and _bits_equal(a, b):
        return 0.0, 0.0
    whole_numbers = not (a.is_floating_point() or b.is_floating_point())
    absolute = relative = 0.0
    # In pieces, so that the wide types take little memory.
    for x, y in zip(a.reshape(-1).split(1 << 18), b.reshape(-1).split(1 << 18), strict=True):
        apart, wide_x, wide_y = _apart(x, y, whole_numbers)
        larger = torch.maximum(wide_x.abs(), wide_y.abs())
        part = torch.where(apart == 0, 0.0, torch.where(apart.isinf(), math.inf, apart / larger))
        absolute, relative = max(absolute, float(apart.max())), max(relative, float(part.max()))
    return absolute, relative


def _apart(a: Tensor, b: Tensor, whole_numbers: bool) -> tuple[Tensor, Tensor, Tensor]:
    """|a - b| in float64, infinite where it is no number; and both in float64."""
    x, y = a.to(torch.float64), b.to(torch.float64)
    same = (x == y) | (x.isnan() & y.isnan())
    if whole_numbers:
        # Beyond 2^53 neighbours are one number in float64; as integers they are not.
        same = a == b if a.dtype == b.dtype else same
        apart = torch.where(same, 0.0, (x - y).abs().clamp_min(1.0))
        return apart, x, y
    apart = torch.where(same, 0.0, (x - y).abs())
    return torch.where(apart.isnan(), math.inf, apart), x, y


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _forms(source: Source, model_only: bool) -> dict[str, Form]:
    return {n: form for n, form in source.forms.items() if not model_only or n.startswith(MODEL_PREFIX)}


def _bytes(form: Form) -> int:
    return math.prod(form.shape) * item_bytes(form.dtype)


def _chunks(a: Form, b: Form, chunk_bytes: int) -> Sequence[Box]:
    box = whole(a.shape)
    if not box.elements:
        return ()
    wider = max(item_bytes(a.dtype), item_bytes(b.dtype))
    return divided(box, -(-box.elements * wider // chunk_bytes))


def _verdict(a: Form, b: Form, absolute: float, tolerance: float | None) -> Verdict:
    if tolerance is None and a.dtype != b.dtype:
        return "other type"
    if absolute == 0:
        return "equal"
    return "near" if tolerance is not None and absolute <= tolerance else "differs"
