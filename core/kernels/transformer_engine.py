"""Grouped products by NVIDIA's Transformer Engine, behind the three functions of core/kernels/grouped_products.py.

Its interface is called as `transformer_engine.pytorch.cpp_extensions.general_grouped_gemm` has it in release 2.20.2, and is compared
with that when it is loaded: a call whose arguments have come to mean something else would be silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from core.errors import ConfigError, Fault
from core.kernels.pieces import Pieces

# Its parameters in order, with what is passed where nothing is said ("" where something must be).
SIGNATURE = (
    ("A", ""),
    ("B", ""),
    ("out", ""),
    ("quantization_params", ""),
    ("out_dtype", ""),
    ("layout", "'TN'"),
    ("m_splits", "None"),
    ("gelu", "False"),
    ("grad", "False"),
    ("accumulate", "False"),
    ("bias", "None"),
    ("use_bias", "False"),
    ("use_split_accumulator", "False"),
    ("D_dtype", "None"),
    ("single_output", "False"),
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The products of Transformer Engine, through its `general_grouped_gemm`. Counts must be known to the host.

    For matrices a and b that lie in memory by rows, a layout says what is multiplied: TN gives b @ a.T, NN gives b @ a, and NT gives
    b.T @ a.
    """

    gemm: Callable[..., Any]

    def forward(self, rows: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
        """rows [R, K] times each piece's weight [N, K], transposed: [R, N]."""
        return self._of_pieces(rows, weight, "TN", rows.new_empty(len(rows), weight.shape[1]), pieces)

    def of_rows(self, grad: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
        """grad [R, N] times each piece's weight [N, K]: [R, K]."""
        return self._of_pieces(grad, weight, "NN", grad.new_empty(len(grad), weight.shape[2]), pieces)

    def of_weight(self, grad: Tensor, rows: Tensor, pieces: Pieces) -> Tensor:
        """Each piece's grad.T @ rows: [E, N, K]."""
        counts = _counts(pieces)
        out = rows.new_empty(len(counts), grad.shape[1], rows.shape[1])
        for of_piece, count in zip(out, counts, strict=True):
            if not count:
                of_piece.zero_()
        left, right = grad.contiguous().split(counts), rows.contiguous().split(counts)
        held = [e for e, count in enumerate(counts) if count]
        if held:
            splits = [counts[e] for e in held]  # which its binding demands, and does not use here
            self._call(
                [right[e] for e in held],
                [left[e] for e in held],
                [out[e] for e in held],
                "NT",
                grad=True,
                m_splits=splits,
            )
        return out

    def _of_pieces(self, x: Tensor, weight: Tensor, layout: str, out: Tensor, pieces: Pieces) -> Tensor:
        """All rows in one output, piece after piece; pieces without rows are not named to it."""
        counts = _counts(pieces)
        matrices, parts = weight.contiguous(), x.contiguous().split(counts)
        held = [e for e, count in enumerate(counts) if count]
        if held:
            self._call(
                [matrices[e] for e in held],
                [parts[e] for e in held],
                [out],
                layout,
                m_splits=[counts[e] for e in held],
                single_output=True,
                grad=layout == "NN",
            )
        return out

    def _call(self, a: list[Tensor], b: list[Tensor], out: list[Tensor], layout: str, **more: Any) -> None:
        self.gemm(a, b, out, [None] * len(a), out[0].dtype, layout=layout, **more)


def load() -> Engine:
    """The installed Transformer Engine. Raises ConfigError where there is none, or one whose interface is another."""
    try:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm as gemm
    except (ImportError, OSError) as error:
        raise _refused(f"cannot be loaded here ({error})") from None
    found = tuple(
        (name, "" if given.default is inspect.Parameter.empty else repr(given.default))
        for name, given in inspect.signature(gemm).parameters.items()
    )
    if found[: len(SIGNATURE)] != SIGNATURE or any(not default for _, default in found[len(SIGNATURE) :]):
        shown = ", ".join(f"{name}={default}" if default else name for name, default in found)
        raise _refused(f"its general_grouped_gemm({shown}) is not that of release 2.20.2, which is called here")
    return Engine(gemm=gemm)


def _refused(rule: str) -> ConfigError:
    works = (
        "transformer_engine after `pip install 'transformer-engine[pytorch]==2.20.2'`, or unset for what the device has"
    )
    return ConfigError([Fault(setting="ZOO_EXPERTS", value="transformer_engine", rule=rule, works=works)])


def _counts(pieces: Pieces) -> tuple[int, ...]:
    assert pieces.counts is not None, "Transformer Engine must be told how many rows each piece has"
    return pieces.counts
